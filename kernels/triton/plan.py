"""Cut the Triton kernels to a device: tile sizes, warps, splits. Pure functions of numbers; needs no GPU.

Decode attention reads every key and value once and does next to nothing with them, so what counts is bytes in flight:
enough programs to fill the chip, each with a few tiles under way. `benchmarks/roofline.py` prints what these choices
mean in bytes and microseconds, `benchmarks/kernel_resources.py` what the compiler makes of them.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import torch

TILE_BYTES = 16384
"""Bytes of one tile of keys or of values. Two tiles under way per program and two programs per processor keep 64 KiB
in flight on each, about twice what the memory's latency asks for on an H200 (4.8 TB/s, 132 processors, 0.8 us)."""

MAX_WIDTH = 256
"""Widest head that the kernels take."""

RESIDENT = 2
"""Programs that run on one processor at the same time, as the tiles are cut (`benchmarks/kernel_resources.py`)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Compile-time choices of the attention kernels.

    Attributes:
        block_slots: slots per tile.
        block_group: query heads of one KV head that share a program, padded to what the matrix units take (16).
        block_width, block_value: head widths of keys and values, padded to powers of two.
        warps, stages: per program; stages are the loop's software pipeline.
    """

    block_slots: int
    block_group: int
    block_width: int
    block_value: int
    warps: int
    stages: int


def power_of_two(number: int, least: int = 16) -> int:
    """Find the smallest power of two that is not below `number`, nor below `least`."""
    return max(least, 1 << (number - 1).bit_length())


def plan_for(groups: int, width: int, value_width: int, itemsize: int, hip: bool = False) -> Plan:
    """Plan the kernels for G = `groups` query heads per KV head, head widths D and Dv, and `itemsize` bytes per element.

    Keys and values are read once for up to 64 query heads of a group (16 in fp32); a larger group (multi-query
    attention) takes several programs, whose second reading comes out of the L2 cache. AMD's compute units have 64 KiB
    of shared memory and hide latency with more waves instead of a deeper pipeline.
    """
    block_width, block_value = power_of_two(width), power_of_two(value_width)
    widest = max(block_width, block_value)
    # AMD's registers hold what NVIDIA's shared memory does: with tiles half as large two to four programs fit.
    tile_bytes, most_slots = (TILE_BYTES // 2, 64) if hip else (TILE_BYTES, 128)
    block_slots = min(most_slots, max(16, tile_bytes // (widest * itemsize)))
    # fp32 products run on the ordinary cores, out of registers: more than 16 heads at once would spill them.
    block_group = min(64 if itemsize == 2 else 16, power_of_two(groups))
    if block_group > 16:
        block_slots = min(block_slots, 64)
    warps = 8 if block_group == 64 and not hip else 4
    return Plan(block_slots, block_group, block_width, block_value, warps, stages=2 if hip else 3)


def splits_for(programs: Any, slots: Any, processors: int, block_slots: int) -> Any:
    """Choose into how many pieces the slots are split. `programs` is batch size times KV heads (times chunks of a group).

    Few programs: as many splits as fill the chip, but none without a tile of its own. Many programs: the last, partly
    filled wave is what costs, so of the splits up to 4 the one that fills its waves best, and the fewest of equals;
    beyond 8 waves that is always 1. The numbers may be symbols (a graph that serves any slot count): the slot count
    never decides a branch, and a symbolic batch size takes the rule for few programs.
    """
    capacity = processors * RESIDENT
    tiles = (slots + block_slots - 1) // block_slots
    if not isinstance(programs, int):
        wanted: Any = torch.sym_max(1, capacity // programs)
    elif 2 * programs <= capacity:
        wanted = capacity // programs
    elif programs >= 8 * capacity:
        wanted = 1
    else:
        wanted = max(range(1, 5), key=lambda splits: (round(_filled(programs * splits, capacity), 2), -splits))
    if isinstance(wanted, int) and isinstance(tiles, int):
        return max(1, min(wanted, tiles))
    return torch.sym_max(1, torch.sym_min(wanted, tiles))


def _filled(programs: int, capacity: int) -> float:
    """Compute the share of the places in its waves that `programs` programs fill."""
    waves = -(-programs // capacity)
    return programs / (waves * capacity)


@functools.cache
def runs_triton(device_type: str) -> bool:
    """Tell whether our Triton kernels run on such a device ("cuda" is ROCm's name as well)."""
    return device_type == "cuda" and importlib.util.find_spec("triton") is not None


def refusal(query: Any, key: Any, value: Any) -> str | None:
    """Say why the kernels do not take these tensors; ``None`` if they do."""
    if {query.dtype, key.dtype, value.dtype} - set(DTYPES) or query.dtype != key.dtype:
        return f"{key.dtype} (the kernels take bfloat16, float16 and float32)"
    widest = max(int(query.shape[-1]), int(value.shape[-1]))
    if widest > MAX_WIDTH:
        return f"head width {widest} (the kernels take up to {MAX_WIDTH})"
    return None
