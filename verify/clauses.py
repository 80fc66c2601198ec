"""The contract, clause by clause, over what one run of `check` saw."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..config import Config
from .metrics import is_tie, jaccard, tie
from .report import Finding

BUCKET = 64
"""Slots by which a row that is still filling up may be ahead of what it holds."""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What rounding alone may do, in a model's dtype.

    Attributes:
        tie: relative difference of two momenta up to which either may be the smaller one.
        momentum: difference of a momentum from the reference's, relative to the row's largest.
        logits: difference of the logits from the reference's, relative to the largest logit.
    """

    tie: float
    momentum: float
    logits: float


TOLERANCES = {
    torch.float64: Tolerance(1e-4, 1e-4, 1e-4),  # scores and momentum are fp32 whatever the model's dtype (D8)
    torch.float32: Tolerance(1e-4, 1e-4, 1e-3),
    torch.float16: Tolerance(0.03, 0.02, 0.03),
    torch.bfloat16: Tolerance(0.1, 0.05, 0.1),
}


@dataclasses.dataclass
class Step:
    """One decode step of one row: the compiled model's side (`decided`: as `decided_momentum`), then the reference's."""

    retained: list[int]
    momentum: Tensor
    decided: dict[int, float]
    logits: Tensor
    forced_retained: list[int]
    forced_logits: Tensor
    refreshes: bool
    reference_logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    attended: list[int] = dataclasses.field(default_factory=list)
    attended_momentum: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    chosen: list[int] = dataclasses.field(default_factory=list)
    reference_momentum: dict[int, float] = dataclasses.field(default_factory=dict)
    evicted_mass: float = 0.0

    @property
    def momentum_error(self) -> float:
        """Largest difference from the reference's momenta, relative to the largest of them; 1 for a token it does not hold."""
        if not set(self.retained) <= self.reference_momentum.keys():
            return 1.0
        largest = max((abs(value) for value in self.reference_momentum.values()), default=0.0)
        pairs = zip(self.retained, self.momentum.tolist(), strict=True)
        worst = max((abs(m - self.reference_momentum[at]) for at, m in pairs), default=0.0)
        return worst / max(largest, 1e-30)

    @property
    def logits_error(self) -> float:
        """Largest difference from the reference's logits, relative to the largest of them."""
        worst = (self.logits - self.reference_logits).abs().max() / self.reference_logits.abs().max().clamp(min=1e-30)
        return float(worst)

    @property
    def attended_by_position(self) -> dict[int, float]:
        """The reference's momentum before anything left."""
        return dict(zip(self.attended, self.attended_momentum.tolist(), strict=True))

    def tie(self) -> float:
        """How far apart, relatively, the momenta of the tokens are by which the two choices differ; 0 if exactly equal."""
        return tie(self.attended_by_position, self.retained, self.chosen)


@dataclasses.dataclass
class RowEvidence:
    """One row: the full cache's tokens and logits (the prompt's first), and the steps."""

    prompt: int
    budget: int
    full_tokens: list[int]
    full_logits: list[Tensor]
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    steps: list[Step] = dataclasses.field(default_factory=list)

    @property
    def first_divergence(self) -> int | None:
        """Index of the first generated token that is not the full cache's."""
        pairs = zip(self.tokens, self.full_tokens, strict=True)
        return next((index for index, (ours, full) in enumerate(pairs) if ours != full), None)

    def first_eviction(self, config: Config) -> int:
        """The step at whose end the row evicts for the first time (it may lie beyond the run)."""
        return max(config.evict_after, self.budget + 1 - self.prompt)

    def churn(self, config: Config) -> list[float]:
        """1 - Jaccard of each kept set with the one before, after the first eviction."""
        kept = [step.retained for step in self.steps[self.first_eviction(config) - 1 :]]
        return [1 - jaccard(before, after) for before, after in itertools.pairwise(kept)]


@dataclasses.dataclass
class Evidence:
    """What one run saw. `slots` and `nbytes` are the cache's after each step, `slot_bytes` of one slot in all layers."""

    config: Config
    dtype: torch.dtype
    rows: list[RowEvidence]
    slots: list[int]
    nbytes: list[int]
    slot_bytes: int

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES.get(self.dtype, TOLERANCES[torch.bfloat16])

    def is_tie(self, step: Step) -> bool:
        """Whether rounding explains that the step kept other tokens than the reference would have."""
        if step.retained == step.chosen:
            return False
        if self.dtype not in (torch.float32, torch.float64):
            return step.tie() <= self.tolerance.tie  # in half precision, scores of different tokens are often equal
        return is_tie(step.attended_by_position, step.decided, step.retained, step.chosen, self.tolerance.tie)


