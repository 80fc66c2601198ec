"""Record what one run of `check` saw of each sequence, and bound what rounding may do to it."""

from __future__ import annotations

import dataclasses
import itertools
import math

import torch
from torch import Tensor

from ...config import Config
from .metrics import is_tie, jaccard, tie


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Tolerances for what rounding alone may do in a model's dtype.

    Attributes:
        tie: relative difference of two momenta up to which either may be the smaller one.
        momentum: relative difference of a momentum from the reference's (tiny ones: relative to a thousandth of the mean).
        logits: difference of the logits from the reference's, relative to the largest logit.
    """

    tie: float
    momentum: float
    logits: float


TOLERANCES = {
    torch.float64: Tolerance(1e-4, 1e-4, 1e-4),  # scores and momentum are fp32 whatever the model's dtype (D8)
    torch.float32: Tolerance(1e-4, 1e-3, 1e-3),
    torch.float16: Tolerance(0.03, 0.05, 0.03),
    torch.bfloat16: Tolerance(0.1, 0.3, 0.1),
}


def tolerance_of(dtype: torch.dtype) -> Tolerance:
    """Return the tolerance of a model's dtype; bfloat16's for smaller ones."""
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


@dataclasses.dataclass
class StepRecord:
    """Record of one decode step of one sequence: the compiled model's side, then the reference's, from the same history.

    Attributes:
        retained, momentum: positions kept, and their momentum.
        decided: as :func:`.driver.decided_momentum`.
        refreshes: whether the step reads scores.
        attended: the reference's momentum before anything left, by position.
        chosen: what the reference would keep. reference_momentum: by position, of what is kept.
        evicted_mass: attention, mean over layers and heads, on the tokens that leave.
    """

    retained: list[int]
    momentum: Tensor
    decided: dict[int, float]
    logits: Tensor
    refreshes: bool
    reference_logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    attended: dict[int, float] = dataclasses.field(default_factory=dict)
    chosen: list[int] = dataclasses.field(default_factory=list)
    reference_momentum: dict[int, float] = dataclasses.field(default_factory=dict)
    evicted_mass: float = 0.0

    @property
    def momentum_error(self) -> float:
        """Largest relative difference from the reference's momenta; 1 if one is not finite, or of a token it does not hold."""
        expected = self.reference_momentum
        if not bool(torch.isfinite(self.momentum).all()) or not set(self.retained) <= expected.keys():
            return 1.0
        floor = max(1e-3 * math.fsum(expected.values()) / max(len(expected), 1), 1e-30)
        pairs = zip(self.retained, self.momentum.tolist(), strict=True)
        return max((abs(m - expected[at]) / max(abs(expected[at]), floor) for at, m in pairs), default=0.0)

    @property
    def logits_error(self) -> float:
        """Largest difference from the reference's logits, relative to the largest of them; 1 if one is not finite."""
        return logits_difference(self.logits, self.reference_logits)

    def tie(self) -> float:
        """How far apart, relatively, the momenta are of the tokens by which the two choices differ; 0 if exactly equal."""
        return tie(self.attended, self.retained, self.chosen)


def logits_difference(ours: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two vectors of logits, relative to the largest expected one; 1 if ours are not finite."""
    if not bool(torch.isfinite(ours).all()):
        return 1.0
    return float((ours - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


@dataclasses.dataclass
class RowRecord:
    """Record of one row: the full cache's tokens and logits (the prompt's first), and two sequences of the compiled model.

    `steps` decodes freely, `forced` is fed the full cache's tokens.
    """

    prompt: int
    budget: int
    full_tokens: list[int]
    full_logits: list[Tensor]
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    steps: list[StepRecord] = dataclasses.field(default_factory=list)
    forced: list[StepRecord] = dataclasses.field(default_factory=list)

    @property
    def first_divergence(self) -> int | None:
        """Index of the first generated token that is not the full cache's."""
        pairs = zip(self.tokens, self.full_tokens, strict=True)
        return next((index for index, (ours, full) in enumerate(pairs) if ours != full), None)

    @property
    def together(self) -> int:
        """Steps in which both sequences are fed the same tokens."""
        return len(self.steps) if self.first_divergence is None else self.first_divergence

    def first_eviction(self, config: Config) -> int:
        """The step at whose end the row evicts for the first time (it may lie beyond the run)."""
        return max(config.evict_after, self.budget + 1 - self.prompt)

    def churn(self, config: Config) -> list[float]:
        """1 - Jaccard of each kept set with the one before, after the first eviction."""
        kept = [step.retained for step in self.steps[self.first_eviction(config) - 1 :]]
        return [1 - jaccard(before, after) for before, after in itertools.pairwise(kept)]


@dataclasses.dataclass
class RunRecord:
    """Record of one run. `slots` and `nbytes` are the cache's after each step, `slot_bytes` of one slot in all layers."""

    config: Config
    dtype: torch.dtype
    rows: list[RowRecord]
    slots: list[int]
    nbytes: list[int]
    slot_bytes: int

    @property
    def tolerance(self) -> Tolerance:
        return tolerance_of(self.dtype)

    def is_tie(self, step: StepRecord, first: bool) -> bool:
        """Whether rounding explains that the step kept other tokens than the reference would have.

        At a `first` eviction the momenta of what left are gone with it, so exact ties cannot be told from near ones.
        """
        if step.retained == step.chosen:
            return False
        exact = first and step.tie() == 0
        return exact or is_tie(step.attended, step.decided, step.retained, step.chosen, self.tolerance.tie)
