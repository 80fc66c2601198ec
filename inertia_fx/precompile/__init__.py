"""Keep a compiled decode step on disk, guards included, for the next process.

`PrecompiledStep` is what the rest of the library uses (``inertia_fx.compile(..., warm_start=True)``). What is special
about the arguments of the compiled function reaches it as `Callbacks`.
"""

from .callbacks import Callbacks
from .step import PrecompiledStep

__all__ = ["Callbacks", "PrecompiledStep"]
