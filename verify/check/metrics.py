"""Measure how alike two sets, rankings and distributions are, and tell rounded ties from real differences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ...errors import InputError
from ...optional import require

NEVER = 2**62
"""A budget that no run reaches."""


def jaccard(left: Collection[int], right: Collection[int]) -> float:
    """Return the Jaccard index |A and B| / |A or B|; 1 for two empty sets."""
    a, b = set(left), set(right)
    return len(a & b) / len(a | b) if a | b else 1.0


def spearman(left: Tensor, right: Tensor) -> float:
    """Return Spearman's rank correlation of two vectors, ties at their mean rank; 1 if either has no order to compare.

    Raises:
        InputError: unequal shapes, or values that are not finite.
    """
    same_shape("the two score vectors", left, right)
    finite("the scores to rank", left)
    finite("the scores to rank", right)
    if len(left.unique()) < 2 or len(right.unique()) < 2:
        return 1.0
    require("scipy", extra="verify", purpose="A rank correlation")
    from scipy.stats import spearmanr

    return float(spearmanr(left.numpy(), right.numpy()).statistic)


def top(scores: Tensor, budget: int) -> list[int]:
    """Return the indices of the `budget` largest of [L] scores, best first; of equal ones the newest stay (SPEC D7)."""
    return best_first(scores)[:budget].tolist()


def best_first(scores: Tensor) -> Tensor:
    """Return the indices of [L] scores in descending order, of equal ones the newest first (SPEC D7)."""
    return len(scores) - 1 - scores.flip(0).argsort(descending=True, stable=True)


def tie(momentum: Mapping[int, float], kept: Collection[int], expected: Collection[int]) -> float:
    """Return how far apart, relatively, the momenta are of the tokens by which two sets of survivors differ.

    Args:
        momentum: of every token that could be chosen, by position.
        kept, expected: the two choices, not equal.

    Returns:
        0 for exactly equal momenta; infinity where no rounding explains the difference: the choices differ in number, hold
        a token that was not there, or `expected` spares a token of less momentum (a protected one).
    """
    wrongly_kept, wrongly_gone = set(kept) - set(expected), set(expected) - set(kept)
    if len(wrongly_kept) != len(wrongly_gone) or not wrongly_kept <= momentum.keys():
        return math.inf
    low, high = min(momentum[at] for at in wrongly_kept), max(momentum[at] for at in wrongly_gone)
    return (high - low) / max(abs(high), abs(low), 1e-30) if high >= low else math.inf


def is_tie(
    reference: Mapping[int, float],
    own: Mapping[int, float],
    kept: Collection[int],
    expected: Collection[int],
    tolerance: float,
) -> bool:
    """Return whether rounding alone explains that `kept` survived and not `expected`, the reference's choice.

    Args:
        reference: the reference's momentum of every token that could be chosen, by position.
        own: the momentum under test, of those it knows.
        tolerance: relative difference of two momenta that rounding may turn around. Momenta which the reference finds
            exactly equal are a matter of age (SPEC D7), unless the ones under test do differ, and in that direction.
    """
    apart = tie(reference, kept, expected)
    if apart > 0:
        return apart <= tolerance
    gone = [own[at] for at in set(expected) - set(kept) if at in own]
    stay = [own[at] for at in set(kept) - set(expected) if at in own]
    return bool(gone and stay) and max(gone) < min(stay)


def divergence(full: Tensor, other: Tensor) -> float:
    """Return KL(full || other) in nats, of two vectors of next-token logits."""
    same_shape("the two vectors of logits", full, other)
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (full, other))
    return max(0.0, float((p.exp() * (p - q)).sum()))


def relative_error(full: Tensor, other: Tensor) -> float:
    """Return |other - full| / |full|, 2-norms."""
    same_shape("the two vectors of logits", full, other)
    return float((other.double() - full.double()).norm() / full.double().norm().clamp(min=1e-30))


def same_shape(what: str, left: Tensor, right: Tensor) -> None:
    """Raise :class:`InputError` unless the shapes agree."""
    if left.shape != right.shape:
        raise InputError(f"The shapes of {what} differ: {tuple(left.shape)} and {tuple(right.shape)}; they must agree.")


def finite(what: str, values: Tensor) -> None:
    """Raise :class:`InputError` if a value is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise InputError(
            f"{bad} of {values.numel()} values of {what} are not finite: the model overflows in this dtype, or its"
            " weights are broken. Try float32."
        )
