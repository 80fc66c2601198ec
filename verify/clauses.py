"""The contract, clause by clause, over what one run of `check` saw."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..config import Config
from .metrics import is_tie, jaccard, tie
from .report import Finding

BUCKET = 64
"""A row that is still filling up may hold so many slots more than it needs, or an eighth: the cache grows in such steps."""

_HALF = (torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """What rounding alone may do, in a model's dtype.

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
    """That of a model's dtype; of bfloat16 for smaller ones."""
    return TOLERANCES.get(dtype, TOLERANCES[torch.bfloat16])


@dataclasses.dataclass
class Step:
    """One decode step of one sequence: the compiled model's side, then the reference's, from the same history.

    Attributes:
        retained, momentum: positions kept, and their momentum.
        decided: as :func:`verify.driver.decided_momentum`.
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
        due = self.reference_momentum
        if not bool(torch.isfinite(self.momentum).all()) or not set(self.retained) <= due.keys():
            return 1.0
        floor = max(1e-3 * math.fsum(due.values()) / max(len(due), 1), 1e-30)
        pairs = zip(self.retained, self.momentum.tolist(), strict=True)
        return max((abs(m - due[at]) / max(abs(due[at]), floor) for at, m in pairs), default=0.0)

    @property
    def logits_error(self) -> float:
        """Largest difference from the reference's logits, relative to the largest of them; 1 if one is not finite."""
        return off(self.logits, self.reference_logits)

    def tie(self) -> float:
        """How far apart, relatively, the momenta are of the tokens by which the two choices differ; 0 if exactly equal."""
        return tie(self.attended, self.retained, self.chosen)


def off(ours: Tensor, due: Tensor) -> float:
    """Largest difference of two vectors of logits, relative to the largest of `due`; 1 if one of `ours` is not finite."""
    if not bool(torch.isfinite(ours).all()):
        return 1.0
    return float((ours - due).abs().max() / due.abs().max().clamp(min=1e-30))


@dataclasses.dataclass
class RowEvidence:
    """One row: the full cache's tokens and logits (the prompt's first), and two sequences of the compiled model.

    `steps` decodes freely, `forced` is fed the full cache's tokens.
    """

    prompt: int
    budget: int
    full_tokens: list[int]
    full_logits: list[Tensor]
    tokens: list[int] = dataclasses.field(default_factory=list)
    first_logits: Tensor = dataclasses.field(default_factory=lambda: torch.empty(0))
    steps: list[Step] = dataclasses.field(default_factory=list)
    forced: list[Step] = dataclasses.field(default_factory=list)

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
        return tolerance_of(self.dtype)

    def is_tie(self, step: Step, first: bool) -> bool:
        """Whether rounding explains that the step kept other tokens than the reference would have.

        At a `first` eviction the momenta of what left are gone with it, so exact ties cannot be told from near ones.
        """
        if step.retained == step.chosen:
            return False
        exact = first and step.tie() == 0
        return exact or is_tie(step.attended, step.decided, step.retained, step.chosen, self.tolerance.tie)


Violations = Iterator[tuple[str, str]]
"""(where, what): each place where a clause does not hold."""


def findings(evidence: Evidence) -> list[Finding]:
    """Every clause: held, not held (with the first place), or ``None`` where the run cannot tell."""
    result = []
    for name, clause, holds, violations in _CLAUSES:
        broken = list(violations(evidence))
        detail, passed = holds(evidence), None
        if broken:
            where, what = broken[0]
            more = f" (1 of {len(broken)} places)" if len(broken) > 1 else ""
            detail, passed = f"{where}: {what}{more}", False
            if evidence.dtype in _HALF and violations in _ROUNDED:
                dtype = str(evidence.dtype).removeprefix("torch.")
                detail, passed = f"{detail}; rounding in {dtype} may do this, check the model in float32 to tell", None
        elif detail is not None:
            passed = True
        result.append(Finding(name, clause, passed, detail or "the run has no step to which this applies"))
    return result


def _steps(evidence: Evidence) -> Iterator[tuple[str, int, RowEvidence, list[Step], Step]]:
    for index, row in enumerate(evidence.rows):
        for sequence, said in ((row.steps, ""), (row.forced, ", on the full cache's tokens")):
            for number, step in enumerate(sequence, 1):
                yield f"row {index}, step {number}{said}", number, row, sequence, step


