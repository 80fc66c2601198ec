"""inertia_fx: torch.compile passes that make a decoder evict the cached tokens it no longer attends to.

    model = inertia_fx.compile(model, ratio=0.9, alpha=0.8)      # then model.generate(...), as before

`ratio` is the fraction of the prompt's cached tokens that is evicted. InertiaKV, arXiv 2609.03515.
"""

from . import errors
from .api import compile
from .config import Config
from .huggingface.cache import InertiaCache

__version__ = "0.1.0"

__all__ = ["Config", "InertiaCache", "compile", "errors"]
