"""`inertia_fx.verify`: what check() takes and refuses, what it measures, and the strategies it ships."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import inertia_fx
from inertia_fx import Config, errors, verify
from inertia_fx.cache import SlotCache
from inertia_fx.verify import clauses, decoders, metrics, parity, scripted, strategies
from inertia_fx.verify.bounds import Rule
from inertia_fx.verify.clauses import RowEvidence, Step
from inertia_fx.verify.decoders import PlainDecoder
from inertia_fx.verify.driver import Driver
from inertia_fx.verify.inputs import token_rows
from inertia_fx.verify.reference import Reference
from inertia_fx.verify.scripted import Beside, Difference, ScriptedDecoder, ScriptedRun
from tests import models

SMALL: dict[str, Any] = {"ratio": 0.7, "min_budget": 5}


@functools.cache
def compiled() -> Any:
    return inertia_fx.compile(models.cached_llama(2, 4, 2), backend="eager", **SMALL)


# ---------------------------------------------------------------------- what is refused


def test_a_model_that_is_not_compiled() -> None:
    with pytest.raises(
        errors.NotCompiledError, match=r"LlamaForCausalLM was given that inertia_fx\.compile did not return: pass"
    ):
        verify.check(models.cached_llama(2, 4, 2), [1, 2, 3])
    with pytest.raises(TypeError):
        verify.check(object(), [1, 2, 3])


@pytest.mark.parametrize("steps", [0, -1, True, 2.0, "4"])
def test_steps_below_one(steps: Any) -> None:
    with pytest.raises(errors.InputError, match="needs at least 1 decode step"):
        verify.check(compiled(), [1, 2, 3], steps=steps)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([], "a row without a token"),
        ([[1, 2], []], "a row without a token"),
        ({"input_ids": [[1, 2]], "attention_mask": [[0, 0]]}, "a row without a token"),
        ({"input_ids": torch.ones(2, 3, dtype=torch.int64), "attention_mask": torch.ones(2, 4)},
         r"attention_mask has shape \(2, 4\) and input_ids \(2, 3\)"),
        ({"input_ids": [[1, 2], [3]], "attention_mask": [[1, 1]]},
         r"attention_mask has shape \(1, 2\) and input_ids \[2, 1\]"),
        ({"attention_mask": torch.ones(2, 4)}, "The inputs are NoneType, not token ids"),
        (torch.ones(2, 3), r"Row 0 holds 1\.0: token ids are whole numbers"),
        (torch.ones(1, 2, 3, dtype=torch.int64), r"Row 0 holds \[1, 1, 1\]: token ids are whole numbers"),
        ([[1, "two"]], "Row 0 holds 'two': token ids are whole numbers"),
        ([[1, True]], "Row 0 holds True: token ids are whole numbers"),
        ([[1], 2], "mix token ids and rows of them"),
        ([1, 5, 128], r"Row 0 holds the token id 128; the model's vocabulary is 0 \.\.\. 127"),
        ([[4], [1, -7]], "Row 1 holds the token id -7"),
        (None, "not token ids"),
        ("a prompt", "The inputs are str, not token ids"),
    ],
)  # fmt: skip
def test_unusable_inputs(inputs: Any, message: str) -> None:
    with pytest.raises(errors.InputError, match=message):
        verify.check(compiled(), inputs)


def test_settings_that_do_not_exist_or_contradict() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'rate'"):
        verify.check(compiled(), [1, 2, 3], rate=0.5)
    with pytest.raises(errors.ConfigError, match="both say how many tokens to keep"):
        verify.check(compiled(), [1, 2, 3], ratio=0.5, budget=7)
    assert parity.changed(Config(ratio=0.5), {"budget": 7}).budget_of(100) == 7
    assert parity.changed(Config(budget=7), {"ratio": 0.5, "min_budget": 1}).budget_of(100) == 50
    assert parity.changed(Config(budget=7), {"alpha": 0.5}) == Config(budget=7, alpha=0.5)


def test_a_model_in_training_mode_and_one_that_overflows() -> None:
    model = inertia_fx.compile(models.llama(1), backend="eager")
    model.train()
    with pytest.raises(errors.InputError, match=r"training mode.*model\.eval\(\)"):
        verify.check(model, [1, 2, 3])
    model.eval()
    with torch.no_grad():
        model.model.norm.weight.fill_(math.inf)
    with pytest.raises(errors.InputError, match="of the logits are not finite: the model overflows in this dtype"):
        verify.check(model, [1, 2, 3])


# ---------------------------------------------------------------------- what it takes and measures


def test_every_form_of_input_is_the_same_rows() -> None:
    rows = [[5, 6, 7], [8, 9]]
    padded = {"input_ids": torch.tensor([[5, 6, 7], [0, 8, 9]]), "attention_mask": torch.tensor([[1, 1, 1], [0, 1, 1]])}
    right = {"input_ids": [[5, 6, 7], [8, 9, 0]], "attention_mask": [[1, 1, 1], [1, 1, 0]]}
    for inputs in (rows, padded, right):
        assert token_rows(inputs, 128) == rows
    assert token_rows([5, 6], 128) == token_rows(torch.tensor([5, 6]), 128) == [[5, 6]]
    assert token_rows({"input_ids": [5, 6], "attention_mask": [0, 1]}, 128) == [[6]]


def test_a_report_against_the_two_decoders_by_hand() -> None:
    row, steps = models.prompt(40), 10
    stages: list[str] = []
    report = verify.check(compiled(), row, steps=steps, on_progress=stages.append)
    assert report.ok
    assert [finding.name for finding in report.findings if not finding.passed] == []
    assert stages == [
        "full cache: prompt of 40 tokens", "full cache: 10 steps", "compiled model: prompt",
        "compiled model: first step (compiles)", "compiled model: the other 9 steps", "reference: twice 10 steps",
    ]  # fmt: skip
    assert list(report.seconds) == stages
    model = models.cached_llama(2, 4, 2)
    full = model.generate(torch.tensor([row]), max_new_tokens=steps + 1, do_sample=False, pad_token_id=0)[
        0, 40:
    ].tolist()
    run = models.decode(compiled(), [row], steps)
    (found,) = report.rows
    assert found.full_tokens == full
    assert found.tokens == run.tokens[0]
    assert found.retained == run.retained[0]
    differs = [index for index in range(steps + 1) if full[index] != found.tokens[index]]
    assert found.first_divergence == (differs[0] if differs else None)
    assert found.budget == 12
    assert found.churn_ceiling == 2 / 13
    assert len(found.churn) == steps - 1
    # Teacher-forced by hand: the same compiled model, fed the full cache's tokens.
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        compiled()(torch.tensor([row]), past_key_values=cache)
        forced = [compiled()(torch.tensor([[token]]), past_key_values=cache).logits[0, -1] for token in full[:-1]]
        whole = model(torch.tensor([row + full[:-1]])).logits[0, 40:]
    for step in range(steps):
        p, q = (torch.log_softmax(logits.double(), -1) for logits in (whole[step], forced[step]))
        assert found.kl[step] == pytest.approx(float((p.exp() * (p - q)).sum()), rel=1e-3, abs=1e-6)
        error = float((forced[step] - whole[step]).norm() / whole[step].norm())
        assert found.output_error[step] == pytest.approx(error, rel=1e-3, abs=1e-5)
    disagree = [int(whole[step].argmax() != forced[step].argmax()) for step in range(steps)]
    assert found.disagreement == [sum(disagree[: step + 1]) for step in range(steps)]
    # The two sides coincide until the first divergence (METHODS: T_div is the first teacher-forced disagreement).
    if found.first_divergence:
        assert found.disagreement[found.first_divergence - 1] == 1
    # Evicted mass at step 1: all attention that did not go to the survivors.
    reference = Reference(model, **SMALL)
    seen: list[Any] = []
    reference.observe = seen.append
    reference.prompt(row)
    reference.step(full[0])
    kept = [list(seen[0].momentum).index(position) for position in found.retained[0]]
    assert found.evicted_mass[0] == pytest.approx(1 - float(seen[0].attention.mean((0, 1))[kept].sum()), abs=1e-5)


def test_settings_of_one_check_leave_the_model_alone() -> None:
    report = verify.check(compiled(), models.prompt(40), steps=6, budget=9, refresh_every=None, scorer="vnorm")
    assert report.ok
    assert report.rows[0].budget == 9
    assert report.rows[0].stability is None
    assert report.rows[0].why_no_stability == "the spread of scores over time needs at least 8 refreshes, the run had 1"
    assert compiled()._inertia.config == Config(**SMALL)
    cumulative = verify.check(compiled(), models.prompt(40), steps=6, aggregator="cumulative")
    assert cumulative.ok
    assert "no stationary spread" in str(cumulative.rows[0].why_no_stability)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_their_tolerance(dtype: torch.dtype) -> None:
    model = inertia_fx.compile(models.llama(2).to(dtype), backend="eager", **SMALL)
    report = verify.check(model, models.prompt(40), steps=16)
    assert report.ok, [finding for finding in report.findings if not finding.passed]
    assert report.dtype == str(dtype).removeprefix("torch.")


def test_a_budget_of_the_whole_prompt_and_a_prompt_of_one_token() -> None:
    report = verify.check(compiled(), models.prompt(12), steps=6, budget=50)
    (row,) = report.rows
    assert report.ok
    assert (row.first_divergence, row.ranking, row.churn) == (None, None, [])
    assert max(row.kl) < 1e-6
    (row,) = verify.check(compiled(), [7], steps=8).rows
    assert (row.stability, row.why_no_stability) == (None, "a prompt of one token has no pair to rank")


def test_a_violation_is_named_with_row_and_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Config.budget_of
    monkeypatch.setattr(Config, "budget_of", lambda self, prompt: real(self, prompt) - 1)
    report = verify.check(compiled(), [models.prompt(40), models.prompt(23)], steps=4)
    assert not report.ok
    broken = {finding.name: finding.detail for finding in report.findings if finding.passed is False}
    assert broken["every row keeps its budget"] == "row 0, step 1: 11 tokens kept, 12 are due (1 of 16 places)"
    assert "storage is the budget and one slot, in bytes" not in broken
    assert broken["retained sets are the reference's"].startswith("row 0, step 1: kept nothing and evicted ")


# ---------------------------------------------------------------------- the measures


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


def evidence(*steps: Step, config: Config | None = None, **changes: Any) -> clauses.Evidence:
    """A row of 3 prompt tokens and a budget of 2; both of its sequences take the same steps."""
    row = RowEvidence(3, 2, [0] * (len(steps) + 1), [torch.ones(2)] * (len(steps) + 1), [0] * (len(steps) + 1))
    row.first_logits, row.steps, row.forced = torch.ones(2), list(steps), list(steps)
    given: dict[str, Any] = {"slots": [3] * len(steps), "nbytes": [12] * len(steps), "slot_bytes": 4} | changes
    return clauses.Evidence(config or Config(budget=2), given.pop("dtype", torch.float32), [row], **given)


def good_step(**changes: Any) -> Step:
    given: dict[str, Any] = {
        "retained": [1, 3], "momentum": torch.tensor([0.5, 0.6]), "decided": {0: 0.1, 1: 0.5, 2: 0.2, 3: 0.6},
        "logits": torch.ones(2), "refreshes": True, "reference_logits": torch.ones(2),
        "attended": {0: 0.1, 1: 0.5, 2: 0.2, 3: 0.6}, "chosen": [1, 3], "reference_momentum": {1: 0.5, 3: 0.6},
    }  # fmt: skip
    return Step(**(given | changes))


def broken(*steps: Step, **changes: Any) -> dict[str, str]:
    return {f.name: f.detail for f in clauses.findings(evidence(*steps, **changes)) if f.passed is False}


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
        ({"retained": [1, 2, 3], "momentum": torch.ones(3)}, "every row keeps its budget", "3 tokens kept, 2 are due"),
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
    due = good_step(momentum=torch.tensor([3e-4, 0.9]), reference_momentum={1: 3e-4, 3: 0.9}, **sink)
    assert broken(due) == {}
    wrong = good_step(momentum=torch.tensor([2e-4, 0.9]), reference_momentum={1: 3e-4, 3: 0.9}, **sink)
    assert list(broken(wrong)) == ["momentum is the reference's"]


def test_clauses_over_several_steps() -> None:
    def later(**changes: Any) -> Step:
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
    both = evidence(good_step(), good_step())
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
    rounded = evidence(good_step(logits=torch.tensor([1.0, 1.5])), dtype=torch.bfloat16)
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
    found = metrics._stability(rule, raw, torch.stack(smoothed))
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
    found = metrics._stability(rule, raw, raw)
    mean, variance = raw.mean(0), raw.var(0)
    process = Rule(alpha=0.25)
    gap = float(mean[0] - mean[1])
    bounds = [
        process.misranking_bound(gap, float(variance[0]), steps=t, other_variance=float(variance[1]))
        for t in range(1, 5)
    ]
    assert found.bound == pytest.approx(sum(bounds) / 4)
    assert (found.pairs, found.observed) == (1, 0.0)


# ---------------------------------------------------------------------- strategies and decoders


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(decoder=strategies.decoders(), length=st.integers(2, 12), seed=strategies.seeds())
def test_every_form_decodes_as_the_whole_text_at_once(decoder: PlainDecoder, length: int, seed: int) -> None:
    text = torch.randint(0, 50, (2, length + 3), generator=torch.Generator().manual_seed(seed))
    config = Config(budget=10**6)
    cache = SlotCache(config)
    decoder.prompt(text[:, :length], cache)
    step = decoders.compile_step(decoder.step, backend="eager", **config.graph_options(score=True))
    for place in range(length, length + 3):
        with torch.no_grad(), cache.step(2):
            logits = step(text[:, place : place + 1], cache)
        whole = decoder.prompt(text[:, : place + 1], SlotCache(config))
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
    assert cache.retained_positions()[1].tolist() == list(range(length + 3))


@pytest.mark.parametrize("family", decoders.FAMILIES)
def test_check_holds_on_models_of_every_family(family: str) -> None:
    model = decoders.language_model(family, layers=1, attention="eager" if family in ("gpt2", "olmo2") else "sdpa")
    batch = models.pad([models.prompt(30), models.prompt(9)])
    report = verify.check(inertia_fx.compile(model, backend="eager", **SMALL), batch, steps=5)
    assert broken_in(report) == []
    assert [row.prompt_tokens for row in report.rows] == [30, 9]


def broken_in(report: verify.Report) -> list[str]:
    return [finding.detail for finding in report.findings if not finding.passed]


@settings(max_examples=20)
@given(model=strategies.language_models(), prompt=strategies.prompts(longest=30))
def test_drawn_models_and_prompts_are_usable(model: Any, prompt: dict[str, torch.Tensor]) -> None:
    rows = token_rows(prompt, 128)
    assert [len(row) for row in rows] == prompt["attention_mask"].sum(-1).tolist()
    with torch.no_grad():
        logits = model(torch.tensor(rows[:1])).logits
    assert logits.shape == (1, len(rows[0]), 128)
    assert bool(logits.isfinite().all())
    assert model.config._attn_implementation in ("sdpa", "eager")


@settings(max_examples=60)
@given(
    fixed=st.sampled_from(
        (
            {"ratio": 0.5}, {"budget": 2}, {"min_budget": 1}, {"aggregator": "cumulative"}, {"alpha_time": 0.5},
            {"protect_first": 3}, {"budget": 4, "protect_recent": 4}, {},
        )
    ),
    data=st.data(),
)  # fmt: skip
def test_drawn_settings_keep_the_fixed_ones(fixed: dict[str, Any], data: st.DataObject) -> None:
    config = data.draw(strategies.configs(**fixed))
    assert {name: getattr(config, name) for name in fixed} == fixed


@settings(max_examples=60)
@given(state=strategies.momenta())
def test_drawn_states_are_states(state: Any) -> None:
    live = state.positions >= 0
    assert bool(live.any(1).all())
    assert bool((state.momentum[live].isfinite()).all())
    assert bool((~state.momentum[~live].isfinite()).all())
    for row, positions in enumerate(state.positions):
        held = positions[positions >= 0]
        assert len(held.unique()) == len(held)
        assert int(held.max()) < int(state.length[row])
        dead = state.momentum[row] == -math.inf
        assert not bool(dead.any()) or bool(dead[state.free[row]])
        assert bool(live[row, state.free[row]]) or bool(dead[state.free[row]])


@settings(max_examples=40)
@given(kind=st.sampled_from(strategies.KINDS), data=st.data())
def test_drawn_scores_are_of_their_kind(kind: str, data: Any) -> None:
    drawn = data.draw(strategies.scores(steps=40, layers=2, positions=64, kinds=(kind,)))
    assert drawn.shape == (40, 2, 1, 1, 64)
    assert bool((drawn > 0).all())
    assert bool(drawn.isfinite().all())
    centred = drawn - drawn.mean(0)
    correlation = float(((centred[1:] * centred[:-1]).sum(0) / (centred**2).sum(0)).median())
    assert (correlation > 0.5) == (kind == "drift")
    assert (len(drawn.unique()) <= 3) == (kind == "exact_ties")
    assert (float(drawn.max() / drawn.min()) < 1.001) == (kind == "near_ties")


def test_an_attention_that_hands_out_nothing_is_named() -> None:
    model = models.llama(1)
    attention = model.model.layers[0].self_attn
    real = type(attention).forward
    kind = type(
        "Silent", (type(attention),), {"forward": lambda self, *given, **named: (real(self, *given, **named)[0], None)}
    )
    attention.__class__ = kind
    compiled = inertia_fx.compile(model, backend="eager", **SMALL)
    with pytest.raises(
        errors.UnsupportedModelError, match=r"for 1 cached layers when asked for output_attentions=True"
    ):
        verify.check(compiled, models.prompt(20), steps=2)


def test_a_text_longer_than_the_model_and_a_torch_compiled_model() -> None:
    model = inertia_fx.compile(models.tiny("llama", max_position_embeddings=32), backend="eager")
    with pytest.raises(
        errors.InputError, match="A prompt of 29 tokens and 8 steps are more than the model's 32 positions"
    ):
        verify.check(model, models.prompt(29), steps=8)
    assert verify.check(torch.compile(compiled(), backend="eager"), [7, 8, 9], steps=1).steps == 1


def test_ragged_tensors_and_numpys_integers() -> None:
    numpy = pytest.importorskip("numpy")
    assert token_rows([torch.tensor([5, 6, 7]), torch.tensor([8, 9])], 128) == [[5, 6, 7], [8, 9]]
    assert token_rows([numpy.int64(5), numpy.int64(6)], 128) == [[5, 6]]
    assert token_rows(numpy.array([[5, 6]]), 128) == [[5, 6]]


def test_every_form_is_the_same_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 8, generator=generator)
    k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(2))
    logits = torch.einsum("bngd,bnsd->bngs", q.double().reshape(2, 2, 2, 8), k.double()) / math.sqrt(8)
    due = torch.einsum("bngs,bnsd->bngd", logits.softmax(-1), v.double()).reshape(2, 4, 1, 8)
    everywhere = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    for form in decoders.FORMS.values():
        torch.testing.assert_close(form(q, k, v, everywhere, {}).double(), due, rtol=1e-5, atol=1e-6)


def test_decoders_step_without_a_compiler() -> None:
    """The traced code is right by itself: it decodes over the live slots, with a momentum that never moves."""
    decoder, text = PlainDecoder(), torch.arange(12).reshape(1, 12)
    cache = SlotCache(Config(budget=10**6))
    decoder.prompt(text[:, :11], cache)
    with torch.no_grad(), cache.step(1):
        logits = decoder.step(text[:, 11:], cache)
    torch.testing.assert_close(logits, decoder.prompt(text, SlotCache(Config())), rtol=1e-4, atol=1e-4)
    assert cache.momentum[0].tolist() == [0.0] * 12
    run = ScriptedRun(Config(budget=6), [4], layers=2, positions=8)
    scores = torch.arange(1, 17).reshape(2, 1, 1, 8).float()
    with torch.no_grad(), run.cache.step(1):
        place = torch.tensor([4])
        outputs = ScriptedDecoder(2, positions=8).step(scores.log(), place, scripted._norms(place), run.cache)
    due = scores.where(torch.arange(8) < 5, 0.0) * scripted._norms(torch.arange(8))
    torch.testing.assert_close(outputs, due / scores[..., :5].sum(-1, keepdim=True))


def test_beside_sees_each_kind_of_difference() -> None:
    def pair() -> Beside:
        both = Beside(Config(budget=5, pool_width=3, evict_after=2), [8, 4], positions=24)
        for step in strategies.draw_scores("uniform", (3, 1, 2, 1, 24), seed=0):
            both.step(step)
        both.prompt([3, 2])
        return both

    scores = strategies.draw_scores("uniform", (1, 2, 1, 24), seed=1)
    pair().step(scores)
    other = pair()
    other.run.cache.state.momentum.mul_(2)
    with pytest.raises(Difference, match="row 0: momentum of"):
        other.prompt([1, 1])
    other = pair()
    other.run.cache.layers[0].keys.zero_()
    with pytest.raises(Difference, match="row 0: attention is off by"):
        other.step(scores)
    other = pair()
    other.lists.rows[1].absolute = 4
    other.step(scores)
    with pytest.raises(Difference, match="row 1, step 2: kept"):
        other.step(scores)
    other = pair()
    other.lists.rows[0].positions.pop()
    other.lists.rows[0].momentum.pop()
    with pytest.raises(Difference, match="row 0: positions"):
        other.prompt([1, 1])


def test_decoders_refuse_what_they_cannot_be() -> None:
    with pytest.raises(errors.ConfigError, match="kind='x' is unknown: choose one of uniform"):
        strategies.draw_scores("x", (1,), 0)
    with pytest.raises(errors.ConfigError, match="3 query heads cannot share 2 KV heads"):
        ScriptedRun(Config(), [3], heads=3, kv_heads=2)
    with pytest.raises(errors.InputError, match=r"lengths=\[\]: one number of tokens per row"):
        ScriptedRun(Config(), [])
    with pytest.raises(errors.InputError, match="not a report that"):
        verify.Report.from_json("{}")
    with pytest.raises(errors.NotCompiledError, match="LlamaForCausalLM was given"):
        Driver(models.cached_llama(2, 4, 2))
    with pytest.raises(errors.ConfigError, match="3 query heads cannot share 2 KV heads"):
        PlainDecoder(heads=3, kv_heads=2)
    with pytest.raises(errors.ConfigError, match="family='bert' is unknown: choose one of llama, qwen2"):
        decoders.language_model("bert")
