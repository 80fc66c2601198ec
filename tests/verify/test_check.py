"""`inertia_fx.verify`: what check() takes and refuses, what it measures, and the strategies it ships."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx import Config, errors, verify
from inertia_fx.verify.check import compare
from inertia_fx.verify.check.tokens import token_rows
from inertia_fx.verify.reference import Reference
from inertia_fx.verify.testing import decoders
from tests.common import models

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
    assert compare.changed(Config(ratio=0.5), {"budget": 7}).budget_of(100) == 7
    assert compare.changed(Config(budget=7), {"ratio": 0.5, "min_budget": 1}).budget_of(100) == 50
    assert compare.changed(Config(budget=7), {"alpha": 0.5}) == Config(budget=7, alpha=0.5)


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
    assert broken["every row keeps its budget"] == "row 0, step 1: 11 tokens kept, 12 expected (1 of 16 places)"
    assert "storage is the budget and one slot, in bytes" not in broken
    assert broken["retained sets are the reference's"].startswith("row 0, step 1: kept nothing and evicted ")


@pytest.mark.parametrize("family", decoders.FAMILIES)
def test_check_holds_on_models_of_every_family(family: str) -> None:
    model = decoders.language_model(family, layers=1, attention="eager" if family in ("gpt2", "olmo2") else "sdpa")
    batch = models.pad([models.prompt(30), models.prompt(9)])
    report = verify.check(inertia_fx.compile(model, backend="eager", **SMALL), batch, steps=5)
    assert broken_in(report) == []
    assert [row.prompt_tokens for row in report.rows] == [30, 9]


def broken_in(report: verify.Report) -> list[str]:
    return [finding.detail for finding in report.findings if not finding.passed]


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
