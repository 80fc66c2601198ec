"""Optional packages: one error, which names them, what needs them and how to install them."""

from __future__ import annotations

import importlib.util

import pytest

from inertia_fx import errors
from inertia_fx.optional import require


def test_packages_that_are_there() -> None:
    require("torch", "json", extra="demo", purpose="A test")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name.startswith("g") else "found")
    with pytest.raises(errors.MissingPackageError) as caught:
        require("rich", "gguf", "gone", extra="demo", purpose="A test", otherwise="or do without")
    assert str(caught.value) == 'A test needs gguf and gone: pip install "inertia_fx[demo]", or do without'
    for kind in (errors.ConfigError, ValueError, ImportError):
        assert isinstance(caught.value, kind)
