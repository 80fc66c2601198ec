"""What `verify.check` measures, and the contract clause by clause over run records made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from inertia_fx import Config, errors
from inertia_fx.verify.check import clauses, metrics, score_log
from inertia_fx.verify.check.record import RowRecord, RunRecord, StepRecord
from inertia_fx.verify.theory.bounds import Rule


def test_sets_and_rankings() -> None:
    assert metrics.jaccard([1, 2, 3], [2, 3, 4]) == 0.5
    assert metrics.jaccard([], []) == 1
    assert metrics.top(torch.tensor([0.5, 0.1, 0.5, 0.9]), 2) == [3, 2]
    assert metrics.top(torch.tensor([0.5, 0.1]), 5) == [0, 1]
    a = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert metrics.spearman(a, a**3) == pytest.approx(1)
    assert metrics.spearman(a, -a) == pytest.approx(-1)
    assert metrics.spearman(a, torch.tensor([1.0, 3.0, 2.0, 4.0])) == pytest.approx(1 - 6 * 2 / 60)
    assert metrics.spearman(a, torch.ones(4)) == 1
    with pytest.raises(errors.InputError, match=r"differ: \(4,\) and \(3,\)"):
        metrics.spearman(a, a[:3])
    with pytest.raises(errors.InputError, match="1 of 4 values of the scores to rank are not finite"):
        metrics.spearman(a, torch.tensor([1.0, math.nan, 2.0, 3.0]))
    with pytest.raises(errors.InputError, match="vectors of logits differ"):
        metrics.divergence(a, a[:2])
    assert metrics.divergence(torch.tensor([0.0, 0.0]), torch.tensor([0.0, math.log(3)])) == pytest.approx(
        0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    )
    assert metrics.relative_error(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5])) == pytest.approx(0.1)


def test_what_rounding_explains() -> None:
    reference = {0: 0.5, 1: 0.5, 2: 0.50001, 3: 0.9}
    assert metrics.tie(reference, [0, 3], [2, 3]) == pytest.approx(2e-5, rel=1e-2)
    assert metrics.tie(reference, [0, 3], [1, 3]) == 0
    assert metrics.tie(reference, [3], [2, 3]) == math.inf  # one too few
    assert metrics.tie(reference, [2, 7], [2, 3]) == math.inf  # 7 was evicted long ago
    assert metrics.tie(reference, [3], [0]) == math.inf  # 0 is protected
    assert metrics.is_tie(reference, {}, [0, 3], [2, 3], 1e-4)
    assert not metrics.is_tie(reference, {}, [0, 3], [2, 3], 1e-6)
    # An exact tie is a matter of age, unless the momenta under test do differ, in that direction.
    assert not metrics.is_tie(reference, {}, [0, 3], [1, 3], 1e-4)
    assert not metrics.is_tie(reference, {0: 0.5, 1: 0.5}, [0, 3], [1, 3], 1e-4)
    assert not metrics.is_tie(reference, {0: 0.5, 1: 0.5000001}, [0, 3], [1, 3], 1e-4)
    assert metrics.is_tie(reference, {0: 0.5000001, 1: 0.5}, [0, 3], [1, 3], 1e-4)


def run_record(*steps: StepRecord, config: Config | None = None, **changes: Any) -> RunRecord:
    """A row of 3 prompt tokens and a budget of 2; both of its sequences take the same steps."""
    row = RowRecord(3, 2, [0] * (len(steps) + 1), [torch.ones(2)] * (len(steps) + 1), [0] * (len(steps) + 1))
    row.first_logits, row.steps, row.forced = torch.ones(2), list(steps), list(steps)
    given: dict[str, Any] = {"slots": [3] * len(steps), "nbytes": [12] * len(steps), "slot_bytes": 4} | changes
    return RunRecord(config or Config(budget=2), given.pop("dtype", torch.float32), [row], **given)


def good_step(**changes: Any) -> StepRecord:
    given: dict[str, Any] = {
        "retained": [1, 3], "momentum": torch.tensor([0.5, 0.6]), "decided": {0: 0.1, 1: 0.5, 2: 0.2, 3: 0.6},
        "logits": torch.ones(2), "refreshes": True, "reference_logits": torch.ones(2),
        "attended": {0: 0.1, 1: 0.5, 2: 0.2, 3: 0.6}, "chosen": [1, 3], "reference_momentum": {1: 0.5, 3: 0.6},
    }  # fmt: skip
    return StepRecord(**(given | changes))


def broken(*steps: StepRecord, **changes: Any) -> dict[str, str]:
    return {f.name: f.detail for f in clauses.findings(run_record(*steps, **changes)) if f.passed is False}


@pytest.mark.parametrize(
    ("changes", "clause", "detail"),
    [
        ({"retained": [2, 3], "reference_momentum": {2: 0.5, 3: 0.6}}, "retained sets",
         "kept 2 and evicted 1, the reference the reverse; momenta 0.6 apart, relatively"),
        ({"momentum": torch.tensor([0.5, 0.61])}, "momentum is", "a token's momentum is off by 0.017, relatively"),
        ({"momentum": torch.tensor([0.5, math.nan])}, "momentum is", "a token's momentum is off by 1, relatively"),
        ({"momentum": torch.tensor([0.5, math.nan])}, "outputs and momentum", "1 of 2 momenta are not finite"),
        ({"logits": torch.tensor([math.inf, 1.0])}, "outputs and momentum", "1 of 2 logits are not finite"),
        ({"logits": torch.tensor([1.0, 1.1])}, "outputs are the reference's", "off by 0.1 of the largest logit"),
        ({"logits": torch.tensor([1.0, 2.0])}, "outputs before the first", "off by 1 of the largest logit before"),
        ({"retained": [1, 2, 3], "momentum": torch.ones(3)}, "every row keeps its budget", "3 tokens kept, 2 expected"),
        ({"retained": [1, 4]}, "kept positions", "kept position 4 of a text of 4 tokens"),
    ],
)  # fmt: skip
def test_each_clause_names_what_broke_it(changes: dict[str, Any], clause: str, detail: str) -> None:
    assert broken(good_step()) == {}
    (found,) = [said for name, said in broken(good_step(**changes)).items() if name.startswith(clause)]
    assert found.startswith("row 0, step 1: ")
    assert detail in found


def test_a_small_momentum_beside_a_large_one_is_seen() -> None:
    sink = {"attended": {0: 0.1, 1: 3e-4, 2: 0.0, 3: 0.9}}
    expected = good_step(momentum=torch.tensor([3e-4, 0.9]), reference_momentum={1: 3e-4, 3: 0.9}, **sink)
    assert broken(expected) == {}
    wrong = good_step(momentum=torch.tensor([2e-4, 0.9]), reference_momentum={1: 3e-4, 3: 0.9}, **sink)
    assert list(broken(wrong)) == ["momentum is the reference's"]


def test_clauses_over_several_steps() -> None:
    def later(**changes: Any) -> StepRecord:
        moved = {"momentum": torch.tensor([0.55, 0.65]), "reference_momentum": {1: 0.55, 3: 0.65}}
        return good_step(**(moved | changes))

    assert broken(good_step(), later()) == {}
    gone = later(retained=[2, 4], chosen=[2, 4], reference_momentum={2: 0.55, 4: 0.65})
    assert broken(good_step(), gone)["at most one token leaves per step"].startswith("row 0, step 2: 2 tokens left")
    assert broken(good_step(), gone)["evicted tokens never return"].startswith(
        "row 0, step 2: position 2 had been evicted"
    )
    lazy = "row 0, step 2: 2 momenta moved on a step that reads no scores (1 of 2 places)"
    assert broken(good_step(), later(refreshes=False)) == {"momentum moves on refreshes alone": lazy}
    still = good_step(reference_momentum={1: 0.55, 3: 0.65})
    assert (
        "no momentum moved on a step that reads scores"
        in broken(good_step(), still)["momentum moves on refreshes alone"]
    )
    assert broken(good_step(), good_step()) == {}  # a fixed point: the reference's do not move either
    storage = "storage is the budget and one slot, in bytes"
    assert broken(good_step(), nbytes=[13])[storage] == "step 1: 13 bytes are held for 3 slots of 4 bytes"
    assert broken(good_step(), slots=[4], nbytes=[16])[storage] == "step 1: 4 slots are held where 3 are enough"
    waiting = Config(budget=2, evict_after=2)
    held = good_step(retained=[0, 1, 2, 3], chosen=[0, 1, 2, 3], momentum=torch.ones(4))
    assert storage not in broken(held, config=waiting, slots=[5], nbytes=[20])
    assert (
        broken(held, config=waiting, slots=[6], nbytes=[24])[storage] == "step 1: 6 slots are held where 5 are enough"
    )


def test_sequences_that_part_are_each_held_against_the_reference() -> None:
    both = run_record(good_step(), good_step())
    (row,) = both.rows
    row.forced = [good_step(), good_step(momentum=torch.tensor([0.5, 0.7]))]
    row.tokens = [0, 1, 1]  # differs from the full cache's at index 1
    found = {finding.name: finding for finding in clauses.findings(both)}
    assert found["momentum is the reference's"].detail.startswith("row 0, step 2, on the full cache's tokens: ")
    assert (
        found["sequences do not see each other"].detail
        == "decoded in turns; in 1 steps of the same tokens the same sets"
    )
    row.forced[0] = good_step(retained=[0, 3])
    apart = "row 0, step 1: two sequences of the same tokens keep different positions"
    assert {f.name: f.detail for f in clauses.findings(both)}["sequences do not see each other"] == apart
    row.tokens = [1, 1, 1]
    assert {f.name: f.passed for f in clauses.findings(both)}["sequences do not see each other"] is None


def test_exact_ties_and_half_precision() -> None:
    kept_the_older = {
        "retained": [1, 3], "chosen": [2, 3], "attended": {0: 0.1, 1: 0.5, 2: 0.5, 3: 0.6},
        "momentum": torch.tensor([0.5, 0.6]),
    }  # fmt: skip
    sets = "retained sets are the reference's"
    moved = {"momentum": torch.tensor([0.55, 0.65]), "reference_momentum": {1: 0.55, 3: 0.65}}
    # At step 2 the slot of what left still holds its momentum: equal there too, so age should have decided.
    equal = good_step(**(moved | kept_the_older | {"decided": {1: 0.5, 2: 0.5, 3: 0.6}}))
    before = good_step(retained=[1, 2], chosen=[1, 2], reference_momentum={1: 0.5, 2: 0.6})
    assert "equal momenta: the oldest goes first (D7)" in broken(before, equal)[sets]
    told_apart = good_step(**(moved | kept_the_older | {"decided": {1: 0.5000001, 2: 0.5, 3: 0.6}}))
    assert sets not in broken(before, told_apart)
    assert sets not in broken(equal)  # a first eviction: the momentum of what left is gone
    # What half precision may have rounded is no violation, and is not passed either.
    rounded = run_record(good_step(logits=torch.tensor([1.0, 1.5])), dtype=torch.bfloat16)
    found = {finding.name: finding for finding in clauses.findings(rounded)}
    assert found["outputs are the reference's"].passed is None
    assert "rounding in bfloat16 may do this, check the model in float32" in found["outputs are the reference's"].detail
    assert broken(good_step(retained=[1, 4]), dtype=torch.bfloat16).keys() >= {"kept positions are of real tokens"}


@pytest.mark.parametrize(("correlation", "dependent"), [(0.0, False), (0.95, True)])
def test_the_broken_assumption_is_said(correlation: float, dependent: bool) -> None:
    """Independent scores stay within the bound and break nothing; dependent ones are said to be."""
    refreshes, tokens = 64, 80
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(refreshes, tokens, generator=generator, dtype=torch.float64)
    noise = [drawn[0]]
    for innovation in drawn[1:]:
        noise.append(correlation * noise[-1] + math.sqrt(1 - correlation**2) * innovation)
    raw = torch.linspace(1, 9, tokens, dtype=torch.float64) + 0.3 * torch.stack(noise)
    rule = Rule(alpha=0.8, layers=4)
    momentum, smoothed = torch.zeros(tokens, dtype=torch.float64), []
    for u in raw:
        momentum = rule.time_weight * momentum + (1 - rule.time_weight) * u
        smoothed.append(momentum)
    found = score_log._stability(rule, raw, torch.stack(smoothed))
    assert found.pairs == tokens * (tokens - 1) // 2
    assert found.time_weight == pytest.approx(0.8**4)
    assert found.assumption.startswith("Broken here: a token's score depends" if dependent else "No assumption")
    assert (found.autocorrelation > 0.7) == dependent
    assert found.observed <= found.bound
    if not dependent:
        assert found.exceeded < 0.01
        assert found.cross_correlation == pytest.approx(0.6745 / 8, abs=0.02)


def test_the_bound_of_one_pair_is_the_rules() -> None:
    raw = torch.tensor([[0.5, 0.3], [0.6, 0.2], [0.5, 0.4], [0.4, 0.1]], dtype=torch.float64)
    rule = Rule(alpha=0.5, layers=2)
    found = score_log._stability(rule, raw, raw)
    mean, variance = raw.mean(0), raw.var(0)
    process = Rule(alpha=0.25)
    gap = float(mean[0] - mean[1])
    bounds = [
        process.misranking_bound(gap, float(variance[0]), steps=t, other_variance=float(variance[1]))
        for t in range(1, 5)
    ]
    assert found.bound == pytest.approx(sum(bounds) / 4)
    assert (found.pairs, found.observed) == (1, 0.0)
