"""Word numbers for the report's tables and plots."""

from __future__ import annotations


def plural(number: int, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def share(value: float) -> str:
    """Return a fraction as per cent, with three digits."""
    return f"{100 * value:.3g} %"
