"""Tell precompile what is special about the arguments of a compiled function: it knows neither caches nor models."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Hand in what depends on the arguments.

    Args:
        describe: (arguments) -> text that tells one compile from another; it becomes part of the file's name.
        complete: (the arguments by name, as read back from disk) -> None: puts back what tensors lose in pickling, such
            as the marks of dynamic dimensions, which guards are rebuilt from. Some arguments may be missing.
        pickling: a context manager around the pickling of the guards and of the arguments that they read.
    """

    describe: Callable[..., str]
    complete: Callable[[dict[str, Any]], None] = lambda arguments: None
    pickling: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
