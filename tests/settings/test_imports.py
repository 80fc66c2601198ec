"""`import inertia_fx` loads nothing heavy, and the rooms below the Hugging Face one never load transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import inertia_fx


def loaded(statement: str) -> set[str]:
    """Which of the heavy packages are loaded after a statement in a fresh process."""
    code = f"import sys; {statement}; print([name for name in ('torch', 'transformers') if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(eval(run.stdout))


ROOMS = ("passes", "passes.find_attention", "cache", "kernels.reference", "backend", "debug", "ops")


def test_rooms_that_know_nothing_of_transformers() -> None:
    assert loaded(f"import {', '.join(f'inertia_fx.{room}' for room in ROOMS)}") == {"torch"}


def test_the_package_and_its_settings_load_nothing() -> None:
    assert loaded("import inertia_fx; inertia_fx.Config(ratio=0.5).budget_of(1000); inertia_fx.errors") == set()


def test_what_needs_transformers_loads_it() -> None:
    assert loaded("from inertia_fx import InertiaCache, compile") == {"torch", "transformers"}


def test_torch_finds_the_backend_by_its_name_alone() -> None:
    code = "import torch; from torch._dynamo import lookup_backend; print(lookup_backend('inertia_fx').__module__)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "inertia_fx.backend\n"


def test_public_names() -> None:
    assert {"Config", "InertiaCache", "cache", "compile", "debug", "errors", "verify"} <= set(dir(inertia_fx))
    assert inertia_fx.__version__ == "0.1.0"
    for room in ("cache", "debug", "verify", "errors"):
        assert getattr(inertia_fx, room).__name__ == f"inertia_fx.{room}"
    assert inertia_fx.compile.__module__ == "inertia_fx.api"
    with pytest.raises(AttributeError, match="module 'inertia_fx' has no attribute 'complie'"):
        inertia_fx.complie  # noqa: B018
    with pytest.raises(ImportError):
        exec("from inertia_fx import models")