def _sets(evidence: Evidence) -> Violations:
    for where, number, row, _, step in _steps(evidence):
        if step.retained == step.chosen or evidence.is_tie(step, number == row.first_eviction(evidence.config)):
            continue
        kept, gone = sorted(set(step.retained) - set(step.chosen)), sorted(set(step.chosen) - set(step.retained))
        apart = step.tie()
        why = "equal momenta: the oldest goes first (D7)" if apart == 0 else f"momenta {apart:.2g} apart, relatively"
        yield where, f"kept {_some(kept)} and evicted {_some(gone)}, the reference the reverse; {why}"


def _some(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:4])) or "nothing"
    return shown + (f" and {len(positions) - 4} more" if len(positions) > 4 else "")


def _sets_hold(evidence: Evidence) -> str:
    all_steps = [step for *_, step in _steps(evidence)]
    differing = sum(step.retained != step.chosen for step in all_steps)
    if not differing:
        return f"the same positions in all {len(all_steps)} steps"
    return f"the same positions in {len(all_steps) - differing} of {len(all_steps)} steps, near ties in the others"


def _beyond(evidence: Evidence, what: str, said: str) -> Violations:
    """Steps whose error in `what`, "momentum" or "logits", is beyond the tolerance."""
    for where, *_, step in _steps(evidence):
        error = getattr(step, f"{what}_error")
        if not error <= getattr(evidence.tolerance, what):
            yield where, said.format(error)


def _worst(evidence: Evidence, what: str, said: str) -> str:
    worst = max(getattr(step, f"{what}_error") for *_, step in _steps(evidence))
    return f"{said.format(worst)} (allowed: {getattr(evidence.tolerance, what):g})"


def _momentum(evidence: Evidence) -> Violations:
    return _beyond(evidence, "momentum", "a token's momentum is off by {:.2g}, relatively")


def _momentum_hold(evidence: Evidence) -> str:
    return _worst(evidence, "momentum", "every token's within {:.1e}")


def _logits(evidence: Evidence) -> Violations:
    return _beyond(evidence, "logits", "off by {:.2g} of the largest logit")


def _logits_hold(evidence: Evidence) -> str:
    return _worst(evidence, "logits", "off by at most {:.1e} of the largest logit")


def _finite(evidence: Evidence) -> Violations:
    for where, *_, step in _steps(evidence):
        for name, values in (("logits", step.logits), ("momenta", step.momentum)):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                yield where, f"{bad} of {values.numel()} {name} are not finite, the full cache's are"


