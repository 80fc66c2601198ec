"""Small models whose compiled steps are kept on disk, and what tests put in the place of their parts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from inertia_fx.precompile import Callbacks, PrecompiledStep
from tests.precompile import constants


def helper(x: Tensor, unused: Any = 1) -> Tensor:
    return x * 2 if unused is None else x * 2 * unused


class Toy(nn.Module):
    factor = 1.0

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        more = constants.decorated(constants.scaled(x)) * self.factor
        more = constants.count(more, (1, 2))
        return helper(self.inner(x)) + self.shift + more


class Derived(Toy):
    pass


def wrapped_function(real: Any) -> Any:
    @functools.wraps(real)
    def function(x: Tensor) -> Tensor:
        return real(x) + 10

    return function


def call(model: Toy, x: Tensor, settings: dict[str, Any]) -> Tensor:
    return model(x) * settings["factor"]


def step(function: Any = call) -> PrecompiledStep:
    return PrecompiledStep(function, {"backend": "inductor"}, Callbacks(lambda *_: "toy"))


def toy(shift: float = 1.0) -> Toy:
    torch.manual_seed(0)
    return Toy(shift)


X = torch.arange(8.0).reshape(2, 4)
SETTINGS = {"factor": 3.0}


def check(run: PrecompiledStep, model: Toy, x: Tensor = X, settings: dict[str, Any] = SETTINGS) -> None:
    """Equal to the eager function."""
    torch.testing.assert_close(run(model, x, settings), call(model, x, settings))


def other_helper(x: Tensor) -> Tensor:
    return x * 5
