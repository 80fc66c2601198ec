"""State kernels in Triton (needs `triton`): enter a token, evict the one of least use, gather slots; a launch each for all rows.

    enter    start of a step: the new token takes the free slot, at the mean of the row's other live momenta
    evict    end of a step: momentum, positions, length written back in place; next free slot = argmin (m, position)
    gather   once, at the first eviction: the survivors' keys or values into their slots

`reference.enter` and `reference.next_free` are the definitions. The entering mean is summed in fp64 (SPEC E1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

BLOCK_SLOTS, BLOCK_COPY = 1024, 32
"""Slots per turn of a row's loop; slots per program of the copy."""

_NO_SLOT = tl.constexpr(torch.iinfo(torch.int32).max)
_POSITION_MAX = tl.constexpr(torch.iinfo(torch.int64).max)


@triton.jit
def enter_kernel(
    momentum, positions, free, length, new_momentum, new_positions, slots,
    momentum_row, momentum_slot, positions_row, positions_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    """Enter the new token. Grid: (rows,). Two turns over the slots: the mean, then the state with the new token in it."""
    row = tl.program_id(0).to(tl.int64)
    taken = tl.load(free + row)
    position = tl.load(length + row)
    momentum += row * momentum_row
    positions += row * positions_row
    total = tl.zeros([BLOCK], tl.float64)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        where = tl.load(positions + slot * positions_slot, mask=slot < slots, other=-1)
        m = tl.load(momentum + slot * momentum_slot, mask=slot < slots, other=0.0)
        other = (where >= 0) & (slot != taken)
        total += tl.where(other, m, 0.0).to(tl.float64)
        count += other.to(tl.int32)
    mean = (tl.sum(total, 0) / tl.maximum(tl.sum(count, 0), 1).to(tl.float64)).to(tl.float32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        where = tl.load(positions + slot * positions_slot, mask=slot < slots, other=-1)
        m = tl.load(momentum + slot * momentum_slot, mask=slot < slots, other=0.0)
        tl.store(new_momentum + row * slots + slot, tl.where(slot == taken, mean, m), mask=slot < slots)
        tl.store(new_positions + row * slots + slot, tl.where(slot == taken, position, where), mask=slot < slots)


@triton.jit
def evict_kernel(
    momentum, positions, free, length, moved, marks, new_positions, protect_first, protect_recent, slots,
    momentum_row, momentum_slot, positions_row, positions_slot,
    moved_row, moved_slot, marks_row, marks_slot, new_row, new_slot, BLOCK: tl.constexpr,
):  # fmt: skip
    """Choose the next free slot and write the state. Grid: (rows,).

    Every lane keeps the best of its slots by (momentum, position, slot); at the end the best lane's is chosen.
    """
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(length + row)
    momentum += row * momentum_row
    positions += row * positions_row
    least = tl.full([BLOCK], float("inf"), tl.float32)
    oldest = tl.full([BLOCK], _POSITION_MAX, tl.int64)
    best = tl.full([BLOCK], _NO_SLOT, tl.int32)
    for first in range(0, slots, BLOCK):
        slot = first + tl.arange(0, BLOCK)
        inside = slot < slots
        where = tl.load(new_positions + row * new_row + slot * new_slot, mask=inside, other=-1)
        # Dead slots carry -inf and closed ones +inf, whatever the layers made of them.
        m = tl.load(moved + row * moved_row + slot * moved_slot, mask=inside, other=float("inf"))
        mark = tl.load(marks + row * marks_row + slot * marks_slot, mask=inside, other=float("inf"))
        m = tl.where(where >= 0, m, mark)
        tl.store(momentum + slot * momentum_slot, m, mask=inside)
        tl.store(positions + slot * positions_slot, where, mask=inside)
        # Nothing is smaller or equal to NaN: without this a row of NaN would choose no slot at all.
        m = tl.where(m != m, -float("inf"), m)
        held = (where >= 0) & ((where < protect_first) | (where > position - protect_recent))
        m = tl.where(held, float("inf"), m)
        better = inside & ((m < least) | ((m == least) & ((where < oldest) | ((where == oldest) & (slot < best)))))
        least = tl.where(better, m, least)
        oldest = tl.where(better, where, oldest)
        best = tl.where(better, slot, best)
    smallest = least == tl.min(least, 0)
    first_position = tl.min(tl.where(smallest, oldest, _POSITION_MAX), 0)
    chosen = tl.min(tl.where(smallest & (oldest == first_position), best, _NO_SLOT), 0)
    tl.store(free + row, chosen.to(tl.int64))
    tl.store(length + row, position + 1)


@triton.jit
def gather_kernel(
    buffer, index, result, kv_heads, taken, capacity, buffer_row, buffer_head, buffer_slot, buffer_width,
    WIDTH: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy chosen slots. Grid: (rows * KV heads, blocks of slots). Slots beyond `taken` become 0."""
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = tl.arange(0, BLOCK_WIDTH)
    source = tl.load(index + row * taken + slot, mask=slot < taken, other=0)
    inside = (width < WIDTH)[None, :]
    place = (
        buffer + row * buffer_row + head * buffer_head + source[:, None] * buffer_slot + width[None, :] * buffer_width
    )
    values = tl.load(place, mask=(slot < taken)[:, None] & inside, other=0.0)
    place = result + ((row * kv_heads + head) * capacity + slot)[:, None] * WIDTH + width[None, :]
    tl.store(place, values, mask=(slot < capacity)[:, None] & inside)


def enter(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Enter the new token into the state, as :func:`inertia_fx.kernels.reference.enter`."""
    rows, slots = positions.shape
    new_momentum, new_positions = momentum.new_empty(rows, slots), positions.new_empty(rows, slots)
    wrap_triton(enter_kernel)[(rows,)](
        momentum, positions, free, length, new_momentum, new_positions, slots, *momentum.stride(), *positions.stride(),
        BLOCK=BLOCK_SLOTS, num_warps=8,
    )  # fmt: skip
    return new_momentum, new_positions


def evict(
    momentum: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    moved: Tensor,
    marks: Tensor,
    new_positions: Tensor,
    protect_first: int,
    protect_recent: int,
) -> None:
    """Choose the next free slot and write the state back, in place.

    Args:
        momentum, positions, free, length: the state, see `inertia_fx.slots.RetentionState`; overwritten.
        moved: [B, S] fp32, what the layers made of the momentum.
        marks: [B, S] fp32, the momentum the step began with: what dead and closed slots keep.
        new_positions: [B, S] int64, with the new token in it.
        protect_first, protect_recent: tokens at either end of the text that are never chosen.
    """
    rows, slots = positions.shape
    wrap_triton(evict_kernel)[(rows,)](
        momentum, positions, free, length, moved, marks, new_positions, protect_first, protect_recent, slots,
        *momentum.stride(), *positions.stride(), *moved.stride(), *marks.stride(), *new_positions.stride(),
        BLOCK=BLOCK_SLOTS, num_warps=8,
    )  # fmt: skip


def gather(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
    """Gather the slots `index` [B, n] int64 of `buffer` [B, N, S, D], then zeros: [B, N, capacity, D]. Outside of graphs."""
    rows, kv_heads, _, width = buffer.shape
    result = buffer.new_empty(rows, kv_heads, capacity, width)
    gather_kernel[(rows * kv_heads, triton.cdiv(capacity, BLOCK_COPY))](
        buffer, index.contiguous(), result, kv_heads, index.shape[1], capacity, *buffer.stride(),
        WIDTH=width, BLOCK_WIDTH=triton.next_power_of_2(width), BLOCK=BLOCK_COPY, num_warps=4,
    )  # fmt: skip
    return result
