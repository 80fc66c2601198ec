"""The Triton kernels without a GPU: interpreted against the definitions, traced with symbolic slot counts, in graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the Triton kernels need triton")

from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inertia_fx.kernels import reference, targets
from inertia_fx.kernels.triton import attention as scored_attention
from inertia_fx.kernels.triton import ops as triton_ops
from inertia_fx.kernels.triton import state as evict
from inertia_fx.kernels.triton.plan import Plan, plan_for
from inertia_fx.passes.evict import evict_pass
from inertia_fx.passes.lower import lower_pass
from inertia_fx.passes.nodes import emit
from inertia_fx.passes.update_momentum import scores_of
from tests.common import interpreted, spellings
from tests.common.graphs import count, lower_to_triton, options_of, prompted, run_all, run_until, steps, traced
from tests.kernels.definitions import TOLERANCE, additive, definition, states

# Scores come from fp32 sums of products of the inputs, in any dtype; outputs from probabilities in the inputs' dtype.
SCORES = 1e-5

WIDTHS = [16, 20, 32, 80, 112, 256]


@st.composite
def problems(draw: Any, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of scored attention: odd shapes, strides, dead slots, and how the kernels are cut."""
    rows, kv_heads, groups, slots = (
        draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 3, 5, 16, 17])),
        draw(st.integers(1, 70)),
    )  # fmt: skip
    width, value_width = draw(st.sampled_from(WIDTHS)), draw(st.sampled_from(WIDTHS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    layout = draw(st.sampled_from(["heads first", "slots first", "inside a wider buffer"]))

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=generator).to(dtype)

    def buffer(last: int) -> Any:
        if layout == "slots first":
            return normal(rows, slots, kv_heads, last).transpose(1, 2)
        if layout == "inside a wider buffer":
            return normal(rows, kv_heads + 1, slots + 3, 2 * last)[:, 1:, 2:-1, ::2]
        return normal(rows, kv_heads, slots, last)

    live = torch.rand(rows, slots, generator=generator) < draw(st.sampled_from([0.2, 0.9, 1.0]))
    live[:, draw(st.integers(0, slots - 1))] = True
    same = draw(st.booleans())
    blend = draw(st.sampled_from([None, (0.8, 0.2), (0.0, 1.0), (1.0, 1.0), (0.5, 1.0)]))
    old = torch.where(live, torch.rand(rows, slots, generator=generator), -math.inf)
    plan = plan_for(groups, width, value_width, dtype.itemsize)
    return {
        "query": normal(rows, 1, kv_heads * groups, width).transpose(1, 2) * 2,
        "key": buffer(width),
        "value": buffer(value_width),
        "live": live[:1].expand(rows, slots) if same else live,
        "mask": additive(live[:1] if same else live),
        "kv_heads": kv_heads,
        "softcap": draw(st.sampled_from([0.0, 0.5, 30.0])),
        "sink": normal(kv_heads * groups) if draw(st.booleans()) else None,
        "old": None if blend is None else old,
        "blend": blend,
        "plan": Plan(draw(st.sampled_from([16, 32])), plan.block_group, plan.block_width, plan.block_value, 4, 2),
        "splits": draw(st.integers(1, 4)),
    }


def check(problem: dict[str, Any], scorer: str | None, dtype: torch.dtype) -> None:
    given = dict(problem)
    blend = given.pop("blend")
    weights = {} if blend is None else {"old_weight": blend[0], "new_weight": blend[1]}
    arguments = [given.pop(name) for name in ("query", "key", "value", "mask", "live")]
    kv_heads = given.pop("kv_heads")
    (output, scores), _ = interpreted.run(
        scored_attention.scored_attention, *arguments, 0.25, kv_heads, scorer, **given, **weights
    )
    query, key, value, _, live = arguments
    expect, expect_scores = definition(
        query, key, value, live, 0.25, scorer or "attention", given["softcap"], given["sink"]
    )
    tolerance = TOLERANCE[dtype]
    assert output.dtype == dtype
    torch.testing.assert_close(output.double(), expect, rtol=tolerance, atol=tolerance)
    if scorer is None:
        assert scores is None
        return
    assert scores is not None and scores.dtype == torch.float32
    if blend is None:
        assert (scores[~live] == 0).all()
    else:
        expect_scores = reference.blend(given["old"].double(), expect_scores, *blend)
    torch.testing.assert_close(scores.double(), expect_scores, rtol=SCORES, atol=SCORES)


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=20, deadline=None)
@given(data=st.data(), scorer=st.sampled_from([None, "attention", "vnorm", "entropy"]))
def test_scored_attention(dtype: torch.dtype, data: Any, scorer: str | None) -> None:
    check(data.draw(problems(dtype)), scorer, dtype)


