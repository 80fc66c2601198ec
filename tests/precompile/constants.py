"""A module that the toys use, so that tests can change what is in it."""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import Tensor

SCALE = 2.0
LIST = [1.0, 2.0]


def scaled(x: Tensor) -> Tensor:
    return x * SCALE * len(LIST)


def adding(amount: float) -> Any:
    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def decorated(x: Tensor) -> Tensor:
            return function(x) + amount

        return decorated

    return decorate


@adding(1.0)
def decorated(x: Tensor) -> Tensor:
    return x


def count(x: Tensor, args: Any) -> Tensor:
    return x * len(args)


def counted(x: Tensor, *args: Any) -> Tensor:
    return x * len(args)


constants = sys.modules[__name__]


def helper(x: Tensor) -> Tensor:
    return x * 11
