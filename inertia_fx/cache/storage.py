"""Storage of a slot cache: slot buffers per layer, the retention state, and what replaces them between decode steps.

Everything here works on whole batches without looking at the device: how many tokens each row keeps is handed in (see
`ledger`), which ones they are stays on the device. Operations that need new buffers put them into the layers and return
the retention state that goes with them.

B rows, N key-value heads, S slots, D and Dv head widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..kernels import targets
from ..kernels.reference import NO_POSITION, mean_momentum

DEAD, CLOSED = float("-inf"), float("inf")
"""Momentum of a slot that may be filled, and of one that is neither attended nor filled."""


@dataclasses.dataclass
class Entry:
    """The retention state inside a decode step, once the new token has its slot. All [B, S].

    Attributes:
        live: bool, slots that hold a token: what attention attends to.
        momentum: fp32.
        positions: int64, true positions; -1 where there is no token.
    """

    live: Tensor
    momentum: Tensor
    positions: Tensor


@dataclasses.dataclass
class RetentionState:
    """Momentum and position of every cached token, shared by all layers (SPEC D1).

    Attributes:
        momentum: [B, S] fp32; -inf in dead slots, +inf in closed ones.
        positions: [B, S] int64 true positions of the tokens; -1 where there is none.
        free: [B] int64, the slot that the next token overwrites. What is in it counts as evicted (SPEC E4).
        length: [B] int64, tokens the row has seen (padding not counted): the next token's position.
    """

    momentum: Tensor
    positions: Tensor
    free: Tensor
    length: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> RetentionState:
        """Create the state of `rows` sequences without tokens."""
        none = torch.zeros(rows, 0, dtype=torch.float32, device=device)
        start = torch.zeros(rows, dtype=torch.int64, device=device)
        return cls(none, none.long(), start, start.clone())

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """All four, in the order of the attributes."""
        return self.momentum, self.positions, self.free, self.length

    def map(self, function: Callable[[Tensor], Tensor]) -> RetentionState:
        """Apply a function to every tensor; returns a new state."""
        return RetentionState(*map(function, self.tensors))

    def clone(self) -> RetentionState:
        """Copy the state, tensors included."""
        return self.map(Tensor.clone)


class SlotLayer:
    """Keys [B, N, S, D] and values [B, N, S, Dv] of one layer. The two widths may differ."""

    keys: Tensor | None = None
    values: Tensor | None = None

    @property
    def buffers(self) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that has cached something."""
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append a prompt's columns.

        Args:
            key, value: [B, N, tokens, D] and [B, N, tokens, Dv].

        Returns:
            All columns, the new ones still attached to autograd.
        """
        if self.keys is not None and self.values is not None:
            key = torch.cat([self.keys, key], dim=2)
            value = torch.cat([self.values, value], dim=2)
        self.keys, self.values = _own(key), _own(value)
        return key, value

    def write(self, key: Tensor, value: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Write one token per row into its slot, in place. Traced: this is the whole cache update of a decode step.

        Args:
            key, value: [B, N, 1, D] and [B, N, 1, Dv].
            rows, slots: [B] int64, where they go.

        Returns:
            The buffers, for attention to read.
        """
        assert self.keys is not None and self.values is not None
        self.keys[rows, :, slots] = key[:, :, 0]
        self.values[rows, :, slots] = value[:, :, 0]
        return self.keys, self.values


def nbytes(tensors: Iterable[Tensor | None]) -> int:
    """Count the bytes that tensors hold: their storages, not views into them, and each storage once."""
    held = {}
    for tensor in tensors:
        if tensor is not None:
            storage = tensor.untyped_storage()
            held[storage.data_ptr(), str(tensor.device)] = storage.nbytes()
    return sum(held.values())


def join(state: RetentionState, real: Tensor) -> RetentionState:
    """Append a prompt's tokens to the state: at their positions, at the mean of the row's live momenta (SPEC D13).

    Args:
        real: [B, tokens] bool, false in padding columns.
    """
    mean = mean_momentum(state.momentum, state.positions >= 0)
    index = real.long().cumsum(-1)
    positions = torch.where(real, state.length.unsqueeze(1) + index - 1, NO_POSITION)
    return RetentionState(
        momentum=torch.cat([state.momentum, torch.where(real, mean, CLOSED)], dim=1),
        positions=torch.cat([state.positions, positions], dim=1),
        free=state.free,
        length=state.length + index[:, -1],
    )


def gather(
    layers: Sequence[SlotLayer],
    state: RetentionState,
    index: Tensor,
    counts: Sequence[int],
    limits: Sequence[int],
    capacity: int,
) -> RetentionState:
    """Gather slots into new buffers.

    Args:
        index: [B, n] int64, slots in the order that they get.
        counts: per row, how many of them are taken.
        limits: per row, the slots below which the others may be filled; those from there on are closed.
        capacity: slots of the new buffers.
    """
    slots = torch.arange(capacity, device=index.device)
    empty = torch.where(slots < column(limits, index), DEAD, CLOSED).to(state.momentum.dtype)
    full = slots < column(counts, index)
    places = torch.cat([index, index.new_zeros(index.shape[0], capacity - index.shape[1])], dim=1)
    gathered = dataclasses.replace(
        state,
        momentum=torch.where(full, state.momentum.gather(1, places), empty),
        positions=torch.where(full, state.positions.gather(1, places), NO_POSITION),
    )
    return _replace(
        layers, lambda buffer: targets.target_for(buffer.device.type).gather(buffer, index, capacity), gathered
    )


