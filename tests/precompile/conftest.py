"""A folder for compiled steps, and a count of what is traced."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from inertia_fx.precompile import capture, files
from tests.precompile.tracings import Tracings


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder of our own for the steps; what Inductor compiles stays where it always is."""
    folder = tmp_path_factory.mktemp("steps")
    monkeypatch.setattr(files, "folder", lambda: folder)
    with torch.no_grad():
        yield folder


@pytest.fixture
def tracings(monkeypatch: pytest.MonkeyPatch) -> Tracings:
    """Counts what is traced."""
    result, real = Tracings(), capture.capture

    def counted(*args: Any) -> Any:
        result.count += 1
        return real(*args)

    monkeypatch.setattr(capture, "capture", counted)
    return result