@pytest.mark.parametrize("scorer", ["attention", "vnorm", "entropy"])
def test_several_blocks_of_every_loop(scorer: str) -> None:
    """More slots than a merge block, more heads than a turn of its loop, more splits than a turn, most of them empty."""
    generator = torch.Generator().manual_seed(1)
    rows, kv_heads, groups, slots = 1, 1, 20, 300
    query = torch.randn(rows, kv_heads * groups, 1, 16, generator=generator)
    key, value = (torch.randn(rows, kv_heads, slots, 16, generator=generator) for _ in range(2))
    live = torch.rand(rows, slots, generator=generator) < 0.5
    live[:, 40:200] = False  # whole tiles, and with them whole splits, of masked slots
    problem = {
        "query": query, "key": key, "value": value, "live": live, "mask": additive(live), "kv_heads": kv_heads,
        "softcap": 0.0, "sink": None, "old": torch.rand(rows, slots, generator=generator), "blend": (0.8, 0.2),
        "plan": Plan(16, 16, 16, 16, 4, 2), "splits": 37,
    }  # fmt: skip
    check(problem, scorer, torch.float32)


def test_unwritten_output_is_seen() -> None:
    """The comparison is one that can fail: a merge of which a program is missing leaves a head's output unwritten."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(1, 2, size, 16, generator=generator) for size in (1, 64, 64))
    live = torch.ones(1, 64, dtype=torch.bool)
    arguments = (query, key, value, additive(live), live, 0.25, 2, None)
    (output, _), _ = interpreted.run(interpreted.attention_with_a_program_missing, *arguments)
    assert output[:, 1].isnan().all()
    assert output[:, 0].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(states(), min_size=1, max_size=3),
    first=st.integers(0, 3),
    recent=st.integers(0, 3),
    place=st.integers(0, 11),
)
def test_enter_and_evict(rows: list[Any], first: int, recent: int, place: int) -> None:
    slots = min(len(kinds) for kinds, _, _ in rows)
    momentum = torch.tensor([row[1][:slots] for row in rows])
    positions = torch.tensor([row[2][:slots] for row in rows])
    free, length = torch.full((len(rows),), place % slots), torch.arange(20, 20 + len(rows))
    entered, _ = interpreted.run(evict.enter, momentum, positions, free, length)
    expect = reference.enter(momentum, positions, free, length)
    assert torch.equal(entered[0], expect[0])
    assert torch.equal(entered[1], expect[1])
    moved = torch.where(entered[0].isinf(), math.nan, entered[0] * 0.5)  # what the layers make of marks is not read
    state = [momentum.clone(), positions.clone(), free.clone(), length.clone()]
    _, state = interpreted.run(evict.evict, *state, moved, *entered, first, recent)
    settled = torch.where(entered[1] >= 0, moved, entered[0])
    assert torch.equal(state[0], settled)
    assert torch.equal(state[1], entered[1])
    assert torch.equal(state[3], length + 1)
    victims = reference.next_free(settled, entered[1], length, first, recent)
    dead = (settled == -math.inf).any(1)  # any dead slot will do
    assert torch.equal(state[2][~dead], victims[~dead])
    assert (settled.gather(1, state[2][:, None])[dead] == -math.inf).all()


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 999))
def test_evict_over_several_blocks_breaks_ties_by_age(seed: int) -> None:
    slots = 2 * evict.BLOCK_SLOTS + 77
    generator = torch.Generator().manual_seed(seed)
    momentum = torch.randint(0, 4, (2, slots), generator=generator).float()
    positions = torch.stack([torch.randperm(slots, generator=generator) for _ in range(2)])
    state = [momentum.clone(), positions.clone(), torch.zeros(2, dtype=torch.int64), torch.full((2,), slots)]
    _, state = interpreted.run(evict.evict, *state, momentum, momentum, positions, 5, 7)
    assert torch.equal(state[2], reference.next_free(momentum, positions, torch.full((2,), slots), 5, 7))


@pytest.mark.parametrize("numbers", [[0, 1, 2, 3, 4], [1, 3], []], ids=["all", "some", "none"])
def test_evict_where_momentum_is_not_a_number(numbers: list[int]) -> None:
    """A slot there is, whatever the layers made of a row: the next step writes to it."""
    momentum = torch.tensor([[0.5, 0.25, 0.25, 0.75, 1.0]] * 2)
    momentum[1, numbers] = math.nan
    positions = torch.tensor([[4, 2, 1, 0, 3]] * 2)
    state = [momentum.clone(), positions.clone(), torch.zeros(2, dtype=torch.int64), torch.full((2,), 5)]
    _, state = interpreted.run(evict.evict, *state, momentum, momentum, positions, 0, 0)
    expect = {0: 2, 2: 3, 5: 3}[len(numbers)]  # the oldest of those that are not numbers
    assert state[2].tolist() == [2, expect]
    assert torch.equal(state[2], reference.next_free(momentum, positions, torch.full((2,), 5), 0, 0))


@pytest.mark.parametrize("dtype", TOLERANCE)
@settings(max_examples=10, deadline=None)
@given(width=st.sampled_from(WIDTHS), taken=st.integers(1, 40), room=st.integers(0, 40), turned=st.booleans())
def test_gather(dtype: torch.dtype, width: int, taken: int, room: int, turned: bool) -> None:
    buffer = torch.randn(2, 3, 50, width).to(dtype)
    if turned:
        buffer = torch.randn(2, 50, 3, width).to(dtype).transpose(1, 2)
    index = torch.randint(0, 50, (2, taken))
    got, _ = interpreted.run(evict.gather, buffer, index, taken + room)
    assert torch.equal(got, targets.REFERENCE.gather(buffer, index, taken + room))


# ---------------------------------------------------------------------- traced for a CUDA device


@pytest.mark.parametrize("scorer", [None, "attention", "vnorm", "entropy"])
def test_the_slot_count_stays_symbolic(scorer: str | None) -> None:
    """One compile serves every slot count: tracing the launches on (fake) CUDA tensors adds no guard on it."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC])  # type: ignore[var-annotated]
    slots = mode.from_tensor(torch.empty(300), symbolic_context=context, source=ConstantSource("slots")).shape[0]

    def launch(query: Any, key: Any, value: Any, mask: Any, live: Any, old: Any) -> Any:
        blend = {} if scorer is None else {"old": old, "old_weight": 0.8, "new_weight": 0.2}
        return scored_attention.scored_attention(query, key, value, mask, live, 0.3, 2, scorer, processors=132, **blend)

    def step(momentum: Any, positions: Any, free: Any, length: Any) -> Any:
        entered = evict.enter(momentum, positions, free, length)
        evict.evict(momentum, positions, free, length, entered[0], *entered, 0, 0)

    with mode:

        def cuda(*shape: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
            return torch.empty(shape, dtype=dtype, device="cuda")

        state = (cuda(3, slots, dtype=torch.float32), cuda(3, slots, dtype=torch.int64))
        tensors = (cuda(3, 8, 1, 64), cuda(3, 2, slots, 64), cuda(3, 2, slots, 80))
        mask, live = cuda(3, 1, 1, slots, dtype=torch.float32), cuda(3, slots, dtype=torch.bool)
        attention = make_fx(launch)(*tensors, mask, live, state[0])
        rows = make_fx(step)(*state, cuda(3, dtype=torch.int64), cuda(3, dtype=torch.int64))
    wrapper = torch.ops.higher_order.triton_kernel_wrapper_mutation
    assert count(attention)[wrapper] == {None: 2, "entropy": 3}.get(scorer, 2)
    assert count(rows)[wrapper] == 2
    assert env.guards == []


# ---------------------------------------------------------------------- in graphs


@pytest.fixture
def on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower as on a CUDA device. The operators' bodies are then their definitions, as the tensors are on the CPU."""
    torch._dynamo.reset()
    lower_to_triton(monkeypatch)


def operators(gm: Any) -> dict[str, int]:
    return {
        node.__name__.removesuffix(".default"): number
        for node, number in count(gm).items()
        if isinstance(node, torch._ops.OpOverload)
    }


@pytest.mark.parametrize(
    ("options", "expect"),
    [
        ({}, {"triton_blended_attention": 3}),
        ({"aggregator": "cumulative"}, {"triton_blended_attention": 3}),
        ({"alpha": 0.0}, {"triton_blended_attention": 1, "triton_slot_attention": 2}),
        ({"alpha_layer": 0.9}, {"triton_blended_attention": 2, "triton_scored_attention": 1}),
        ({"score": False}, {"triton_slot_attention": 3}),
    ],
)
def test_lowered_to_kernels(on_triton: None, options: dict[str, Any], expect: dict[str, int]) -> None:
    gm = traced(layers=3)
    results = run_all(gm, **options)
    assert operators(gm) == expect | {"triton_enter": 1, "triton_evict": 1}
    assert (len(results["lower"].matched), len(results["lower_enter"].matched)) == (3, 1)
    # The mask, and the validity where scores are read, are written to memory once for all layers.
    assert count(gm)["as_strided"] == (1 if options.get("score") is False else 2)
    assert count(gm)["copy_"] == count(gm)["argmin"] == count(gm)["amin"] == 0


def test_what_the_kernels_do_not_take_is_said(on_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from inertia_fx.kernels.triton import plan

    monkeypatch.setattr(plan, "MAX_WIDTH", 4)
    gm = traced(layers=3)
    result = run_all(gm)["lower"]
    assert len(result.skipped) == 3
    assert all("head width 8 (the kernels take up to 4)" in record.detail for record in result.skipped)
    assert operators(gm) == {"triton_enter": 1, "triton_evict": 1}
    assert count(gm)[torch.softmax] == 3


def test_scores_read_twice_are_not_folded(on_triton: None) -> None:
    gm = run_until(traced(layers=3), "update_momentum")
    second = scores_of(gm.graph)[1]
    emit(gm.graph, second.next, torch.neg, second)  # somebody else reads the second layer's
    for run in (lower_pass, evict_pass):
        run(gm, [], options=options_of())
    gm.graph.lint()
    assert operators(gm)["triton_scored_attention"] == 1
    assert operators(gm)["triton_blended_attention"] == 2


def test_another_entry_is_left_alone(on_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what computes exactly `reference.enter` becomes its kernel."""
    from inertia_fx.cache import slot_cache as cache

    def at_zero(momentum: Any, positions: Any, free: Any, length: Any) -> Any:
        new_momentum, new_positions = reference.enter(momentum, positions, free, length)
        return torch.where(new_positions == length.unsqueeze(1), 0.0, new_momentum), new_positions

    monkeypatch.setattr(cache, "enter", at_zero)
    gm = traced(layers=3)
    run_all(gm)
    assert "triton_enter" not in operators(gm)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "options", [{}, {"alpha_layer": 0.9}, {"aggregator": "cumulative"}, {"alpha": 0.0}, {"score": False}, {"scorer": "vnorm"}],
    ids=str,
)  # fmt: skip
def test_decodes_as_without_kernels(backend: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    model = spellings.TinyDecoder(layers=3)
    expect = steps(model, prompted(model, 12, 2), 10, **options)
    torch._dynamo.reset()
    lower_to_triton(monkeypatch)
    assert steps(model, prompted(model, 12, 2), 10, **({"backend": backend} | options)) == expect


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, size, 8).to(dtype) for heads, size in ((6, 1), (2, 9), (2, 9)))
    live = torch.rand(2, 9, generator=generator) < 0.7
    live[:, 0] = True
    attend, mask = (query, key, value), additive(live)
    operator = torch.ops.inertia_fx
    torch.library.opcheck(operator.triton_slot_attention, (*attend, mask, 0.3, 2))
    momentum, positions = torch.rand(2, 9), torch.stack([torch.randperm(9), torch.randperm(9)])
    for scorer in ("attention", "vnorm", "entropy"):
        torch.library.opcheck(operator.triton_scored_attention, (*attend, mask, live, 0.3, 2, scorer))
        torch.library.opcheck(
            operator.triton_blended_attention, (*attend, mask, live, 0.3, 2, scorer, momentum, 0.8, 0.2)
        )
    state = (momentum, positions, torch.zeros(2, dtype=torch.int64), torch.full((2,), 9))
    torch.library.opcheck(operator.triton_enter, state)
    torch.library.opcheck(operator.triton_evict, (*state, momentum * 2, momentum * 3, positions.clone(), 1, 2))
    assert triton_ops.enter is not None
