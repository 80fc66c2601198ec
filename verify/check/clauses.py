"""Judge the contract clause by clause over the record of one run of `check`."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from .record import RowRecord, RunRecord, StepRecord, logits_difference
from .report_data import Finding

BUCKET = 64
"""A row that is still filling up may hold so many slots more than it needs, or an eighth: the cache grows in such steps."""

_HALF = (torch.float16, torch.bfloat16)


Violations = Iterator[tuple[str, str]]
"""(where, what): each place where a clause does not hold."""


def findings(run: RunRecord) -> list[Finding]:
    """Judge every clause of the contract over one run.

    Args:
        run: what the run saw of each sequence.

    Returns:
        One finding per clause: it held, it did not (with the first place), or ``None`` where the run cannot tell.
    """
    result = []
    for name, clause, holds, violations in _CLAUSES:
        broken = list(violations(run))
        detail, passed = holds(run), None
        if broken:
            where, what = broken[0]
            more = f" (1 of {len(broken)} places)" if len(broken) > 1 else ""
            detail, passed = f"{where}: {what}{more}", False
            if run.dtype in _HALF and violations in _ROUNDED:
                dtype = str(run.dtype).removeprefix("torch.")
                detail, passed = f"{detail}; rounding in {dtype} may do this, check the model in float32 to tell", None
        elif detail is not None:
            passed = True
        result.append(Finding(name, clause, passed, detail or "the run has no step to which this applies"))
    return result


def _steps(run: RunRecord) -> Iterator[tuple[str, int, RowRecord, list[StepRecord], StepRecord]]:
    for index, row in enumerate(run.rows):
        for sequence, said in ((row.steps, ""), (row.forced, ", on the full cache's tokens")):
            for number, step in enumerate(sequence, 1):
                yield f"row {index}, step {number}{said}", number, row, sequence, step


def _sets(run: RunRecord) -> Violations:
    for where, number, row, _, step in _steps(run):
        if step.retained == step.chosen or run.is_tie(step, number == row.first_eviction(run.config)):
            continue
        kept, gone = sorted(set(step.retained) - set(step.chosen)), sorted(set(step.chosen) - set(step.retained))
        apart = step.tie()
        why = "equal momenta: the oldest goes first (D7)" if apart == 0 else f"momenta {apart:.2g} apart, relatively"
        yield where, f"kept {_some(kept)} and evicted {_some(gone)}, the reference the reverse; {why}"


def _some(positions: list[int]) -> str:
    shown = ", ".join(map(str, positions[:4])) or "nothing"
    return shown + (f" and {len(positions) - 4} more" if len(positions) > 4 else "")


def _sets_hold(run: RunRecord) -> str:
    all_steps = [step for *_, step in _steps(run)]
    differing = sum(step.retained != step.chosen for step in all_steps)
    if not differing:
        return f"the same positions in all {len(all_steps)} steps"
    return f"the same positions in {len(all_steps) - differing} of {len(all_steps)} steps, near ties in the others"


def _beyond(run: RunRecord, what: str, said: str) -> Violations:
    """Steps whose error in `what`, "momentum" or "logits", is beyond the tolerance."""
    for where, *_, step in _steps(run):
        error = getattr(step, f"{what}_error")
        if not error <= getattr(run.tolerance, what):
            yield where, said.format(error)


def _worst(run: RunRecord, what: str, said: str) -> str:
    worst = max(getattr(step, f"{what}_error") for *_, step in _steps(run))
    return f"{said.format(worst)} (allowed: {getattr(run.tolerance, what):g})"


def _momentum(run: RunRecord) -> Violations:
    return _beyond(run, "momentum", "a token's momentum is off by {:.2g}, relatively")


def _momentum_hold(run: RunRecord) -> str:
    return _worst(run, "momentum", "every token's within {:.1e}")


def _logits(run: RunRecord) -> Violations:
    return _beyond(run, "logits", "off by {:.2g} of the largest logit")


def _logits_hold(run: RunRecord) -> str:
    return _worst(run, "logits", "off by at most {:.1e} of the largest logit")


def _finite(run: RunRecord) -> Violations:
    for where, *_, step in _steps(run):
        for name, values in (("logits", step.logits), ("momenta", step.momentum)):
            bad = int((~torch.isfinite(values)).sum())
            if bad:
                yield where, f"{bad} of {values.numel()} {name} are not finite, the full cache's are"


def _uncompressed(run: RunRecord) -> Violations:
    for index, row in enumerate(run.rows):
        for number in range(min(row.first_eviction(run.config), len(row.forced)) + 1):
            ours = row.first_logits if number == 0 else row.forced[number - 1].logits
            error = logits_difference(ours, row.full_logits[number])
            if not error <= run.tolerance.logits:
                where = f"row {index}, step {number}" if number else f"row {index}, the prompt"
                yield where, f"off by {error:.2g} of the largest logit before anything was evicted"


def _uncompressed_hold(run: RunRecord) -> str:
    last = [min(row.first_eviction(run.config), len(row.steps)) for row in run.rows]
    span = f"step {max(last)}" if max(last) == min(last) else f"steps {min(last)} to {max(last)}"
    return f"the prompt and up to {span}, teacher-forced"


def _budget(run: RunRecord) -> Violations:
    for where, number, row, _, step in _steps(run):
        held = row.prompt + number
        want = min(held, row.budget) if number >= run.config.evict_after else held
        if len(step.retained) != want or len(set(step.retained)) != want:
            yield where, f"{len(step.retained)} tokens kept, {want} expected"


def _budget_hold(run: RunRecord) -> str:
    return "tokens kept: " + ", ".join(str(len(row.steps[-1].retained)) for row in run.rows[:8])


def _positions(run: RunRecord) -> Violations:
    for where, number, row, _, step in _steps(run):
        wrong = [at for at in step.retained if not 0 <= at < row.prompt + number]
        if wrong:
            yield where, f"kept position {_some(wrong)} of a text of {row.prompt + number} tokens"


def _storage(run: RunRecord) -> Violations:
    largest = max(row.budget for row in run.rows)
    for number, (slots, nbytes) in enumerate(zip(run.slots, run.nbytes, strict=True), 1):
        if nbytes != slots * run.slot_bytes:
            yield f"step {number}", f"{nbytes:,} bytes are held for {slots} slots of {run.slot_bytes:,} bytes"
        enough = max(row.prompt for row in run.rows) + run.config.evict_after  # D18
        if number >= run.config.evict_after:
            filled = max(len(row.steps[number - 1].retained) for row in run.rows) + 1
            enough = min(largest + 1, -(-filled // BUCKET) * BUCKET + max(BUCKET, filled // 8))
        if slots > enough:
            yield f"step {number}", f"{slots} slots are held where {enough} are enough"


def _storage_hold(run: RunRecord) -> str:
    return f"{run.slots[-1]} slots, {run.nbytes[-1]:,} bytes of K/V at the end"


def _churn(run: RunRecord) -> Violations:
    for where, number, row, sequence, step in _steps(run):
        if number > row.first_eviction(run.config):
            gone = len(set(sequence[number - 2].retained) - set(step.retained))
            if gone > 1:
                yield where, f"{gone} tokens left in one step"


def _churn_hold(run: RunRecord) -> str | None:
    changes = [value > 0 for row in run.rows for value in row.churn(run.config)]
    return f"the kept set changed in {sum(changes)} of {len(changes)} steps, by one token each" if changes else None


def _no_return(run: RunRecord) -> Violations:
    for where, number, row, sequence, step in _steps(run):
        alive = set(sequence[number - 2].retained if number > 1 else range(row.prompt)) | {row.prompt + number - 1}
        back = sorted(set(step.retained) - alive)
        if back:
            yield where, f"position {_some(back)} had been evicted before"


def _frozen(run: RunRecord) -> Violations:
    for where, number, row, sequence, step in _steps(run):
        pooled = run.config.pool_width > 1 and number == row.first_eviction(run.config)
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
        must_move = any(was is not None and abs(now - was) > 1e-4 * abs(was) for now, was in pairs)
        if must_move and not moved and step.refreshes:
            yield where, "no momentum moved on a step that reads scores"


def _frozen_hold(run: RunRecord) -> str:
    steps = run.rows[0].steps
    return f"{sum(step.refreshes for step in steps)} refreshes in {len(steps)} steps"


def _apart(run: RunRecord) -> Violations:
    for index, row in enumerate(run.rows):
        pairs = zip(row.steps[: row.together], row.forced, strict=False)
        for number, (free, forced) in enumerate(pairs, 1):
            if free.retained != forced.retained:
                yield f"row {index}, step {number}", "two sequences of the same tokens keep different positions"


def _apart_hold(run: RunRecord) -> str | None:
    """After they part, each is held against a reference of its own by the clauses above."""
    together = sum(row.together for row in run.rows)
    return f"decoded in turns; in {together} steps of the same tokens the same sets" if together else None


_CLAUSES: tuple[tuple[str, str, Callable[[RunRecord], str | None], Callable[[RunRecord], Violations]], ...] = (
    ("retained sets are the reference's", "invariant 2, D7", _sets_hold, _sets),
    ("momentum is the reference's", "recurrence, D2, D4, D8", _momentum_hold, _momentum),
    ("outputs are the reference's", "one decode step, D9", _logits_hold, _logits),
    ("outputs and momentum are finite", "D8", lambda run: "all of them", _finite),
    ("outputs before the first eviction are the full cache's", "invariant 6", _uncompressed_hold, _uncompressed),
    ("every row keeps its budget", "invariant 1, D5, D6, D10", _budget_hold, _budget),
    ("kept positions are of real tokens", "D9, D10", lambda run: "all within the text", _positions),
    ("storage is the budget and one slot, in bytes", "invariant 1, D18", _storage_hold, _storage),
    ("at most one token leaves per step", "invariant 8", _churn_hold, _churn),
    ("evicted tokens never return", "one decode step", lambda run: "none did", _no_return),
    ("momentum moves on refreshes alone", "invariants 4, 5, D12", _frozen_hold, _frozen),
    ("sequences do not see each other", "invariant 12", _apart_hold, _apart),
)
_ROUNDED = (_sets, _momentum, _logits, _uncompressed)
"""Clauses that half precision can break in a model whose logits it leaves a few per cent from right."""