Violations = Iterator[tuple[int | None, int | None, str]]
"""(row, step, what): each place where a clause does not hold."""


def findings(evidence: Evidence) -> list[Finding]:
    """Every clause, held or not. A violation names its first row and step."""
    result = []
    for name, clause, holds, violations in _CLAUSES:
        broken = list(violations(evidence))
        detail = holds(evidence)
        if broken:
            row, step, what = broken[0]
            where = ", ".join(
                f"{label} {value}" for label, value in (("row", row), ("step", step)) if value is not None
            )
            more = f" (1 of {len(broken)} places)" if len(broken) > 1 else ""
            detail = f"{where}: {what}{more}" if where else what + more
        result.append(Finding(name, clause, not broken, detail))
    return result


def _steps(evidence: Evidence) -> Iterator[tuple[int, int, RowEvidence, Step]]:
    for index, row in enumerate(evidence.rows):
        for number, step in enumerate(row.steps, 1):
            yield index, number, row, step


def _sets(evidence: Evidence) -> Violations:
    for index, number, _, step in _steps(evidence):
        if step.retained == step.chosen:
            continue
        if not evidence.is_tie(step):
            apart = step.tie()
            kept, gone = (sorted(a - b) for a, b in _both(set(step.retained), set(step.chosen)))
            why = (
                "equal momenta: the oldest goes first (D7)" if apart == 0 else f"momenta {apart:.2g} apart, relatively"
            )
            yield index, number, f"kept {_some(kept)} and evicted {_some(gone)}, the reference the reverse; {why}"


def _both(a: set[int], b: set[int]) -> tuple[tuple[set[int], set[int]], tuple[set[int], set[int]]]:
    return (a, b), (b, a)


def _some(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:4])) or "nothing"
    return shown + (f" and {len(positions) - 4} more" if len(positions) > 4 else "")


def _sets_hold(evidence: Evidence) -> str:
    differing = [step for _, _, _, step in _steps(evidence) if step.retained != step.chosen]
    count = sum(len(row.steps) for row in evidence.rows)
    if not differing:
        return f"the same positions in all {count} steps"
    return f"the same positions in {count - len(differing)} of {count} steps, near ties in the others"


def _momentum(evidence: Evidence) -> Violations:
    for index, number, _, step in _steps(evidence):
        if not step.momentum_error <= evidence.tolerance.momentum:
            yield index, number, f"off by {step.momentum_error:.2g} of the row's largest momentum"


def _momentum_hold(evidence: Evidence) -> str:
    worst = max(step.momentum_error for _, _, _, step in _steps(evidence))
    return f"off by at most {worst:.1e} of the row's largest (allowed: {evidence.tolerance.momentum:g})"


def _logits(evidence: Evidence) -> Violations:
    for index, number, _, step in _steps(evidence):
        if not step.logits_error <= evidence.tolerance.logits:
            yield index, number, f"off by {step.logits_error:.2g} of the largest logit"


def _logits_hold(evidence: Evidence) -> str:
    worst = max(step.logits_error for _, _, _, step in _steps(evidence))
    return f"off by at most {worst:.1e} of the largest logit (allowed: {evidence.tolerance.logits:g})"


