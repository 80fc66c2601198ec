"""Make `inertia_fx` importable from this checkout, installed or not: importing this module does it."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import time

BEGAN = time.monotonic()
"""Before torch is imported, which takes seconds: scripts import this first."""

ROOT = pathlib.Path(__file__).resolve().parents[2]


def make_importable() -> None:
    """Do what `pip install -e .` would. `pyproject.toml` maps inertia_fx.passes to passes/, and so on.

    Looking for submodules in the checkout's root as well as in inertia_fx/ comes to the same.
    """
    if "inertia_fx" in sys.modules:
        return
    places = [str(ROOT / "inertia_fx"), str(ROOT)]
    spec = importlib.util.spec_from_file_location(
        "inertia_fx", ROOT / "inertia_fx" / "__init__.py", submodule_search_locations=places
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["inertia_fx"] = module
    spec.loader.exec_module(module)


make_importable()