def _uncompressed(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        for number in range(min(row.first_eviction(evidence.config), len(row.forced)) + 1):
            ours = row.first_logits if number == 0 else row.forced[number - 1].logits
            error = off(ours, row.full_logits[number])
            if not error <= evidence.tolerance.logits:
                where = f"row {index}, step {number}" if number else f"row {index}, the prompt"
                yield where, f"off by {error:.2g} of the largest logit before anything was evicted"


def _uncompressed_hold(evidence: Evidence) -> str:
    last = [min(row.first_eviction(evidence.config), len(row.steps)) for row in evidence.rows]
    span = f"step {max(last)}" if max(last) == min(last) else f"steps {min(last)} to {max(last)}"
    return f"the prompt and up to {span}, teacher-forced"


def _budget(evidence: Evidence) -> Violations:
    for where, number, row, _, step in _steps(evidence):
        held = row.prompt + number
        want = min(held, row.budget) if number >= evidence.config.evict_after else held
        if len(step.retained) != want or len(set(step.retained)) != want:
            yield where, f"{len(step.retained)} tokens kept, {want} are due"


def _budget_hold(evidence: Evidence) -> str:
    return "tokens kept: " + ", ".join(str(len(row.steps[-1].retained)) for row in evidence.rows[:8])


def _positions(evidence: Evidence) -> Violations:
    for where, number, row, _, step in _steps(evidence):
        wrong = [at for at in step.retained if not 0 <= at < row.prompt + number]
        if wrong:
            yield where, f"kept position {_some(wrong)} of a text of {row.prompt + number} tokens"


def _storage(evidence: Evidence) -> Violations:
    largest = max(row.budget for row in evidence.rows)
    for number, (slots, nbytes) in enumerate(zip(evidence.slots, evidence.nbytes, strict=True), 1):
        if nbytes != slots * evidence.slot_bytes:
            yield f"step {number}", f"{nbytes:,} bytes are held for {slots} slots of {evidence.slot_bytes:,} bytes"
        due = max(row.prompt for row in evidence.rows) + evidence.config.evict_after  # D18
        if number >= evidence.config.evict_after:
            filled = max(len(row.steps[number - 1].retained) for row in evidence.rows) + 1
            due = min(largest + 1, -(-filled // BUCKET) * BUCKET + max(BUCKET, filled // 8))
        if slots > due:
            yield f"step {number}", f"{slots} slots are held where {due} are enough"


def _storage_hold(evidence: Evidence) -> str:
    return f"{evidence.slots[-1]} slots, {evidence.nbytes[-1]:,} bytes of K/V at the end"


def _churn(evidence: Evidence) -> Violations:
    for where, number, row, sequence, step in _steps(evidence):
        if number > row.first_eviction(evidence.config):
            gone = len(set(sequence[number - 2].retained) - set(step.retained))
            if gone > 1:
                yield where, f"{gone} tokens left in one step"


def _churn_hold(evidence: Evidence) -> str | None:
    changes = [value > 0 for row in evidence.rows for value in row.churn(evidence.config)]
    return f"the kept set changed in {sum(changes)} of {len(changes)} steps, by one token each" if changes else None


def _no_return(evidence: Evidence) -> Violations:
    for where, number, row, sequence, step in _steps(evidence):
        alive = set(sequence[number - 2].retained if number > 1 else range(row.prompt)) | {row.prompt + number - 1}
        back = sorted(set(step.retained) - alive)
        if back:
            yield where, f"position {_some(back)} had been evicted before"


def _frozen(evidence: Evidence) -> Violations:
    for where, number, row, sequence, step in _steps(evidence):
        pooled = evidence.config.pool_width > 1 and number == row.first_eviction(evidence.config)
        if number == 1 or pooled:
            continue
        before = sequence[number - 2]
        old = dict(zip(before.retained, before.momentum.tolist(), strict=True))
        new = dict(zip(step.retained, step.momentum.tolist(), strict=True))
        moved = sum(at in old and old[at] != new[at] for at in new)
        if moved and not step.refreshes:
            yield where, f"{moved} momenta moved on a step that reads no scores"
        # At a fixed point (uniform attention, say) the reference's do not move either.
        pairs = ((value, before.reference_momentum.get(at)) for at, value in step.reference_momentum.items())
        due = any(was is not None and abs(now - was) > 1e-4 * abs(was) for now, was in pairs)
        if due and not moved and step.refreshes:
            yield where, "no momentum moved on a step that reads scores"


def _frozen_hold(evidence: Evidence) -> str:
    steps = evidence.rows[0].steps
    return f"{sum(step.refreshes for step in steps)} refreshes in {len(steps)} steps"


def _apart(evidence: Evidence) -> Violations:
    for index, row in enumerate(evidence.rows):
        pairs = zip(row.steps[: row.together], row.forced, strict=False)
        for number, (free, forced) in enumerate(pairs, 1):
            if free.retained != forced.retained:
                yield f"row {index}, step {number}", "two sequences of the same tokens keep different positions"


def _apart_hold(evidence: Evidence) -> str | None:
    """After they part, each is held against a reference of its own by the clauses above."""
    together = sum(row.together for row in evidence.rows)
    return f"decoded in turns; in {together} steps of the same tokens the same sets" if together else None


_CLAUSES: tuple[tuple[str, str, Callable[[Evidence], str | None], Callable[[Evidence], Violations]], ...] = (
    ("retained sets are the reference's", "invariant 2, D7", _sets_hold, _sets),
    ("momentum is the reference's", "recurrence, D2, D4, D8", _momentum_hold, _momentum),
    ("outputs are the reference's", "one decode step, D9", _logits_hold, _logits),
    ("outputs and momentum are finite", "D8", lambda e: "all of them", _finite),
    ("outputs before the first eviction are the full cache's", "invariant 6", _uncompressed_hold, _uncompressed),
    ("every row keeps its budget", "invariant 1, D5, D6, D10", _budget_hold, _budget),
    ("kept positions are of real tokens", "D9, D10", lambda e: "all within the text", _positions),
    ("storage is the budget and one slot, in bytes", "invariant 1, D18", _storage_hold, _storage),
    ("at most one token leaves per step", "invariant 8", _churn_hold, _churn),
    ("evicted tokens never return", "one decode step", lambda e: "none did", _no_return),
    ("momentum moves on refreshes alone", "invariants 4, 5, D12", _frozen_hold, _frozen),
    ("sequences do not see each other", "invariant 12", _apart_hold, _apart),
)
_ROUNDED = (_sets, _momentum, _logits, _uncompressed)
"""Clauses that half precision can break in a model whose logits it leaves a few per cent from right."""