def extend(
    layers: Sequence[SlotLayer], state: RetentionState, room: int, limits: Sequence[int], full: Sequence[bool]
) -> RetentionState:
    """Add slots.

    Args:
        room: how many.
        limits: per row, the slots below which they may be filled; those from there on are closed.
        full: per row, whether the next token goes into the first of them.
    """
    before = state.positions.shape[1]
    slots = torch.arange(before, before + room, device=state.positions.device)
    fresh = torch.where(slots < column(limits, slots), DEAD, CLOSED).to(state.momentum.dtype)
    extended = dataclasses.replace(
        state,
        momentum=torch.cat([state.momentum, fresh], dim=1),
        positions=torch.cat([state.positions, state.positions.new_full(fresh.shape, NO_POSITION)], dim=1),
        free=torch.where(column(full, slots).squeeze(1), before, state.free),
    )
    return _replace(layers, lambda buffer: _widen(buffer, room), extended)


def narrow(layers: Sequence[SlotLayer], state: RetentionState, capacity: int) -> RetentionState:
    """Let go of the slots from `capacity` on, which no row may fill any more."""
    narrowed = dataclasses.replace(
        state, momentum=state.momentum[:, :capacity].clone(), positions=state.positions[:, :capacity].clone()
    )
    return _replace(layers, lambda buffer: buffer[:, :, :capacity].clone(), narrowed)


def select_rows(layers: Sequence[SlotLayer], state: RetentionState, index: Tensor) -> RetentionState:
    """Make row i what row index[i] was; in place if the number of rows stays, so that addresses stay valid.

    Args:
        index: [rows from now on] int64.
    """

    def chosen(tensor: Tensor) -> Tensor:
        return tensor.index_select(0, index.to(tensor.device))

    if index.numel() != state.free.numel() or not is_writable(layers, state):
        return _replace(layers, chosen, state.map(chosen))
    for tensor in (*buffers_of(layers), *state.tensors):
        tensor.copy_(chosen(tensor))
    return state


def is_writable(layers: Sequence[SlotLayer], state: RetentionState) -> bool:
    """Whether tensors may be written: not if one was made under `torch.inference_mode` and we are outside of it."""
    if torch.is_inference_mode_enabled():
        return True
    return not any(tensor.is_inference() for tensor in (*buffers_of(layers), *state.tensors))


def make_writable(layers: Sequence[SlotLayer], state: RetentionState) -> RetentionState:
    """Copy every tensor, so that those which were made under `torch.inference_mode` can be written outside of it."""
    return _replace(layers, Tensor.clone, state.clone())


def _replace(
    layers: Sequence[SlotLayer], buffer_of: Callable[[Tensor], Tensor], state: RetentionState
) -> RetentionState:
    """Replace every layer's buffers by what `buffer_of` makes of them; returns the state that goes with them.

    Layer by layer: old and new buffers are held at the same time for one layer only.
    """
    for layer in layers:
        keys, values = layer.buffers
        layer.keys, layer.values = buffer_of(keys), buffer_of(values)
        del keys, values  # before the next layer's are made
    mark_for_compile(layers, state)
    return state


def buffers_of(layers: Sequence[SlotLayer]) -> list[Tensor]:
    """List the keys and values of all layers, which must have cached something."""
    return [buffer for layer in layers for buffer in layer.buffers]


def mark_for_compile(layers: Sequence[SlotLayer], state: RetentionState) -> None:
    """Tell torch.compile what it may count on.

    The slot count is a dynamic dimension: one graph serves every prompt length and budget. The addresses stay: a CUDA
    graph of the step (mode="reduce-overhead") may write to these tensors without copying them first.
    """
    buffers = buffers_of(layers)
    slotted = [*((buffer, 2) for buffer in buffers), (state.momentum, 1), (state.positions, 1)]
    for tensor, dimension in slotted:
        torch._dynamo.mark_dynamic(tensor, dimension)
    for tensor in (*buffers, *state.tensors):
        torch._dynamo.mark_static_address(tensor, guard=False)


def column(per_row: Sequence[int], like: Tensor) -> Tensor:
    """Make a column [B, 1] of one number per row, on the device of `like`; int64, or bool if they are.

    Nothing waits for that device, as a plain copy to it would.
    """
    if len(set(per_row)) == 1:
        return torch.full((len(per_row), 1), per_row[0], device=like.device)
    values = torch.tensor(per_row)
    if like.is_cuda:
        values = values.pin_memory()
    return values.to(like.device, non_blocking=True).unsqueeze(1)


def _widen(buffer: Tensor, room: int) -> Tensor:
    rows, heads, slots, width = buffer.shape
    result = buffer.new_zeros(rows, heads, slots + room, width)
    result[:, :, :slots] = buffer
    return result


def _own(tensor: Tensor) -> Tensor:
    """Detached; copied if it is a view into something larger (a fused qkv projection), which it would keep alive."""
    tensor = tensor.detach()
    return tensor if nbytes([tensor]) <= tensor.numel() * tensor.element_size() else tensor.clone()
