"""The strategies and the decoders that `inertia_fx.verify` ships."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from inertia_fx import Config, errors, verify
from inertia_fx.cache import SlotCache
from inertia_fx.verify.check.driver import Driver
from inertia_fx.verify.check.tokens import token_rows
from inertia_fx.verify.testing import decoders, strategies, synthetic
from inertia_fx.verify.testing.decoders import TinyDecoder
from inertia_fx.verify.testing.synthetic import Difference, DifferentialRun, SyntheticDecoder, SyntheticRun
from tests.common import models
from tests.common.examples import examples


@examples(8, suppress_health_check=list(HealthCheck))
@given(decoder=strategies.decoders(), length=st.integers(2, 12), seed=strategies.seeds())
def test_every_form_decodes_as_the_whole_text_at_once(decoder: TinyDecoder, length: int, seed: int) -> None:
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


@examples(20)
@given(model=strategies.language_models(), prompt=strategies.prompts(longest=30))
def test_drawn_models_and_prompts_are_usable(model: Any, prompt: dict[str, torch.Tensor]) -> None:
    rows = token_rows(prompt, 128)
    assert [len(row) for row in rows] == prompt["attention_mask"].sum(-1).tolist()
    with torch.no_grad():
        logits = model(torch.tensor(rows[:1])).logits
    assert logits.shape == (1, len(rows[0]), 128)
    assert bool(logits.isfinite().all())
    assert model.config._attn_implementation in ("sdpa", "eager")


@examples(60)
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


@examples(60)
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


@examples(40)
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


def test_every_form_is_the_same_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 1, 8, generator=generator)
    k, v = (torch.randn(2, 2, 9, 8, generator=generator) for _ in range(2))
    logits = torch.einsum("bngd,bnsd->bngs", q.double().reshape(2, 2, 2, 8), k.double()) / math.sqrt(8)
    expected = torch.einsum("bngs,bnsd->bngd", logits.softmax(-1), v.double()).reshape(2, 4, 1, 8)
    everywhere = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    for form in decoders.FORMS.values():
        torch.testing.assert_close(form(q, k, v, everywhere, {}).double(), expected, rtol=1e-5, atol=1e-6)


def test_decoders_step_without_a_compiler() -> None:
    """The traced code is right by itself: it decodes over the live slots, with a momentum that never moves."""
    decoder, text = TinyDecoder(), torch.arange(12).reshape(1, 12)
    cache = SlotCache(Config(budget=10**6))
    decoder.prompt(text[:, :11], cache)
    with torch.no_grad(), cache.step(1):
        logits = decoder.step(text[:, 11:], cache)
    torch.testing.assert_close(logits, decoder.prompt(text, SlotCache(Config())), rtol=1e-4, atol=1e-4)
    assert cache.momentum[0].tolist() == [0.0] * 12
    run = SyntheticRun(Config(budget=6), [4], layers=2, positions=8)
    scores = torch.arange(1, 17).reshape(2, 1, 1, 8).float()
    with torch.no_grad(), run.cache.step(1):
        place = torch.tensor([4])
        outputs = SyntheticDecoder(2, positions=8).step(scores.log(), place, synthetic._norms(place), run.cache)
    expected = scores.where(torch.arange(8) < 5, 0.0) * synthetic._norms(torch.arange(8))
    torch.testing.assert_close(outputs, expected / scores[..., :5].sum(-1, keepdim=True))


def test_differential_run_sees_each_kind_of_difference() -> None:
    def pair() -> DifferentialRun:
        both = DifferentialRun(Config(budget=5, pool_width=3, evict_after=2), [8, 4], positions=24)
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
    other.reference.rows[1].absolute = 4
    other.step(scores)
    with pytest.raises(Difference, match="row 1, step 2: kept"):
        other.step(scores)
    other = pair()
    other.reference.rows[0].positions.pop()
    other.reference.rows[0].momentum.pop()
    with pytest.raises(Difference, match="row 0: positions"):
        other.prompt([1, 1])


def test_decoders_refuse_what_they_cannot_be() -> None:
    with pytest.raises(errors.ConfigError, match="kind='x' is unknown: choose one of uniform"):
        strategies.draw_scores("x", (1,), 0)
    with pytest.raises(errors.ConfigError, match="3 query heads cannot share 2 KV heads"):
        SyntheticRun(Config(), [3], heads=3, kv_heads=2)
    with pytest.raises(errors.InputError, match=r"lengths=\[\]: one number of tokens per row"):
        SyntheticRun(Config(), [])
    with pytest.raises(errors.InputError, match="not a report that"):
        verify.Report.from_json("{}")
    with pytest.raises(errors.NotCompiledError, match="LlamaForCausalLM was given"):
        Driver(models.cached_llama(2, 4, 2))
    with pytest.raises(errors.ConfigError, match="3 query heads cannot share 2 KV heads"):
        TinyDecoder(heads=3, kv_heads=2)
    with pytest.raises(errors.ConfigError, match="family='bert' is unknown: choose one of llama, qwen2"):
        decoders.language_model("bert")
