"""Keep a model's compiled decode step between processes: what precompile has to be told about our cache and models."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import transformers

from ..cache.storage import mark_for_compile
from ..precompile import Callbacks
from .cache import InertiaCache

_as_shells: contextvars.ContextVar[bool] = contextvars.ContextVar("inertia_fx_as_shells", default=False)


def callbacks(describe: Callable[..., str]) -> Callbacks:
    """Return what is special about the arguments of a decode step.

    Args:
        describe: (arguments of the step) -> what tells its compile from others', as text.
    """
    return Callbacks(
        describe=lambda *arguments: f"transformers {transformers.__version__} {describe(*arguments)}",
        complete=_mark_caches,
        pickling=_pickling_shells,
    )


def pickles_as_shell() -> bool:
    """Return whether a compiled model is to be pickled as what it is, with nothing in it: guards are being stored."""
    return _as_shells.get()


@contextlib.contextmanager
def _pickling_shells() -> Iterator[None]:
    token = _as_shells.set(True)
    try:
        yield
    finally:
        _as_shells.reset(token)


def _mark_caches(arguments: dict[str, Any]) -> None:
    """Mark dynamic dimensions again: marks on tensors do not survive pickling."""
    for value in arguments.values():
        if isinstance(value, InertiaCache) and value._state is not None:
            mark_for_compile(value.layers, value._state)
