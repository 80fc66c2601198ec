"""The kernels' plain definitions against even plainer ones, over odd shapes and dtypes."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from inertia_fx import ops
from inertia_fx.kernels import cpu as inductor_cpu
from inertia_fx.kernels import reference
from tests.kernels.definitions import TOLERANCE, additive, definition, states

shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "kv_heads": st.integers(1, 3),
        "groups": st.sampled_from([1, 2, 3, 5, 9, 16]),  # the last two are not unrolled whole
        "slots": st.integers(2, 40),
        "width": st.sampled_from([1, 3, 8, 20]),
        "value_width": st.sampled_from([1, 4, 7]),
        "seed": st.integers(0, 2**20),
    }
)


def draw(
    dtype: torch.dtype, rows: int, kv_heads: int, groups: int, slots: int, width: int, value_width: int, seed: int
) -> Any:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, kv_heads * groups, 1, width, generator=generator).to(dtype) * 2
    key = torch.randn(rows, kv_heads, slots, width, generator=generator).to(dtype)
    value = torch.randn(rows, kv_heads, slots, value_width, generator=generator).to(dtype)
    live = torch.rand(rows, slots, generator=generator) < 0.7
    live[:, seed % slots] = True
    return query, key, value, live


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("scorer", ["attention", "vnorm", "entropy"])
@settings(max_examples=25, deadline=None)
@given(shape=shapes)
def test_scored_attention(dtype: torch.dtype, scorer: str, shape: dict[str, int]) -> None:
    query, key, value, live = draw(dtype, **shape)
    scale, kv_heads = 1 / math.sqrt(shape["width"]), shape["kv_heads"]
    output, scores = definition(query, key, value, live, scale, scorer)
    tolerance = TOLERANCE[dtype]
    arguments = (query, key, value, additive(live))
    group = query.shape[1] // kv_heads
    forms = {
        "reference": reference.scored_attention(*arguments, live, scale, kv_heads, scorer),
        "operator": ops.scored_attention(*arguments, live, scale, kv_heads, scorer),
        "half": inductor_cpu.scored_attention(*arguments, live, scale, kv_heads, scorer, group, True),
        "full": inductor_cpu.scored_attention(*arguments, live, scale, kv_heads, scorer, group, False),
    }
    # The definition rounds its logits to the model's dtype, the other forms keep them in fp32.
    rounded = {"reference": 2 * tolerance, "operator": 2 * tolerance}
    for name, (got, got_scores) in forms.items():
        assert got.dtype == dtype
        assert got_scores.dtype == torch.float32
        allowed = rounded.get(name, tolerance)
        torch.testing.assert_close(got.double(), output, rtol=allowed, atol=allowed, msg=name)
        torch.testing.assert_close(got_scores.double(), scores, rtol=tolerance, atol=tolerance, msg=name)
        assert (got_scores[~live] == 0).all(), name
    unscored = {
        "reference": reference.slot_attention(*arguments, scale, kv_heads),
        "operator": ops.slot_attention(*arguments, scale, kv_heads),
        "half": inductor_cpu.slot_attention(*arguments, scale, kv_heads, group, True),
        "full": inductor_cpu.slot_attention(*arguments, scale, kv_heads, group, False),
    }
    for name, got in unscored.items():
        allowed = rounded.get(name, tolerance)
        torch.testing.assert_close(got.double(), output, rtol=allowed, atol=allowed, msg=name)


@settings(max_examples=50, deadline=None)
@given(shape=shapes, chunk=st.integers(2, 44))
def test_sums_in_two_parts(shape: dict[str, int], chunk: int) -> None:
    """Slots up to 4096 are summed in fp32, the others in fp64: wherever the border lies, every slot counts once."""
    query, key, value, live = draw(torch.bfloat16, **shape)
    value = value.exp2() * 100  # all of one sign and far from rounding away
    scale, kv_heads = 1 / math.sqrt(shape["width"]), shape["kv_heads"]
    output, _ = definition(query, key, value, live, scale, "attention")
    arguments = (query, key, value, additive(live), scale, kv_heads, query.shape[1] // kv_heads)
    with mock.patch.object(inductor_cpu, "_CHUNK", chunk):
        got = inductor_cpu.slot_attention(*arguments, True)
    torch.testing.assert_close(got.double(), output, rtol=1e-2, atol=0)


def test_an_infinite_value_stays_infinite_where_the_parts_overlap() -> None:
    query, key, value, live = draw(torch.float16, 1, 1, 2, 10, 8, 4, 0)
    for slot in range(10):
        infinite = value.clone()
        infinite[0, 0, slot] = math.inf
        with mock.patch.object(inductor_cpu, "_CHUNK", 6):
            got = inductor_cpu.slot_attention(query, key, infinite, additive(live | True), 0.3, 1, 2, True)
        assert (got == math.inf).all(), slot


@pytest.mark.parametrize("slots", [4095, 4096, 4097, 4098, 9000])
def test_sums_of_many_slots(slots: int) -> None:
    query, key, value, live = draw(torch.float16, 1, 1, 2, slots, 8, 4, 0)
    output, _ = definition(query, key, value, live, 0.3, "attention")
    got = inductor_cpu.slot_attention(query, key, value, additive(live), 0.3, 1, 2, True)
    torch.testing.assert_close(got.double(), output, rtol=3e-3, atol=3e-4)


@pytest.mark.parametrize("scorer", ["attention", "vnorm", "entropy"])
@settings(max_examples=25, deadline=None)
@given(shape=shapes, softcap=st.sampled_from([0.0, 0.5, 30.0]), sink=st.booleans())
def test_softcap_and_sink(scorer: str, shape: dict[str, int], softcap: float, sink: bool) -> None:
    query, key, value, live = draw(torch.float32, **shape)
    sinks = query[0, :, 0, 0] if sink else None
    output, scores = definition(query, key, value, live, 0.3, scorer, softcap, sinks)
    arguments = (query, key, value, additive(live))
    got, got_scores = reference.scored_attention(*arguments, live, 0.3, shape["kv_heads"], scorer, softcap, sinks)
    torch.testing.assert_close(got.double(), output, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got_scores.double(), scores, rtol=1e-5, atol=1e-5)
    got = reference.slot_attention(*arguments, 0.3, shape["kv_heads"], softcap, sinks)
    torch.testing.assert_close(got.double(), output, rtol=1e-5, atol=1e-5)


@settings(max_examples=50, deadline=None)
@given(shape=shapes)
def test_same_as_sdpa(shape: dict[str, int]) -> None:
    query, key, value, live = draw(torch.float32, **shape)
    expect = F.scaled_dot_product_attention(query, key, value, attn_mask=live[:, None, None, :], enable_gqa=True)
    scale = 1 / math.sqrt(shape["width"])
    torch.testing.assert_close(
        reference.slot_attention(query, key, value, additive(live), scale, shape["kv_heads"]),
        expect,
        rtol=1e-5,
        atol=1e-5,
    )


@settings(max_examples=200, deadline=None)
@given(state=states(), first=st.integers(0, 3), recent=st.integers(0, 3))
def test_next_free(state: Any, first: int, recent: int) -> None:
    kinds, momentum, positions = state
    newest = max(positions)
    got = int(
        reference.next_free(torch.tensor([momentum]), torch.tensor([positions]), torch.tensor([newest]), first, recent)
    )
    dead = [slot for slot, kind in enumerate(kinds) if kind == "dead"]
    loose = [
        slot for slot, kind in enumerate(kinds)
        if kind == "live" and first <= positions[slot] <= newest - recent
    ]  # fmt: skip
    if dead:
        assert got in dead
    elif loose:
        assert got == min(loose, key=lambda slot: (momentum[slot], positions[slot]))


@settings(max_examples=100, deadline=None)
@given(state=states(), place=st.integers(0, 11))
def test_enter(state: Any, place: int) -> None:
    kinds, momentum, positions = state
    place %= len(kinds)
    new_momentum, new_positions = reference.enter(
        torch.tensor([momentum]), torch.tensor([positions]), torch.tensor([place]), torch.tensor([99])
    )
    others = [
        torch.tensor(momentum[slot]).item() for slot, kind in enumerate(kinds) if kind == "live" and slot != place
    ]
    expect = torch.tensor(math.fsum(others) / len(others) if others else 0.0, dtype=torch.float32)
    assert new_momentum[0, place] == expect
    assert new_positions[0, place] == 99
    keep = [slot for slot in range(len(kinds)) if slot != place]
    assert torch.equal(new_momentum[0, keep], torch.tensor(momentum)[keep])
    assert torch.equal(new_positions[0, keep], torch.tensor(positions)[keep])


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50), entering=st.integers(2, 9))
def test_tokens_that_enter_one_after_another_tie_exactly(values: list[float], entering: int) -> None:
    """Entering at the mean does not move the mean, so the ties that D7 speaks of are real ones."""
    momentum = torch.cat([torch.tensor(values), torch.full((entering,), -math.inf)])[None]
    positions = torch.cat([torch.arange(len(values)), torch.full((entering,), -1)])[None]
    for index in range(entering):
        place = len(values) + index
        momentum, positions = reference.enter(momentum, positions, torch.tensor([place]), torch.tensor([place]))
    assert len(set(momentum[0, len(values) :].tolist())) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    query, key, value, live = draw(dtype, 2, 2, 3, 9, 8, 4, 1)
    mask = additive(live)
    torch.library.opcheck(torch.ops.inertia_fx.slot_attention, (query, key, value, mask, 0.3, 2))
    for scorer in ("attention", "vnorm", "entropy"):
        torch.library.opcheck(torch.ops.inertia_fx.scored_attention, (query, key, value, mask, live, 0.3, 2, scorer))
    momentum, positions = torch.rand(2, 9), torch.stack([torch.randperm(9), torch.randperm(9)])
    torch.library.opcheck(torch.ops.inertia_fx.blend, (momentum, momentum * 2, 0.8, 0.2))
    state = (momentum, positions, torch.zeros(2, dtype=torch.int64), torch.full((2,), 9))
    new = (momentum * 2, positions.clone(), [key, key.clone()], [value, value.clone()])
    torch.library.opcheck(torch.ops.inertia_fx.commit_step, (*state, *new, 1, 2))
