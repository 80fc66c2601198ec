"""Bound what smoothing can misrank (the paper's Proposition 1, for the rule that really runs) and what a GPU must take."""

from .bounds import Rule
from .recurrence import derivation, symbols

__all__ = ["Rule", "derivation", "symbols"]
