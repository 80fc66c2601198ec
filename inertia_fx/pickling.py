"""Tell objects what they are pickled for: a compiled step's guards ask for the type of a model, not for the model.

Whoever stores guards (`inertia_fx.precompile`) says so here; whoever is stored (`inertia_fx.huggingface`) asks here.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_for_guards: contextvars.ContextVar[bool] = contextvars.ContextVar("inertia_fx_pickling_for_guards", default=False)


@contextlib.contextmanager
def for_guards() -> Iterator[None]:
    """Mark everything that is pickled inside the block as part of a compiled step's guards."""
    token = _for_guards.set(True)
    try:
        yield
    finally:
        _for_guards.reset(token)


def is_for_guards() -> bool:
    """Tell whether there is a :func:`for_guards` block around us."""
    return _for_guards.get()
