"""Settings of the whole test run: one thread per worker, quiet transformers, hypothesis' profiles, the order of tests."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import settings

from tests.common.examples import PROFILES

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
pytest.register_assert_rewrite("tests.common.cache_machine", "tests.common.propositions")
for name, number in PROFILES.items():
    settings.register_profile(name, deadline=None, derandomize=bool(os.environ.get("CI")), max_examples=number)
settings.load_profile("full")  # another one: pytest --hypothesis-profile quick


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep", type=float, nargs="?", const=60.0, default=None, metavar="MINUTES",
        help="let the cache's state machine run for so long (60 minutes if no number is given)",
    )  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker is left alone with them; tests that share a compiled model on one worker."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"layers", "groups", "backend"} <= parameters.keys():
            group = "{layers}-{groups}-{backend}".format(**parameters)
            item.add_marker(pytest.mark.xdist_group(group))
        elif getattr(item, "cls", None) is not None:  # a DecoderContract compiles its model once per class
            item.add_marker(pytest.mark.xdist_group(item.cls.__name__))
