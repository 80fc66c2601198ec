"""inertia_fx: torch.compile passes that make a decoder evict the cached tokens it no longer attends to.

    model = inertia_fx.compile(model, ratio=0.9, alpha=0.8)      # then model.generate(...), as before

`ratio` is the fraction of the prompt's cached tokens that is evicted. InertiaKV, arXiv 2609.03515.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors

if TYPE_CHECKING:
    from . import cache as cache
    from . import debug as debug
    from . import verify as verify
    from .api import compile
    from .config import Config
    from .huggingface.cache import InertiaCache

__version__ = "0.1.0"

__all__ = ["Config", "InertiaCache", "compile", "errors"]

# Loaded when they are asked for: the passes, the kernels and the slot cache know nothing of transformers, and whoever
# uses them alone should not wait for its import.
_HOMES = {"Config": "config", "InertiaCache": "huggingface.cache", "compile": "api"}
_ROOMS = ("cache", "debug", "verify")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    elif name in _ROOMS:
        value = importlib.import_module(f".{name}", __name__)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value  # asked once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_ROOMS})
