"""The tensors of a sequence: slot buffers per layer and the retention state, and what happens to them between steps.

Everything here works on whole batches without looking at the device: how many tokens each row keeps is handed in, which
ones they are stays on the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference import NO_POSITION, is_protected, next_free
from ..kernels.triton.plan import runs_triton

DEAD, CLOSED = float("-inf"), float("inf")
"""Momentum of a slot that may be filled, and of one that is neither attended nor filled."""

_LAST = torch.iinfo(torch.int64).max


@dataclasses.dataclass
class Entry:
    """The state inside a decode step, once the new token has its slot. All [B, S]."""

    live: Tensor
    momentum: Tensor
    positions: Tensor


@dataclasses.dataclass
class RetentionState:
    """What decides who stays, shared by a group of layers (today: all of them). B rows, S slots.

    Attributes:
        momentum: [B, S] fp32; -inf in dead slots, +inf in closed ones.
        positions: [B, S] int64 true positions of the tokens; -1 where there is none.
        free: [B] int64, the slot that the next token overwrites. What is in it counts as gone.
        length: [B] int64, tokens the row has seen (padding not counted): the next token's position.
    """

    momentum: Tensor
    positions: Tensor
    free: Tensor
    length: Tensor


class SlotLayer:
    """Keys and values of one layer: [B, N, S, D] and [B, N, S, Dv]. The two widths may differ."""

    keys: Tensor | None = None
    values: Tensor | None = None

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add a prompt's columns; returns all columns with the new ones still attached to autograd."""
        if self.keys is not None and self.values is not None:
            key = torch.cat([self.keys, key], dim=2)
            value = torch.cat([self.values, value], dim=2)
        self.keys, self.values = _own(key), _own(value)
        return key, value

    def write(self, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token per row into its slot, in place. Traced: this is the whole cache update of a decode step."""
        assert self.keys is not None and self.values is not None
        self.keys[rows, :, slots] = key[:, :, 0]
        self.values[rows, :, slots] = value[:, :, 0]
        return self.keys, self.values


def text_order(state: RetentionState, alive: Tensor) -> Tensor:
    """[B, S] slot indices in the order of the text, slots that are not `alive` behind them."""
    return torch.where(alive, state.positions, _LAST).argsort(dim=1)


def survivors(state: RetentionState, keep: Sequence[int], protect_first: int, protect_recent: int) -> Tensor:
    """[B, max(keep)] slot indices of each row's top `keep` by (momentum, position), in text order, padded at the end."""
    alive = state.positions >= 0
    held = is_protected(state.positions, state.length - 1, protect_first, protect_recent)
    known = alive & ~state.momentum.isnan()  # a momentum that is not a number goes first, as in next_free
    rank = torch.where(held, CLOSED, torch.where(known, state.momentum, DEAD))
    kept = _sortable(rank, state.positions).topk(max(keep), dim=1).indices
    survives = torch.arange(kept.shape[1], device=kept.device) < column(keep, kept)
    return kept.gather(1, torch.where(survives, state.positions.gather(1, kept), _LAST).argsort(dim=1))


def _sortable(momentum: Tensor, positions: Tensor) -> Tensor:
    """int64 in the order of (momentum, position): of equal momentum the oldest is the smallest (SPEC D7), and no two tie.

    A float's bits order like an integer's, those of negative numbers in reverse; adding 0 makes -0 and 0 the same.
    """
    bits = (momentum + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (positions + 1)


def pool(state: RetentionState, width: int, rows: Sequence[bool], protect_first: int, protect_recent: int) -> None:
    """In these rows, momentum becomes the largest within (width - 1) / 2 places in text order (SPEC D19)."""
    alive = state.positions >= 0
    order = text_order(state, alive)
    momentum = torch.where(alive, state.momentum, DEAD).gather(1, order).unsqueeze(1)
    pooled = torch.nn.functional.max_pool1d(momentum, width, stride=1, padding=width // 2).squeeze(1)
    pooled = torch.empty_like(pooled).scatter_(1, order, pooled)
    chosen = column(rows, alive)
    state.momentum.copy_(torch.where(chosen & alive, pooled, state.momentum))
    free = next_free(state.momentum, state.positions, state.length - 1, protect_first, protect_recent)
    state.free.copy_(torch.where(chosen.squeeze(1), free, state.free))


def gather(
    layers: Sequence[SlotLayer],
    state: RetentionState,
    index: Tensor,
    counts: Sequence[int],
    limits: Sequence[int],
    capacity: int,
) -> None:
    """New buffers of `capacity` slots: each row's first `counts` of `index` [B, n], then dead up to `limits`, then closed."""
    for layer in layers:
        layer.keys, layer.values = _take(layer.keys, index, capacity), _take(layer.values, index, capacity)
    slots = torch.arange(capacity, device=index.device)
    empty = torch.where(slots < column(limits, index), DEAD, CLOSED).to(state.momentum.dtype)
    full = slots < column(counts, index)
    index = torch.cat([index, index.new_zeros(index.shape[0], capacity - index.shape[1])], dim=1)
    state.momentum = torch.where(full, state.momentum.gather(1, index), empty)
    state.positions = torch.where(full, state.positions.gather(1, index), NO_POSITION)
    mark_for_compile(layers, state)


def extend(
    layers: Sequence[SlotLayer], state: RetentionState, room: int, limits: Sequence[int], full: Sequence[bool]
) -> None:
    """`room` more slots, dead up to each row's limit; the next free slot of the `full` rows is the first of them."""
    before = state.positions.shape[1]
    slots = torch.arange(before, before + room, device=state.positions.device)
    fresh = torch.where(slots < column(limits, slots), DEAD, CLOSED).to(state.momentum.dtype)
    for layer in layers:
        layer.keys, layer.values = _widen(layer.keys, room), _widen(layer.values, room)
    state.momentum = torch.cat([state.momentum, fresh], dim=1)
    state.positions = torch.cat([state.positions, state.positions.new_full(fresh.shape, NO_POSITION)], dim=1)
    state.free = torch.where(column(full, slots).squeeze(1), before, state.free)
    mark_for_compile(layers, state)


def select_rows(layers: Sequence[SlotLayer], state: RetentionState, index: Tensor) -> None:
    """Row i becomes what row index[i] was; in place if the number of rows stays, so that addresses stay valid."""
    same = index.numel() == state.free.numel() and is_writable(layers, state)
    owners: list[tuple[Any, tuple[str, ...]]] = [(layer, ("keys", "values")) for layer in layers]
    for owner, names in [*owners, (state, ("momentum", "positions", "free", "length"))]:
        for name in names:
            tensor = getattr(owner, name)
            chosen = tensor.index_select(0, index.to(tensor.device))
            if same:
                tensor.copy_(chosen)
            else:
                setattr(owner, name, chosen)
    mark_for_compile(layers, state)


def narrow(layers: Sequence[SlotLayer], state: RetentionState, capacity: int) -> None:
    """Let go of the slots from `capacity` on, which no row may fill any more."""
    for layer in layers:
        assert layer.keys is not None and layer.values is not None
        layer.keys, layer.values = layer.keys[:, :, :capacity].clone(), layer.values[:, :, :capacity].clone()
    state.momentum, state.positions = state.momentum[:, :capacity].clone(), state.positions[:, :capacity].clone()
    mark_for_compile(layers, state)


def is_writable(layers: Sequence[SlotLayer], state: RetentionState) -> bool:
    """False if a tensor was made under `torch.inference_mode` and we are outside of it."""
    if torch.is_inference_mode_enabled():
        return True
    tensors = [getattr(state, field.name) for field in dataclasses.fields(state)]
    tensors += [tensor for layer in layers for tensor in (layer.keys, layer.values)]
    return not any(tensor.is_inference() for tensor in tensors)


def clone(layers: Sequence[SlotLayer], state: RetentionState) -> None:
    """Fresh tensors with the same contents (those made under `torch.inference_mode` cannot be written outside of it)."""
    for layer in layers:
        assert layer.keys is not None and layer.values is not None
        layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    for field in dataclasses.fields(state):
        setattr(state, field.name, getattr(state, field.name).clone())
    mark_for_compile(layers, state)


def mark_for_compile(layers: Sequence[SlotLayer], state: RetentionState) -> None:
    """What the compiled step may count on.

    The slot count is a dynamic dimension: one graph serves every prompt length and budget. The addresses stay: a CUDA
    graph of the step (mode="reduce-overhead") may write to these tensors without copying them first.
    """
    buffers = [buffer for layer in layers for buffer in (layer.keys, layer.values)]
    slotted = [*((buffer, 2) for buffer in buffers), (state.momentum, 1), (state.positions, 1)]
    for tensor, dimension in slotted:
        torch._dynamo.mark_dynamic(tensor, dimension)
    for tensor in (*buffers, state.momentum, state.positions, state.free, state.length):
        torch._dynamo.mark_static_address(tensor, guard=False)


def column(per_row: Sequence[int], like: Tensor) -> Tensor:
    """[B, 1], on the device of `like`. Nothing waits for that device, as a plain copy to it would."""
    if len(set(per_row)) == 1:
        return torch.full((len(per_row), 1), per_row[0], device=like.device)
    values = torch.tensor(per_row)
    if like.is_cuda:
        values = values.pin_memory()
    return values.to(like.device, non_blocking=True).unsqueeze(1)


def _take(buffer: Tensor | None, index: Tensor, capacity: int) -> Tensor:
    """[B, N, capacity, D]: first the slots of `index` [B, n], then nothing in particular (never attended)."""
    assert buffer is not None
    if runs_triton(buffer.device.type):
        from ..kernels.triton import state as evict

        return evict.gather(buffer, index, capacity)
    rows, heads, _, width = buffer.shape
    result = buffer.new_zeros(rows, heads, capacity, width)
    taken = index.shape[1]
    expanded = index[:, None, :, None].expand(rows, heads, taken, width)
    result[:, :, :taken] = buffer.gather(2, expanded)
    return result


def _own(tensor: Tensor) -> Tensor:
    """Detached; copied if it is a view into something larger (a fused qkv projection), which it would keep alive."""
    tensor = tensor.detach()
    alone = tensor.untyped_storage().nbytes() <= tensor.numel() * tensor.element_size()
    return tensor if alone else tensor.clone()


def _widen(buffer: Tensor | None, room: int) -> Tensor:
    assert buffer is not None
    rows, heads, slots, width = buffer.shape
    result = buffer.new_zeros(rows, heads, slots + room, width)
    result[:, :, :slots] = buffer
    return result
