"""How the kernels are cut, as functions of numbers, and the bytes that `verify/theory/roofline.py` says they move."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from inertia_fx.kernels.triton import plan
from inertia_fx.verify.theory import roofline

H200, A100 = roofline.GPUS["H200"], roofline.GPUS["A100"]


# ---------------------------------------------------------------------- plan_for


@pytest.mark.parametrize(
    ("number", "least", "expect"), [(1, 16, 16), (16, 16, 16), (17, 16, 32), (80, 16, 128), (3, 1, 4)]
)
def test_power_of_two(number: int, least: int, expect: int) -> None:
    assert plan.power_of_two(number, least) == expect


@given(
    groups=st.integers(1, 200),
    width=st.integers(1, plan.MAX_WIDTH),
    value_width=st.integers(1, plan.MAX_WIDTH),
    itemsize=st.sampled_from([2, 4]),
    hip=st.booleans(),
)
def test_plan_for(groups: int, width: int, value_width: int, itemsize: int, hip: bool) -> None:
    chosen = plan.plan_for(groups, width, value_width, itemsize, hip)
    blocks = (chosen.block_slots, chosen.block_group, chosen.block_width, chosen.block_value)
    assert all(block >= 16 and block & (block - 1) == 0 for block in blocks), "matrix units take powers of two from 16"
    assert width <= chosen.block_width < 2 * max(width, 16)
    assert value_width <= chosen.block_value < 2 * max(value_width, 16)
    most = 64 if itemsize == 2 else 16
    assert min(groups, most) <= chosen.block_group <= most, "a chunk is no smaller than it need be"
    assert chosen.block_group < 2 * max(groups, 16), "nor larger"
    assert chosen.block_slots * max(chosen.block_width, chosen.block_value) * itemsize <= plan.TILE_BYTES
    assert chosen.warps & (chosen.warps - 1) == 0
    assert chosen.stages >= 1


def test_plan_of_llama() -> None:
    chosen = plan.plan_for(4, 128, 128, 2)
    assert (chosen.block_slots, chosen.block_group, chosen.block_width, chosen.block_value) == (64, 16, 128, 128)


# ---------------------------------------------------------------------- splits_for


@given(
    programs=st.integers(1, 20000),
    slots=st.integers(1, 200_000),
    processors=st.integers(1, 304),
    block_slots=st.sampled_from([16, 32, 64, 128]),
)
def test_every_split_can_have_a_tile(programs: int, slots: int, processors: int, block_slots: int) -> None:
    splits = plan.splits_for(programs, slots, processors, block_slots)
    assert 1 <= splits <= -(-slots // block_slots)


@given(
    programs=st.integers(1, 20000),
    processors=st.integers(1, 304),
    tiles=st.integers(1, 4000),
    more=st.integers(0, 4000),
)
def test_more_slots_never_mean_fewer_splits(programs: int, processors: int, tiles: int, more: int) -> None:
    few = plan.splits_for(programs, tiles * 64, processors, 64)
    many = plan.splits_for(programs, (tiles + more) * 64, processors, 64)
    assert few <= many


@pytest.mark.parametrize("gpu", roofline.GPUS.values(), ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 8, 32])
@pytest.mark.parametrize("slots", [6400, 65536])
def test_one_row_gives_every_processor_work(gpu: roofline.GPU, kv_heads: int, slots: int) -> None:
    splits = plan.splits_for(kv_heads, slots, gpu.processors, 64)
    tiles = -(-slots // 64)
    working = kv_heads * -(-tiles // -(-tiles // splits))
    # Fewer than there are processors only if the slots do not give more tiles, or by rounding.
    assert working >= min(0.85 * gpu.processors, 0.5 * kv_heads * tiles)


@pytest.mark.parametrize("gpu", roofline.GPUS.values(), ids=str)
def test_many_rows_are_not_split(gpu: roofline.GPU) -> None:
    assert plan.splits_for(16 * gpu.processors, 65536, gpu.processors, 64) == 1


@pytest.mark.parametrize("gpu", roofline.GPUS.values(), ids=str)
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128])
def test_no_processor_has_far_more_than_its_share(gpu: roofline.GPU, rows: int) -> None:
    found = roofline.roofline(roofline.Shape(rows, 8, 4, 65536, 128, 128), gpu)
    assert 1 <= found.uneven <= 1.25


def test_a_symbolic_slot_count_gets_no_guard() -> None:
    """A guard would compile the step anew for other prompt lengths."""
    environment = ShapeEnv()
    dynamic = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    (slots,) = FakeTensorMode(shape_env=environment).from_tensor(torch.empty(6400), symbolic_context=dynamic).shape
    for programs in (8, 512, 5000):
        splits = plan.splits_for(programs, slots, 132, 64)
        assert isinstance(splits, torch.SymInt)
        assert splits.node.hint == plan.splits_for(programs, 6400, 132, 64)
        assert not environment.guards


def test_symbolic_sizes_go_through_a_trace() -> None:
    """As Inductor sees it: slots (and rows) are symbols of a graph, and the number of splits is an expression of them."""

    def partial_sums(key: Any) -> Any:
        rows, kv_heads, slots, width = key.shape
        return key.new_empty(rows, plan.splits_for(rows * kv_heads, slots, 132, 64), width)

    graph = make_fx(partial_sums, tracing_mode="symbolic")(torch.empty(3, 8, 6400, 4))
    for rows, slots in ((3, 6400), (3, 65536), (5, 100)):
        splits = graph(torch.empty(rows, 8, slots, 4)).shape[1]
        # A symbolic number of programs takes the rule for few of them: fill the chip, in whole tiles.
        tiles = -(-slots // 64)
        wanted = max(1, min(132 * plan.RESIDENT // (rows * 8), tiles))
        assert -(-tiles // splits) == -(-tiles // wanted)
        assert splits <= wanted
    assert not [guard for guard in graph.shape_env.guards if "6400" in str(guard.expr)]


# ---------------------------------------------------------------------- refusal


@pytest.mark.parametrize(
    ("dtypes", "widths", "expect"),
    [
        ((torch.bfloat16,) * 3, (128, 128), None),
        ((torch.float32,) * 3, (256, 64), None),
        ((torch.float64,) * 3, (64, 64), "float64"),
        ((torch.float16, torch.bfloat16, torch.bfloat16), (64, 64), "bfloat16"),
        ((torch.bfloat16,) * 3, (257, 64), "257"),
        ((torch.bfloat16,) * 3, (64, 512), "512"),
    ],
)
def test_refusal(dtypes: tuple[torch.dtype, ...], widths: tuple[int, int], expect: str | None) -> None:
    width, value_width = widths
    shapes = ((1, 2, 1, width), (1, 2, 5, width), (1, 2, 5, value_width))
    tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    said = plan.refusal(*tensors)
    assert said is None if expect is None else said is not None and expect in said


# ---------------------------------------------------------------------- roofline

TINY = roofline.Shape(rows=2, kv_heads=3, groups=2, slots=5, width=4, value_width=3)


def test_bytes_against_a_count_one_by_one() -> None:
    """Walk through the kernels' loops and note every element that is touched, by whom."""
    splits = 2
    once, twice = set(), []
    for row, kv_head in itertools.product(range(2), range(3)):
        for slot in range(5):
            once |= {("key", 2, row, kv_head, slot, width) for width in range(4)}
            once |= {("value", 2, row, kv_head, slot, width) for width in range(3)}
            once |= {("mask", 4, row, slot), ("old", 4, row, slot), ("new", 4, row, slot)}
        for head in range(2 * kv_head, 2 * kv_head + 2):
            once |= {("query", 2, row, head, width) for width in range(4)}
            once |= {("output", 2, row, head, width) for width in range(3)}
            twice += [("logit", 4, row, head, slot) for slot in range(5)]
            for split in range(splits):
                twice += [("partial", 4, row, head, split, width) for width in range(3)]
                twice += [("largest", 4, row, head, split), ("total", 4, row, head, split)]

    def count(elements: Any, *names: str) -> int:
        return sum(element[1] for element in elements if element[0] in names)

    found = roofline.traffic(TINY, splits)
    assert found.keys_values == count(once, "key", "value")
    assert found.queries_masks == count(once, "query", "mask")
    assert found.outputs == count(once, "output")
    assert found.momentum == count(once, "old", "new")
    assert found.logits_twice == 2 * count(twice, "logit")
    assert found.partials_twice == 2 * count(twice, "partial", "largest", "total")
    assert found.total == sum(element[1] for element in once) + 2 * sum(element[1] for element in twice)
    assert roofline.scoring_bytes(TINY) == found.total - roofline.traffic(TINY, splits, scored=False).total