def _uncompressed(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        for number in range(min(row.first_eviction(evidence.config), len(row.steps)) + 1):
            ours = row.first_logits if number == 0 else row.steps[number - 1].forced_logits
            error = _off(ours, row.full_logits[number])
            if not error <= evidence.tolerance.logits:
                yield index, number, f"off by {error:.2g} of the largest logit before anything was evicted"


def _off(ours: Tensor, full: Tensor) -> float:
    return float((ours - full).abs().max() / full.abs().max().clamp(min=1e-30))


def _uncompressed_hold(evidence: Evidence) -> str:
    last = [min(row.first_eviction(evidence.config), len(row.steps)) for row in evidence.rows]
    span = f"step {max(last)}" if max(last) == min(last) else f"steps {min(last)} to {max(last)}"
    return f"the prompt and up to {span}, teacher-forced"


def _budget(evidence: Evidence) -> Violations:
    for index, number, row, step in _steps(evidence):
        held = row.prompt + number
        want = min(held, row.budget) if number >= evidence.config.evict_after else held
        if len(step.retained) != want or len(set(step.retained)) != want:
            yield index, number, f"{len(step.retained)} tokens kept, {want} are due"


def _budget_hold(evidence: Evidence) -> str:
    return "tokens kept: " + ", ".join(str(len(row.steps[-1].retained)) for row in evidence.rows[:8])


def _positions(evidence: Evidence) -> Violations:
    for index, number, row, step in _steps(evidence):
        wrong = [at for at in step.retained if not 0 <= at < row.prompt + number]
        if wrong:
            yield index, number, f"kept position {_some(wrong)} of a text of {row.prompt + number} tokens"


def _storage(evidence: Evidence) -> Violations:
    largest = max(row.budget for row in evidence.rows)
    for number, (slots, nbytes) in enumerate(zip(evidence.slots, evidence.nbytes, strict=True), 1):
        if nbytes != slots * evidence.slot_bytes:
            yield None, number, f"{nbytes:,} bytes are held for {slots} slots of {evidence.slot_bytes:,} bytes"
        due = max(len(row.steps[number - 1].retained) for row in evidence.rows) + 1
        due = min(largest + 1, -(-due // BUCKET) * BUCKET + max(BUCKET, due // 8))
        if number >= evidence.config.evict_after and slots > due:
            yield None, number, f"{slots} slots are held where {due} are enough"


def _storage_hold(evidence: Evidence) -> str:
    return f"{evidence.slots[-1]} slots, {evidence.nbytes[-1]:,} bytes of K/V at the end"


def _churn(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        first = row.first_eviction(evidence.config)
        for number, (before, after) in enumerate(itertools.pairwise(row.steps[first - 1 :]), first + 1):
            gone = len(set(before.retained) - set(after.retained))
            if gone > 1:
                yield index, number, f"{gone} tokens left in one step"


def _churn_hold(evidence: Evidence) -> str:
    changes = sum(value > 0 for row in evidence.rows for value in row.churn(evidence.config))
    steps = sum(len(row.churn(evidence.config)) for row in evidence.rows)
    return f"the kept set changed in {changes} of {steps} steps, by one token each"


def _no_return(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        alive = set(range(row.prompt))
        for number, step in enumerate(row.steps, 1):
            alive.add(row.prompt + number - 1)
            back = sorted(set(step.retained) - alive)
            if back:
                yield index, number, f"position {_some(back)} had been evicted before"
            alive = set(step.retained)


def _frozen(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        pooled = row.first_eviction(evidence.config) if evidence.config.pool_width > 1 else 0
        for number, (before, step) in enumerate(itertools.pairwise(row.steps), 2):
            if number == pooled:
                continue
            old = dict(zip(before.retained, before.momentum.tolist(), strict=True))
            pairs = zip(step.retained, step.momentum.tolist(), strict=True)
            moved = sum(at in old and old[at] != momentum for at, momentum in pairs)
            if moved and not step.refreshes:
                yield index, number, f"{moved} momenta moved on a step that reads no scores"
            if not moved and step.refreshes and len(step.retained) > 1:
                yield index, number, "no momentum moved on a step that reads scores"


def _frozen_hold(evidence: Evidence) -> str:
    steps = evidence.rows[0].steps
    return f"{sum(step.refreshes for step in steps)} refreshes in {len(steps)} steps"


def _apart(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        together = len(row.steps) if row.first_divergence is None else row.first_divergence
        for number, step in enumerate(row.steps[:together], 1):
            if step.retained != step.forced_retained:
                yield index, number, "two sequences of the same tokens, decoded in turns, keep different positions"


_CLAUSES: tuple[tuple[str, str, Callable[[Evidence], str], Callable[[Evidence], Violations]], ...] = (
    ("retained sets are the reference's", "invariant 2, D7", _sets_hold, _sets),
    ("momentum is the reference's", "recurrence, D2, D4, D8", _momentum_hold, _momentum),
    ("outputs are the reference's", "one decode step, D9", _logits_hold, _logits),
    ("outputs before the first eviction are the full cache's", "invariant 6", _uncompressed_hold, _uncompressed),
    ("every row keeps its budget", "invariant 1, D5, D6, D10", _budget_hold, _budget),
    ("kept positions are of real tokens", "D9, D10", lambda e: "all within the text", _positions),
    ("storage is the budget and one slot, in bytes", "invariant 1", _storage_hold, _storage),
    ("at most one token leaves per step", "invariant 8", _churn_hold, _churn),
    ("evicted tokens never return", "one decode step", lambda e: "none did", _no_return),
    ("momentum moves on refreshes alone", "invariants 4, 5, D12", _frozen_hold, _frozen),
    ("sequences do not see each other", "invariant 12", lambda e: "two in turns, same tokens: same sets", _apart),
)
