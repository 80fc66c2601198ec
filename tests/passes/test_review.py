"""What a review of the passes found: attention that was accepted and computed otherwise, or refused though right."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import inertia_fx
from inertia_fx import errors
from inertia_fx.verify.testing.decoders import language_model
from tests.common import spellings
from tests.common.graphs import Step, fresh_dynamo, prompted, run_until, steps, traced  # noqa: F401
from tests.passes import hostile
from tests.passes.hostile import SCALE, hidden, logits_of, repeat, sdpa

DEAD = (2, 5)


class Informed(spellings.TinyDecoder):
    """Attention sees all of the state, and a view of the first layer's keys that is an input of its own."""

    keys: torch.Tensor

    def step(self, tokens: Any, cache: Any) -> Any:
        entry = cache.enter()
        live = entry.live[:, None, None, :]
        state = {"momentum": entry.momentum, "positions": entry.positions, "length": cache.state.length}
        if hasattr(self, "keys"):
            state["keys"] = self.keys
        logits = self.blocks(tokens, lambda q, k, v: self.attention(q, k, v, live, state), cache)[:, -1]
        cache.leave(entry)
        return logits


class Biased(spellings.TinyDecoder):
    """Every logit is far below 0, as biases of queries and keys make them."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        with torch.no_grad():
            self.qkv[0].bias[:32] -= 8
            self.qkv[0].bias[32:48] += 8


def right_or_refused(form: Any, decoder: Any = spellings.TinyDecoder) -> str:
    step = Step(form, dead=DEAD, decoder=decoder)
    try:
        gm = step.rewritten()
    except errors.UnsupportedAttentionError as error:
        return error.reason
    assert step.difference(gm) < 1e-4
    return "right"


# ---------------------------------------------------------------------- a mask that is written after the replacement reads it


def mask_that_shares_a_tuple_with_the_query(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = torch.ones_like(live)
    q, _ = torch.atleast_1d(q, mask)
    mask.copy_(live)
    return sdpa(q, k, v, mask)


def mask_that_shares_a_tuple_with_the_state(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = torch.zeros_like(live)
    torch.broadcast_tensors(mask, extra["positions"][:, None, None, :])
    mask.copy_(live)
    return sdpa(q, k, v, mask)


@pytest.mark.parametrize(
    "form", [mask_that_shares_a_tuple_with_the_query, mask_that_shares_a_tuple_with_the_state], ids=lambda f: f.__name__
)
def test_a_mask_is_not_read_before_it_is_written(form: Any) -> None:
    assert "is written into by copy_" in right_or_refused(form)


# ---------------------------------------------------------------------- hidden slots that are hidden from some logits only


@pytest.mark.parametrize("fill", [-30.0, -100.0, -1000.0])
@pytest.mark.parametrize("tensor", [False, True])
def test_what_hides_slots_hides_them_from_very_negative_logits_too(fill: float, tensor: bool) -> None:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        value = torch.tensor(fill) if tensor else fill
        return F.softmax((q @ repeat(k).mT * SCALE).masked_fill(~live, value), -1) @ repeat(v)

    assert "its hidden slots get the logit" in right_or_refused(form, Biased)


@pytest.mark.parametrize("less", [30.0, 100.0])
def test_hidden_slots_do_not_keep_their_own_logits(less: float) -> None:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        logits = q * 300 @ repeat(k).mT * SCALE
        return F.softmax(torch.where(live, logits, logits - less), -1) @ repeat(v)

    assert "its hidden slots get logits that are computed" in right_or_refused(form)


# ---------------------------------------------------------------------- what surrounds the slice


def test_autocast_around_a_part_of_attention_is_seen() -> None:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = q @ repeat(k).mT
        return F.softmax(logits.float() * SCALE + hidden(live), -1) @ repeat(v)

    assert "torch.autocast" in right_or_refused(form)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_writing_through_another_input_that_is_the_same_memory_is_seen(which: str) -> None:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        early = repeat(v)
        logits = logits_of(q, k, live)
        extra["keys"].mul_(0.5)
        return F.softmax(logits, -1) @ early

    model = Informed(form, layers=1)
    cache = prompted(model, 10, config=inertia_fx.Config(budget=1000))
    step = torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"}, fullgraph=True)

    def decode() -> None:
        with torch.no_grad(), cache.step(1):
            model.keys = getattr(cache.layers[0], which)[:]
            step(torch.tensor([[1]]), cache)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        decode()
    assert isinstance(caught.value.inner_exception, errors.UnsupportedAttentionError)
    assert "its output differs" in str(caught.value)


# ---------------------------------------------------------------------- rules about the state that small states did not show


def rule(name: str, allowed: Any) -> Any:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        return sdpa(q, k, v, live & allowed(extra)[:, None, None])

    form.__name__ = name
    return form


RULES = [
    rule("momentum above zero", lambda state: state["momentum"] > 0),
    rule("momentum up to one", lambda state: state["momentum"] < 1),
    rule("positions in between", lambda state: (state["positions"] < 100_000) | (state["positions"] > 900_000)),
    rule("short texts", lambda state: (state["positions"] > 4) | (state["length"] > 100)[:, None]),
    rule("momentum of a short text", lambda state: (state["momentum"] >= 0) & (state["length"] >= 20)[:, None]),
]


@pytest.mark.parametrize("form", RULES, ids=lambda form: form.__name__)
def test_masks_by_momentum_by_middle_positions_and_by_length_are_refused(form: Any) -> None:
    assert "not the validity" in right_or_refused(form, Informed)


# ---------------------------------------------------------------------- right, and refused


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_olmo2_is_matched_in_half_precision(attention: str, dtype: torch.dtype) -> None:
    """Its rotary embedding is in fp32, and cast down at its end."""
    model = inertia_fx.compile(language_model("olmo2", attention=attention).to(dtype), budget=1000, backend="eager")
    tokens = torch.arange(10)[None] + 5
    assert model.generate(tokens, max_new_tokens=3, min_new_tokens=3, do_sample=False).shape == (1, 13)


def summands_of_zeros(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = torch.zeros(live.shape).masked_fill(~live, torch.finfo(torch.float32).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def summands_of_full(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = torch.full(live.shape, -3e38) * ~live
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def summands_of_ten_thousand(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax(q @ repeat(k).mT * SCALE + (1.0 - live.float()) * -10000.0, -1) @ repeat(v)


def filled_with_a_tensor(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    lowest = torch.full([], torch.finfo(torch.float32).min)
    return F.softmax(torch.where(live, q @ repeat(k).mT * SCALE, lowest), -1) @ repeat(v)


def named_unsqueeze(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    k, v = (torch.unsqueeze(input=x, dim=2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
    weights = torch.dropout(F.softmax(q @ k.mT * SCALE + hidden(live), -1), p=0.1, train=False)
    return weights @ v


def test_keys_expanded_without_a_new_dimension_are_no_crash() -> None:
    def form(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        return sdpa(q, k.expand(-1, -1, -1, -1).reshape(k.shape), v, live)

    assert "its keys are not a slot buffer" in right_or_refused(form)


@pytest.mark.parametrize(
    "form",
    [
        named_unsqueeze,
        summands_of_zeros,
        summands_of_full,
        summands_of_ten_thousand,
        filled_with_a_tensor,
        *hostile.SPELLINGS,
    ],
    ids=lambda form: form.__name__,
)
def test_what_is_right_is_matched_with_dead_slots_too(form: Any) -> None:
    assert right_or_refused(form) == "right"


class ConditionalResidual(spellings.TinyDecoder):
    """A higher-order operator between layers is shaped with the number of slots."""

    def blocks(self, tokens: Any, attend: Any, cache: Any) -> Any:
        x = self.embed(tokens) * 2
        for index, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2).split([4, 2, 2], dim=1)
            keys, values = cache.update(k, v, index)
            x = x + out(attend(q, keys, values).transpose(1, 2).flatten(2))
            x = self.scaled(x, keys.shape[2])
        return self.head(x)

    def scaled(self, x: Any, slots: int) -> Any:
        return torch.cond(x.sum() > 0, lambda y: y * slots, lambda y: y * 0.5, (x,))


def test_a_higher_order_operator_elsewhere_is_no_reason_to_refuse() -> None:
    run_until(traced(spellings.MATCHED["softmax_chain"], decoder=ConditionalResidual), "prove_attention")


def test_a_default_dtype_of_fp64_does_not_reach_the_state() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        model = spellings.TinyDecoder(layers=1)
        cache = prompted(model)
        assert cache.state.momentum.dtype == torch.float32
        steps(model, cache, 3)
        assert cache.state.momentum.dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_difference_that_is_not_a_number_is_a_difference() -> None:
    step = Step(spellings.sdpa_gqa)
    gm = step.rewritten()
    (output,) = gm.graph.output_node().args[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.output_node().args = ((gm.graph.call_function(torch.mul, (output, math.nan)),),)
    gm.recompile()
    assert step.difference(gm) == math.inf