def test_bytes_against_the_tensors_that_are_launched() -> None:
    pytest.importorskip("triton")
    from inertia_fx.verify.testing import launches

    case = launches.Case(torch.bfloat16, groups=4, width=128, value_width=64)
    attend, merge = launches.launches_of(case, launches.GPUS["sm_90"], slots=640, rows=3)
    tensors = {**merge.arguments, **attend.arguments}
    nbytes = {name: t.numel() * t.element_size() for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    found = roofline.traffic(roofline.Shape(3, 8, 4, 640, 128, 64), splits=7)
    assert found.keys_values == nbytes["key"] + nbytes["value"]
    assert found.queries_masks == nbytes["query"] + nbytes["mask"]
    assert found.outputs == nbytes["output"]
    assert found.momentum == nbytes["old"] + nbytes["scores"]
    assert found.logits_twice == 2 * nbytes["logits"]
    assert found.partials_twice == 2 * (nbytes["partial"] + nbytes["stats"])


def test_flops() -> None:
    products = [
        (row, head, slot, width) for row in range(2) for head in range(6) for slot in range(5) for width in range(7)
    ]
    assert roofline.flops(TINY) == 2 * len(products)
    assert roofline.flops(TINY, padded_group=16) == 8 * roofline.flops(TINY)


def test_roofline_names_what_binds() -> None:
    llama = roofline.Shape(8, 8, 4, 65536, 128, 128)
    found = roofline.roofline(llama, H200)
    assert found.bound == "memory"
    assert found.memory == pytest.approx(8 * 8 * 65536 * 256 * 2 / 4.8e12, rel=0.05)
    assert roofline.roofline(dataclasses.replace(llama, rows=1, slots=640), H200).bound == "launch"
    chunk = dataclasses.replace(llama, kv_heads=1, groups=64, dtype=torch.float32)
    assert roofline.roofline(chunk, A100).bound == "compute", "fp32 products do not run on the matrix units"


def test_scoring_is_a_small_part_of_a_step() -> None:
    # A prompt of 64k at ratio 0.9.
    assert roofline.scoring_share(roofline.LLAMA, rows=1, slots=6554) < 0.004
    assert roofline.scoring_share(roofline.LLAMA, rows=8, slots=6554) < 0.03
    assert roofline.LLAMA.weights == pytest.approx(8.03e9 - 128256 * 4096, rel=0.001)  # the embedding is looked up
