"""The command `inertia-fx`."""

from .commands import main

__all__ = ["main"]
