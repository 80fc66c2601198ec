"""The slot cache and the sequence's retention state. Plain torch: nothing here knows transformers.

A cache is always in one of three phases:

    empty    nothing cached
    prompt   columns: keys and values as the prompt's forwards left them, one column per token (padding included)
    slots    bounded buffers: every decode step overwrites one slot; slot order is not position order

Host and device split. How many tokens a row holds is known without looking at the device (one enters per step, at
most one leaves), so all counting is done in Python ints here, and a step never waits for the device. *Which* tokens
a row holds is known to the device only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .config import Config
from .errors import CacheError, UndoError, UnsupportedModelError
from .kernels.reference import NO_POSITION, enter, mean_momentum, next_free
from .ops import retain

DEAD, CLOSED = float("-inf"), float("inf")
"""Momentum of a slot that may be filled, and of one that is neither attended nor filled."""

_GROWTH = 64
"""Slots added at once, at least, to a row that has not reached its budget yet."""


class Entry(NamedTuple):
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


class SlotCache:
    """Bounded K/V storage of a batch of sequences together with their retention state.

    Drive it with the two context managers, around forwards that call :meth:`update` once per layer::

        with cache.prompt(rows, tokens):      # any number of tokens, may be repeated
            ...
        with cache.step(rows):                # one token per row
            entry = cache.enter()             # ┐ traced by torch.compile(..., backend="inertia_fx")
            ...                               # │ attention masked by entry.live
            cache.leave(entry)                # ┘

    If the body raises, the cache is as it was before.

    Args:
        config: what to keep; ``None`` takes the settings of the first compiled model that uses the cache.
    """

    layer_class: Callable[[], Any] = SlotLayer

    def __init__(self, config: Config | None = None) -> None:
        self.config = config
        self.layers: list[Any] = []
        self._clear()

    def _clear(self) -> None:
        for layer in self.layers:
            layer.keys = layer.values = None
        self._mode = "idle"
        self._phase = "empty"
        self._state: RetentionState | None = None
        self._seen = 0
        self._steps = 0
        self._columns = 0
        self._prompt: list[int] = []
        self._live: list[int] = []
        self._open: list[int] = []
        self._evicting: list[bool] = []

    # ------------------------------------------------------------------ what a user reads

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Logical length: tokens seen per row, padding columns included, evicted tokens too (SPEC D9)."""
        return self._seen

    @property
    def rows(self) -> int:
        """Number of sequences in the cache, 0 while it is empty."""
        return len(self._prompt)

    @property
    def slots(self) -> int:
        """Physical length of every layer's buffers."""
        return 0 if self._state is None else self._state.positions.shape[1]

    @property
    def budget(self) -> list[int]:
        """Tokens that survive each decode step, per row; empty while the cache is."""
        return [] if self.config is None else [self.config.budget_of(tokens) for tokens in self._prompt]

    @property
    def nbytes(self) -> int:
        """Bytes of K/V storage that are really held (storages, not views; each counted once)."""
        held = {}
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                if tensor is not None:
                    storage = tensor.untyped_storage()
                    held[storage.data_ptr(), str(tensor.device)] = storage.nbytes()
        return sum(held.values())

    @property
    def state(self) -> RetentionState:
        """The tensors that decide who stays; raises :class:`CacheError` while the cache is empty."""
        if self._state is None:
            raise CacheError("The cache is empty: run a prompt through the model first.")
        return self._state

    def retained_positions(self) -> list[Tensor]:
        """True positions of the live tokens, sorted: one 1-D int64 tensor per row."""
        return [positions for positions, _ in self._retained()]

    @property
    def momentum(self) -> list[Tensor]:
        """Momentum of the live tokens, one 1-D fp32 tensor per row, in the order of :meth:`retained_positions`."""
        return [momentum for _, momentum in self._retained()]

    def _retained(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._state is None:
            return
        for positions, momentum, alive in zip(
            self._state.positions, self._state.momentum, self._alive(), strict=True
        ):
            kept, order = positions[alive].sort()
            yield kept, momentum[alive][order]

    # ------------------------------------------------------------------ prompts

    @contextlib.contextmanager
    def prompt(self, rows: int, tokens: int, padding: Tensor | None = None) -> Iterator[None]:
        """Around a forward of `tokens` tokens per row that belong to a prompt (SPEC D13, D16).

        Args:
            rows: batch size.
            tokens: columns of this forward, padding included.
            padding: [rows, tokens], true or 1 where a column is a real token; ``None`` if all are.
        """
        self._require_idle()
        self._require_rows(rows)
        restore = self._snapshot()
        if self._phase == "slots":
            self._to_columns()
        self._mode = "prompt"
        try:
            yield
            self._require_columns(self._columns + tokens)
        except BaseException:
            restore()
            raise
        finally:
            self._mode = "idle"
        self._join(rows, tokens, padding)

    def _snapshot(self) -> Callable[[], None]:
        """A function that puts the buffers and the state back. Prompts replace tensors and never write into them."""
        held = [(layer, layer.keys, layer.values) for layer in self.layers]
        phase, columns, room = self._phase, self._columns, list(self._open)
        state = None if self._state is None else dataclasses.replace(self._state)

        def restore() -> None:
            for layer in self.layers:
                layer.keys = layer.values = None
            for layer, keys, values in held:
                layer.keys, layer.values = keys, values
            self._phase, self._columns, self._open, self._state = phase, columns, room, state

        return restore

    def _require_columns(self, columns: int) -> None:
        for index, layer in enumerate(self.layers):
            held = 0 if layer.keys is None else layer.keys.shape[2]
            if held != columns:
                raise UnsupportedModelError(
                    f"Layer {index} cached {held} tokens where {columns} were expected: the model does not cache"
                    " every token in every layer (shared or sliding key-value layers). Use the uncompiled model."
                )

    def _join(self, rows: int, tokens: int, padding: Tensor | None) -> None:
        """The prompt's tokens join at the mean of the row's live momenta (0 for a first prompt), at their positions."""
        device = self.layers[0].keys.device
        real = torch.ones(rows, tokens, dtype=torch.bool, device=device) if padding is None else padding.to(device).bool()
        counts = [tokens] * rows if padding is None else real.sum(-1).tolist()
        if self._state is None:
            empty = torch.zeros(rows, 0, device=device)
            start = torch.zeros(rows, dtype=torch.int64, device=device)
            self._state = RetentionState(empty, empty.long(), start, start.clone())
            self._prompt, self._live, self._open = [0] * rows, [0] * rows, [0] * rows
        state = self._state
        mean = mean_momentum(state.momentum, state.positions >= 0)
        index = real.long().cumsum(-1)
        state.momentum = torch.cat([state.momentum, torch.where(real, mean, CLOSED)], dim=1)
        state.positions = torch.cat(
            [state.positions, torch.where(real, state.length.unsqueeze(1) + index - 1, NO_POSITION)], dim=1
        )
        state.length = state.length + index[:, -1]
        self._phase = "prompt"
        self._columns += tokens
        self._seen += tokens
        self._steps = 0
        self._evicting = [False] * rows
        for row, count in enumerate(counts):
            self._prompt[row] += count
            self._live[row] += count

    def columns_mask(self, tokens: int, padding: Tensor | None) -> Tensor | None:
        """2-D mask [B, cached columns + tokens] for a prompt's forward, call it inside :meth:`prompt`.

        ``padding`` is [B, tokens] as there; ``None`` comes back if every column is a real token.
        """
        if self._state is None:
            return padding
        if padding is None and all(live == self._columns for live in self._live):
            return None
        cached = self._state.positions >= 0
        new = cached.new_ones(cached.shape[0], tokens) if padding is None else padding.to(cached.device).bool()
        return torch.cat([cached, new], dim=1).long()

    @property
    def columns(self) -> int:
        """Cached columns that a prompt's forward finds, and that its mask has to cover."""
        return self._columns

    def _to_columns(self) -> None:
        """Slots to columns: the live tokens, sorted by position, short rows closed at the end."""
        assert self._state is not None
        alive = self._alive()
        order = torch.where(alive, self._state.positions, torch.iinfo(torch.int64).max).argsort(dim=1)
        width = max(self._live)
        self._gather(order[:, :width], self._live, self._live)
        self._phase, self._columns = "prompt", width

    # ------------------------------------------------------------------ decode steps

    @contextlib.contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Around one decode step of one token per row. Grows or seals the buffers before, evicts and compacts after."""
        self._require_idle()
        self._require_rows(rows)
        if self._phase == "empty":
            raise CacheError("A decode step needs a non-empty cache: run a prompt first.")
        self._make_room()
        self._mode = "step"
        try:
            yield
        finally:
            self._mode = "idle"
        self._count_step()

    @property
    def refreshing(self) -> bool:
        """Whether the coming (or running) decode step reads scores."""
        assert self.config is not None
        return self.config.refreshes_at(self._steps + 1)

    def enter(self) -> Entry:
        """Traced, at the start of a step: the new token takes its slot, at the mean of the row's other live momenta."""
        assert self._state is not None
        state = self._state
        momentum, positions = enter(state.momentum, state.positions, state.free, state.length)
        return Entry(positions >= 0, momentum, positions)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache one layer's new keys [B, N, tokens, D] and values; returns what attention should read."""
        if self._mode == "step":
            assert self._state is not None
            rows = torch.arange(self._state.free.shape[0], device=self._state.free.device)
            return self.layers[layer_idx].write(key, value, rows, self._state.free)
        if self._mode == "prompt":
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class())
            return self.layers[layer_idx].append(key, value)
        raise CacheError(
            "This cache was handed to a model that does not drive it. Use it with the model that"
            " inertia_fx.compile(model) returned, or inside `with cache.prompt(...)` / `with cache.step(...)`."
        )

    def leave(self, entry: Entry) -> None:
        """Traced, at the end of a step: the marker. Writes the state back and chooses the slot to overwrite next."""
        assert self._state is not None and self.config is not None
        state = self._state
        retain(
            state.momentum,
            state.positions,
            state.free,
            state.length,
            entry.momentum,
            entry.positions,
            [layer.keys for layer in self.layers],
            [layer.values for layer in self.layers],
            self.config.protect_first,
            self.config.protect_recent,
        )

    def _make_room(self) -> None:
        assert self.config is not None and self._state is not None
        if self._phase == "prompt":
            # Step 1: the columns become slots, with room for the steps up to the first eviction.
            room = self.config.evict_after
            self._open = [live + room for live in self._live]
            self._extend(room, [True] * self.rows)
            self._phase = "slots"

    def _grow(self) -> None:
        """More slots where a row is full but below its budget, so that every row always has one that may be taken."""
        limits = [budget + 1 for budget in self.budget]
        full = [live == room < limit for live, room, limit in zip(self._live, self._open, limits, strict=True)]
        if any(full):
            self._extend(min(max(_GROWTH, self.slots // 8), max(limits) - self.slots), full)

    def _count_step(self) -> None:
        assert self.config is not None and self._state is not None
        evict_after = self.config.evict_after
        self._steps += 1
        self._seen += 1
        over = []
        for row, budget in enumerate(self.budget):
            self._live[row] += 1
            over.append(self._steps >= evict_after and self._live[row] > budget)
        first = [now and not before for now, before in zip(over, self._evicting, strict=True)]
        if any(first) and self.config.pool_width > 1:
            self._pool(first)
        if self._steps == evict_after:
            self._compact()
        for row, budget in enumerate(self.budget):
            if over[row]:
                self._evicting[row] = True
                self._live[row] = budget
        if self._steps >= evict_after:
            self._grow()

    def _pool(self, first: list[bool]) -> None:
        """Momentum becomes the largest within (pool_width - 1) / 2 places in position order (SPEC D19), in these rows."""
        assert self.config is not None and self._state is not None
        state, width = self._state, self.config.pool_width
        alive = state.positions >= 0
        order = torch.where(alive, state.positions, torch.iinfo(torch.int64).max).argsort(dim=1)
        sorted_momentum = torch.where(alive, state.momentum, DEAD).gather(1, order)
        pooled = torch.nn.functional.max_pool1d(sorted_momentum.unsqueeze(1), width, stride=1, padding=width // 2)
        pooled = torch.empty_like(sorted_momentum).scatter_(1, order, pooled.squeeze(1))
        rows = torch.tensor(first, device=alive.device).unsqueeze(1)
        state.momentum.copy_(torch.where(rows & alive, pooled, state.momentum))
        free = next_free(
            state.momentum, state.positions, state.length - 1, self.config.protect_first, self.config.protect_recent
        )
        state.free.copy_(torch.where(rows.squeeze(1), free, state.free))

    def _compact(self) -> None:
        """Once, at the first eviction: keep the top B by (momentum, position), gather every layer into B + 1 slots."""
        assert self.config is not None and self._state is not None
        state = self._state
        budgets = self.budget
        keep = [min(live, budget) for live, budget in zip(self._live, budgets, strict=True)]
        alive = state.positions >= 0
        rank = torch.where(alive, state.momentum, DEAD)
        newest = state.length.unsqueeze(1) - 1
        held = (state.positions < self.config.protect_first) | (
            state.positions > newest - self.config.protect_recent
        )
        rank = torch.where(alive & held, CLOSED, rank)
        # Two stable sorts: by position, then by momentum, so that equal momentum lets the oldest go.
        by_position = state.positions.argsort(dim=1, descending=True, stable=True)
        by_rank = rank.gather(1, by_position).argsort(dim=1, descending=True, stable=True)
        kept = by_position.gather(1, by_rank)[:, : max(keep)]
        counts = torch.tensor(keep, device=kept.device).unsqueeze(1)
        survives = torch.arange(kept.shape[1], device=kept.device) < counts
        # Into position order: neighbours in the text stay neighbours in memory.
        last = torch.iinfo(torch.int64).max
        order = torch.where(survives, state.positions.gather(1, kept), last).argsort(dim=1)
        kept = kept.gather(1, order)
        capacity = min(max(budgets) + 1, -(-(max(keep) + 1) // _GROWTH) * _GROWTH)
        limits = [min(budget + 1, capacity) for budget in budgets]
        self._gather(kept, keep, limits, capacity)
        state.free.copy_(torch.tensor(keep, device=kept.device))

    # ------------------------------------------------------------------ buffers

    def _alive(self) -> Tensor:
        """[B, S] bool: slots whose token is still in the cache between steps."""
        assert self._state is not None
        alive = self._state.positions >= 0
        if self._phase == "slots":
            slots = torch.arange(alive.shape[1], device=alive.device)
            alive = alive & (slots != self._state.free.unsqueeze(1))
        return alive

    def _gather(self, index: Tensor, counts: list[int], limits: list[int], capacity: int | None = None) -> None:
        """New buffers of `capacity` slots holding row by row the first `counts` of `index`; `limits` slots stay open."""
        assert self._state is not None
        state = self._state
        rows, width = index.shape
        capacity = width if capacity is None else capacity
        for layer in self.layers:
            layer.keys = _take(layer.keys, index, capacity)
            layer.values = _take(layer.values, index, capacity)
            self._mark(layer.keys, layer.values, 2)
        slots = torch.arange(capacity, device=index.device)
        full = slots < torch.tensor(counts, device=index.device).unsqueeze(1)
        empty = torch.where(slots < torch.tensor(limits, device=index.device).unsqueeze(1), DEAD, CLOSED)
        index = torch.cat([index, index.new_zeros(rows, capacity - width)], dim=1)
        state.momentum = torch.where(full, state.momentum.gather(1, index), empty)
        state.positions = torch.where(full, state.positions.gather(1, index), NO_POSITION)
        self._mark(state.momentum, state.positions, 1)
        self._open = list(limits)

    def _extend(self, room: int, full: list[bool]) -> None:
        """`room` more slots, dead up to each row's limit; the next free slot of the `full` rows is the first of them."""
        assert self._state is not None
        state, before = self._state, self._state.positions.shape[1]
        device = state.momentum.device
        if self._phase == "slots":
            # A row never opens more than its budget + 1 slots, however many the longest row needs.
            self._open = [min(before + room, budget + 1) for budget in self.budget]
            limits = torch.tensor(self._open, device=device).unsqueeze(1)
            fresh = torch.where(torch.arange(before, before + room, device=device) < limits, DEAD, CLOSED)
        else:
            fresh = torch.full((self.rows, room), DEAD, device=device)
        for layer in self.layers:
            layer.keys = _widen(layer.keys, room)
            layer.values = _widen(layer.values, room)
            self._mark(layer.keys, layer.values, 2)
        state.momentum = torch.cat([state.momentum, fresh], dim=1)
        state.positions = torch.cat([state.positions, state.positions.new_full(fresh.shape, NO_POSITION)], dim=1)
        state.free = torch.where(torch.tensor(full, device=device), before, state.free)
        self._mark(state.momentum, state.positions, 1)

    @staticmethod
    def _mark(first: Tensor, second: Tensor, dim: int) -> None:
        """The slot count is a dynamic dimension: one graph serves every prompt length and budget."""
        for tensor in (first, second):
            torch._dynamo.mark_dynamic(tensor, dim)

    # ------------------------------------------------------------------ rows

    def select_rows(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was: K/V, momentum, positions and counts together (beam search)."""
        self._require_idle()
        if self._state is None:
            return
        state, same = self._state, index.numel() == self.rows
        for owner, names in [(state, ("momentum", "positions", "free", "length"))] + [
            (layer, ("keys", "values")) for layer in self.layers
        ]:
            for name in names:
                tensor = getattr(owner, name)
                chosen = tensor.index_select(0, index.to(tensor.device))
                if same:
                    tensor.copy_(chosen)  # in place: addresses that a graph has seen stay valid
                else:
                    setattr(owner, name, chosen)
        if not same:
            for layer in self.layers:
                self._mark(layer.keys, layer.values, 2)
            self._mark(state.momentum, state.positions, 1)
        counts = (self._prompt, self._live, self._open, self._evicting)
        if not same or any(len(set(per_row)) > 1 for per_row in counts):
            order = index.tolist()
            self._prompt, self._live, self._open, self._evicting = (
                [per_row[row] for row in order] for per_row in counts  # type: ignore[misc]
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search; beam_idx [B] int64."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; indices is int64 [rows to keep] or a bool mask [B]."""
        self.select_rows(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        if self._state is not None:
            self.select_rows(torch.arange(self.rows, device=self._state.free.device).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything and let the storage go; the cache can then serve any batch size."""
        self._require_idle()
        self._clear()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused (SPEC D15), except for 0 tokens.

        Raises:
            UndoError: always, unless tokens_to_remove is 0.
        """
        if tokens_to_remove != 0:
            raise UndoError(
                f"crop({tokens_to_remove}) asks to take tokens back, but what they evicted is gone: an eviction cannot"
                " be undone. Assisted and prompt-lookup decoding need this: use the uncompiled model for them."
            )

    def _require_idle(self) -> None:
        if self._mode != "idle":
            raise CacheError(
                f"The cache is inside another {self._mode}: two forwards cannot share one cache at the same time."
            )

    def _require_rows(self, rows: int) -> None:
        if self.rows and rows != self.rows:
            raise CacheError(
                f"The cache holds {self.rows} sequence(s) and the forward has {rows}: use a new InertiaCache for"
                " another batch, or call cache.reset() first."
            )


def _take(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
    """[B, N, capacity, D]: first the slots of `index` [B, n], then nothing in particular (never attended)."""
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


def _widen(buffer: Tensor, room: int) -> Tensor:
    rows, heads, slots, width = buffer.shape
    result = buffer.new_zeros(rows, heads, slots + room, width)
    result[:, :, :slots] = buffer
    return result
