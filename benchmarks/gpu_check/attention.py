"""Time one layer's attention against reading its keys and values, and against SDPA."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from inertia_fx.kernels import reference
from inertia_fx.kernels.triton import plan

from .report import Row, Setting, launching_directly

KV_HEADS, GROUPS, WIDTH = 8, 4, 128
"""Of Llama-3.1-8B."""


@dataclasses.dataclass
class Buffers:
    """One set of operands. Timing goes round several sets, more than the cache holds."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor
    live: Tensor
    old: Tensor

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.mask, self.live, 1 / math.sqrt(WIDTH), KV_HEADS


def shapes(setting: Setting) -> list[tuple[int, int]]:
    """(slots, rows), the most telling first."""
    return [(60, 1), (33, 2)] if setting.tiny else [(65536, 1), (6400, 8), (65536, 8), (6400, 1)]


def nbytes(slots: int, rows: int) -> int:
    """Of keys and values, bf16."""
    return 2 * rows * KV_HEADS * slots * WIDTH * 2


def buffers(setting: Setting, slots: int, rows: int) -> list[Buffers]:
    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=setting.device, dtype=torch.bfloat16)

    def one() -> Buffers:
        return Buffers(
            query=normal(rows, KV_HEADS * GROUPS, 1, WIDTH),
            key=normal(rows, KV_HEADS, slots, WIDTH),
            value=normal(rows, KV_HEADS, slots, WIDTH),
            mask=torch.zeros(rows, 1, 1, slots, device=setting.device),
            live=torch.ones(rows, slots, device=setting.device, dtype=torch.bool),
            old=torch.rand(rows, slots, device=setting.device),
        )

    return [one() for _ in range(max(2, -(-3 * setting.cache_bytes // nbytes(slots, rows))))]


def copy_bandwidth(setting: Setting) -> float:
    """Bytes read and written per second by a large copy: what this device's memory gives, its data sheet aside."""
    count = (1 << 14) if setting.tiny else (1 << 30)
    source = torch.ones(count, dtype=torch.bfloat16, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / setting.seconds_per_call([lambda: target.copy_(source)])


def ours(setting: Setting, given: Buffers, scorer: str | None = "attention", **choices: Any) -> Any:
    """The layer's attention, with its momentum update if scored."""
    if not setting.on_gpu:
        return reference.scored_attention(*given.arguments, scorer or "attention")
    from inertia_fx.kernels.triton.attention import scored_attention

    blend = {"old": given.old, "old_weight": 0.8, "new_weight": 0.2} if scorer else {}
    return scored_attention(*given.arguments, scorer, processors=setting.processors, **blend, **choices)


def sdpa(given: Buffers) -> Any:
    return F.scaled_dot_product_attention(given.query, given.key, given.value, enable_gqa=True)


def timed(setting: Setting, sets: list[Buffers], call: Callable[[Buffers], Any]) -> float:
    with launching_directly():
        return setting.seconds_per_call([functools.partial(call, given) for given in sets])


def against_copy_and_sdpa(setting: Setting) -> Iterator[Row]:
    """Scored and unscored; share of the copy's bandwidth that reading keys and values goes at."""
    bandwidth = copy_bandwidth(setting)
    yield Row("copy", {"TB/s": bandwidth / 1e12})
    target = (1 << 8) if setting.tiny else (1 << 10)
    small = torch.zeros(target, device=setting.device)
    yield Row("smallest kernel", {"us": setting.seconds_per_call([small.zero_] * 100) * 1e6})
    goals = {(65536, 1): 0.85, (65536, 8): 0.85, (6400, 8): 0.7}
    for slots, rows in shapes(setting):
        sets = buffers(setting, slots, rows)
        times = {
            "scored": timed(setting, sets, lambda given: ours(setting, given)),
            "unscored": timed(setting, sets, lambda given: ours(setting, given, None)),
            "vnorm": timed(setting, sets, lambda given: ours(setting, given, "vnorm")),
            "entropy": timed(setting, sets, lambda given: ours(setting, given, "entropy")),
            "sdpa": timed(setting, sets, sdpa),
        }
        # RuntimeError: this backend has no kernel for grouped heads here.
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION), contextlib.suppress(RuntimeError):
            times["flash"] = timed(setting, sets, sdpa)
        share = nbytes(slots, rows) / times["scored"] / bandwidth
        figures: dict[str, Any] = {f"{name} us": seconds * 1e6 for name, seconds in times.items()}
        figures |= {"of copy": share, "unscored of copy": nbytes(slots, rows) / times["unscored"] / bandwidth}
        hoped = goals.get((slots, rows))
        goal = {} if hoped is None else setting.goal(f"{hoped:.0%} of copy bandwidth", share >= hoped)
        yield Row(f"{slots} slots x {rows}", figures, **goal)
        del sets
        setting.free_memory()


def splits(setting: Setting) -> Iterator[Row]:
    """The rule's number of splits beside others: so many programs per processor."""
    for slots, rows in shapes(setting):
        sets = buffers(setting, slots, rows)
        pieces = rows * KV_HEADS
        chosen = plan.plan_for(GROUPS, WIDTH, WIDTH, 2)
        tiles = -(-slots // chosen.block_slots)
        rule = plan.splits_for(pieces, slots, setting.processors, chosen.block_slots)
        tried = {min(tiles, max(1, round(each * setting.processors / pieces))) for each in (0.97, 1.5, 2, 3, 4, 6)}
        figures = {}
        for count in sorted(tried | {rule}):
            seconds = timed(setting, sets, lambda given, count=count: ours(setting, given, splits=count))
            figures[f"{count}{' (rule)' if count == rule else ''}"] = f"{seconds * 1e6:.1f} us"
        yield Row(f"{slots} slots x {rows}", figures)
        del sets
        setting.free_memory()


def tiles(setting: Setting) -> Iterator[Row]:
    """Other tile heights, pipeline depths and warps than the plan's, at 6,400 slots and 8 rows."""
    slots, rows = shapes(setting)[1]
    sets = buffers(setting, slots, rows)
    usual = plan.plan_for(GROUPS, WIDTH, WIDTH, 2)
    for block_slots, stages, warps in (
        (64, 3, 4),
        (64, 2, 4),
        (32, 3, 4),
        (32, 5, 4),
        (128, 2, 4),
        (128, 2, 8),
        (64, 4, 4),
    ):
        tried = dataclasses.replace(usual, block_slots=block_slots, stages=stages, warps=warps)
        seconds = timed(setting, sets, lambda given, tried=tried: ours(setting, given, plan=tried))
        rule = " (plan)" if tried == usual else ""
        yield Row(f"{block_slots} slots, {stages} stages, {warps} warps{rule}", {"us": seconds * 1e6})


def flex(setting: Setting) -> Iterator[Row]:
    """FlexAttention's decoding kernel, unscored; it compiles for some seconds per shape."""
    from torch.nn.attention.flex_attention import flex_attention

    for slots, rows in shapes(setting):
        sets = buffers(setting, slots, rows)
        attend = torch.compile(flex_attention, dynamic=False) if setting.on_gpu else flex_attention

        def call(given: Buffers, attend: Any = attend) -> Any:
            return attend(given.query, given.key, given.value, enable_gqa=True)

        yield Row(f"{slots} slots x {rows}", {"flex us": timed(setting, sets, call) * 1e6})
        del sets
        setting.free_memory()
