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
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import CacheError, UndoError, UnsupportedModelError
from ..kernels.reference import NO_POSITION, enter, mean_momentum
from ..ops import retain
from . import storage as slots
from .storage import CLOSED, Entry, RetentionState, SlotLayer

_GROWTH = 64
"""Slots added at once, at least, to a row that has not reached its budget yet."""


class SlotCache:
    """Bounded K/V storage of a batch of sequences together with their retention state.

    Drive it with the two context managers, around forwards that call :meth:`update` once per layer::

        with cache.prompt(rows, tokens):      # any number of tokens, may be repeated
            ...
        with cache.step(rows):                # one token per row
            entry = cache.enter()             # ┐ traced by torch.compile(..., backend="inertia_fx")
            ...                               # │ attention masked by entry.live
            cache.leave(entry)                # ┘

    If the body raises, the cache is as it was before (what the body wrote into the slot to overwrite is of no account).

    Args:
        config: what to keep; needed by the first decode step at the latest.
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
        self._left = False
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
        for positions, momentum, alive in zip(self._state.positions, self._state.momentum, self._alive(), strict=True):
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
        counts = _real_tokens(rows, tokens, padding)
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
        self._join(rows, tokens, padding, counts)

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

    def _join(self, rows: int, tokens: int, padding: Tensor | None, counts: list[int]) -> None:
        """The prompt's tokens join at the mean of the row's live momenta (0 for a first prompt), at their positions."""
        device = self.layers[0].keys.device
        real = (
            torch.ones(rows, tokens, dtype=torch.bool, device=device) if padding is None else padding.to(device).bool()
        )
        if self._state is None:
            empty = torch.zeros(rows, 0, dtype=torch.float32, device=device)
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
        width = max(self._live)
        slots.gather(
            self.layers, self._state, slots.text_order(self._state, alive)[:, :width], self._live, self._live, width
        )
        self._phase, self._columns = "prompt", width

    # ------------------------------------------------------------------ decode steps

    @contextlib.contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Around one decode step of one token per row. Grows or seals the buffers before, evicts and compacts after."""
        self._require_idle()
        self._require_rows(rows)
        if self._phase == "empty":
            raise CacheError("A decode step needs a non-empty cache: run a prompt first.")
        if 0 in self._live:
            raise CacheError(f"Row {self._live.index(0)} of the prompt was padding alone: every row needs a token.")
        if self.config is None:
            raise CacheError("A decode step needs to know what to keep: make the cache with a Config.")
        self._make_room()
        if not slots.is_writable(self.layers, self.state):
            slots.clone(self.layers, self.state)
        before = [getattr(self.state, field.name).clone() for field in dataclasses.fields(self.state)]
        self._mode, self._left = "step", False
        try:
            yield
            if not self._left:
                raise CacheError("The body of `with cache.step(...)` ran no decode step: it must call enter and leave.")
        except BaseException:
            if self._left:
                for field, value in zip(dataclasses.fields(self.state), before, strict=True):
                    getattr(self.state, field.name).copy_(value)
            raise
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
            layer = self.layers[layer_idx]
            # Tells the tracer that all layers have the same number of slots: one symbol instead of two per layer.
            assert layer.keys.shape[2] == layer.values.shape[2] == self._state.positions.shape[1]
            return layer.write(key, value, rows, self._state.free)
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
            *self._protected,
        )
        self._left = True

    def _make_room(self) -> None:
        assert self.config is not None and self._state is not None
        if self._phase == "prompt":
            # Step 1: the columns become slots, with room for the steps up to the first eviction.
            room = self.config.evict_after
            everywhere = [self._columns + room] * self.rows
            slots.extend(self.layers, self._state, room, everywhere, [True] * self.rows)
            self._open = [live + room for live in self._live]
            self._phase = "slots"

    def _grow(self) -> None:
        """More slots where a row is full but below its budget, so that every row always has one that may be taken."""
        limits = [budget + 1 for budget in self.budget]
        full = [live == room < limit for live, room, limit in zip(self._live, self._open, limits, strict=True)]
        if any(full):
            room = min(max(_GROWTH, self.slots // 8), max(limits) - self.slots)
            # A row never opens more than its budget + 1 slots, however many the longest row needs.
            self._open = [min(self.slots + room, limit) for limit in limits]
            slots.extend(self.layers, self.state, room, self._open, full)

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
            slots.pool(self._state, self.config.pool_width, first, *self._protected)
        if self._steps == evict_after:
            self._compact()
        for row, budget in enumerate(self.budget):
            if over[row]:
                self._evicting[row] = True
                self._live[row] = budget
        if self._steps >= evict_after:
            self._grow()

    def _compact(self) -> None:
        """Once, at the first eviction: keep the top B by (momentum, position), gather every layer into B + 1 slots."""
        assert self._state is not None
        budgets = self.budget
        keep = [min(live, budget) for live, budget in zip(self._live, budgets, strict=True)]
        # Rows that are still filling up get what they hold and the next bucket, not all of a budget they may never use.
        capacity = min(max(budgets) + 1, -(-(max(keep) + 1) // _GROWTH) * _GROWTH)
        self._open = [min(budget + 1, capacity) for budget in budgets]
        kept = slots.survivors(self._state, keep, *self._protected)
        slots.gather(self.layers, self._state, kept, keep, self._open, capacity)
        self._state.free.copy_(slots.column(keep, kept).squeeze(1))

    @property
    def _protected(self) -> tuple[int, int]:
        assert self.config is not None
        return self.config.protect_first, self.config.protect_recent

    def _alive(self) -> Tensor:
        """[B, S] bool: slots whose token is still in the cache between steps."""
        assert self._state is not None
        alive = self._state.positions >= 0
        if self._phase == "slots":
            place = torch.arange(alive.shape[1], device=alive.device)
            alive = alive & (place != self._state.free.unsqueeze(1))
        return alive

    # ------------------------------------------------------------------ rows

    def select_rows(self, index: Tensor) -> None:
        """Row i becomes what row index[i] was: K/V, momentum, positions and counts together (beam search)."""
        self._require_idle()
        if self._state is None:
            return
        same = index.numel() == self.rows
        slots.select_rows(self.layers, self._state, index)
        counts = (self._prompt, self._live, self._open, self._evicting)
        if not same or any(len(set(per_row)) > 1 for per_row in counts):
            order = index.tolist()
            self._prompt, self._live, self._open, self._evicting = (
                [per_row[row] for row in order]
                for per_row in counts  # type: ignore[misc]
            )
        compacted = self._phase == "slots" and self.config is not None and self._steps >= self.config.evict_after
        if compacted and max(self._open) < self.slots:
            slots.narrow(self.layers, self._state, max(self._open))  # the row that needed the most is gone

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


def _real_tokens(rows: int, tokens: int, padding: Tensor | None) -> list[int]:
    """How many tokens of a prompt are real, per row. This waits for the device, once per prompt."""
    if tokens < 1:
        raise CacheError(
            "A prompt without tokens: in a second turn, `generate` wants the whole text, of which it feeds what is new."
        )
    if padding is None:
        return [tokens] * rows
    if padding.shape != (rows, tokens):
        raise CacheError(f"The padding has shape {tuple(padding.shape)}, the prompt {(rows, tokens)}: they must agree.")
    return padding.bool().sum(-1).tolist()
