"""Settings of the whole test run: one thread per worker, quiet transformers, hypothesis without deadlines."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers
from hypothesis import settings

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
settings.register_profile("inertia_fx", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("inertia_fx")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--deep", type=float, nargs="?", const=60.0, default=None, metavar="MINUTES",
        help="let the cache's state machine run for so long (60 minutes if no number is given)",
    )  # fmt: skip

    parser.addoption(
        "--part", choices=("measured", "rest"), default=None,
        help="the tests under which `make test` measures coverage (tracing slows Dynamo down), or all the others",
    )  # fmt: skip


MEASURED = (
    "api",
    "bounds",
    "course_of_events",
    "eviction",
    "ledger",
    "rows",
    "slot_cache",
    "storage",
    "clauses",
    "cli",
    "contract",
    "reference",
    "passes",
    "plan",
    "progress",
    "propositions",
    "regions",
    "console",
    "strategies",
    "check",
    "verify_command",
    "warm_start",
)
"""Files that reach nearly every branch; parity, contract, mutations and real models run what these have run."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow tests first, so that no worker is left alone with them; tests that share a compiled model on one worker."""
    part = config.getoption("--part")
    if part is not None:
        names = {f"test_{name}.py" for name in MEASURED}
        measured = [item.path.name in names and item.get_closest_marker("slow") is None for item in items]
        chosen = [
            item for item, is_measured in zip(items, measured, strict=True) if is_measured == (part == "measured")
        ]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if {"layers", "groups", "backend"} <= parameters.keys():
            group = "{layers}-{groups}-{backend}".format(**parameters)
            item.add_marker(pytest.mark.xdist_group(group))
        elif getattr(item, "cls", None) is not None:  # a DecoderContract compiles its model once per class
            item.add_marker(pytest.mark.xdist_group(item.cls.__name__))
