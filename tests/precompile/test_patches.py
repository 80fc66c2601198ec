"""Patched classes and functions, hooks and edited files are noticed, by those who store and by those who read."""

from __future__ import annotations

import functools
import importlib
import pathlib
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.precompile import constants, toys
from tests.precompile.toys import Derived, Toy, check, helper, other_helper, step, toy, wrapped_function
from tests.precompile.tracings import Tracings


def patched_forward(self: Toy, x: Tensor) -> Tensor:
    return self.inner(x) - self.shift


def wrapped_forward(real: Any) -> Any:
    @functools.wraps(real)
    def forward(self: Any, x: Tensor) -> Tensor:
        return real(self, x) + 10

    return forward


def elsewhere(function: Any) -> Any:
    """The same code with the globals of another module."""
    return types.FunctionType(function.__code__, vars(constants))


PATCHES = {
    "replaced": (Toy, "forward", patched_forward),
    "wrapped": (Toy, "forward", wrapped_forward(Toy.forward)),
    "other globals": (Toy, "forward", elsewhere(Toy.forward)),
    "copied globals": (Toy, "forward", types.FunctionType(Toy.forward.__code__, vars(toys) | {"helper": other_helper})),
    "another signature": (constants, "count", constants.counted),
    "torch's": (nn.Linear, "forward", wrapped_forward(nn.Linear.forward)),
    "overridden": (nn.Linear, "__call__", lambda self, x: x),
    "defaults": (helper, "__defaults__", (None,)),
    "class attribute": (Toy, "factor", 9.0),
    "subclass attribute": (Derived, "factor", 9.0),
    "another module's constant": (constants, "SCALE", 7.0),
    "another module's list": (constants, "LIST", [1.0, 2.0, 3.0]),
    "another module's function": (constants, "scaled", other_helper),
    "another module's function, wrapped": (
        constants,
        "scaled",
        wrapped_function(constants.scaled),
    ),
    "decorated": (constants, "decorated", constants.adding(9.0)(helper)),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("when", ["while storing", "while reading"])
def test_patches_are_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch, patch: tuple[Any, str, Any], when: str
) -> None:
    """Dynamo has no guards on most of these, as it would have traced what it finds. A file on disk has not."""
    torch.manual_seed(0)
    model = Derived(1.0)
    if when == "while storing":
        with monkeypatch.context() as patched:
            patched.setattr(*patch, raising=False)
            check(step(), model)
        check(step(), model)
    else:
        check(step(), model)
        monkeypatch.setattr(*patch, raising=False)
        check(step(), model)
    assert tracings.count == 2


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "global"])
@pytest.mark.parametrize("when", ["while storing", "while reading"])
def test_hooks_are_noticed(folder: pathlib.Path, tracings: Tracings, kind: str, when: str) -> None:
    """Torch compiles them in and does not guard on them; so what has hooks is compiled in every process."""
    model = toy()
    if when == "while reading":
        check(step(), model)
    if kind == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 3)
    elif kind == "register_forward_hook":
        handle = model.inner.register_forward_hook(lambda module, inputs, output: output * 3)
    else:
        handle = model.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
    try:
        check(step(), model)
    finally:
        handle.remove()
    check(step(), model)
    assert tracings.count == 2


def test_a_changed_file_is_noticed(
    folder: pathlib.Path, tracings: Tracings, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "users_model.py"
    source.write_text("import os\n\ndef scaled(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    users = importlib.import_module("users_model")
    monkeypatch.setattr(toys, "helper", users.scaled)
    check(step(), toy())
    source.write_text("import os\n\ndef scaled(x):\n    return x * 7\n")
    importlib.invalidate_caches()
    importlib.reload(users)
    monkeypatch.setattr(toys, "helper", users.scaled)
    check(step(), toy())
    assert tracings.count == 2
