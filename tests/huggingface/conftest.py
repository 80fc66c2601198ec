"""A tiny Llama and its compiled twin, made once for each file of tests."""

from __future__ import annotations

from typing import Any

import pytest

import inertia_fx
from tests.common import models
from tests.common.generating import SETTINGS


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def compiled(model: Any) -> Any:
    return inertia_fx.compile(model, **SETTINGS, backend="eager")
