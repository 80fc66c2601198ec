"""The slot cache: bounded key-value storage of a batch of sequences. Plain torch: nothing here knows transformers.

What a cache holds is storage (the layers' buffers and the retention state, on the device) and a ledger (counts, on the
host). A forward runs between :meth:`SlotCache._hold` of what was held before it and of what is held after it: nothing else
commits a step or a prompt, or takes one back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..config import Config
from ..errors import CacheError, UnsupportedModelError
from ..kernels.reference import enter
from ..ops import commit_step
from . import eviction, storage
from .ledger import Ledger, Phase
from .storage import Entry, RetentionState, SlotLayer


@dataclasses.dataclass(frozen=True)
class _Contents:
    """What a cache holds at one moment.

    Attributes:
        buffers: keys and values of every layer by reference; ``None`` says that they stay as they are.
        state: `None` while the cache is empty.
        ledger: the counts.
    """

    buffers: tuple[tuple[Any, Tensor | None, Tensor | None], ...] | None
    state: RetentionState | None
    ledger: Ledger


class SlotCache:
    """Bounded key-value storage of a batch of sequences, together with their retention state.

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
        self._state: RetentionState | None = None
        self._ledger = Ledger()
        self._running: Phase | None = None
        """PREFILL inside a prompt, DECODE inside a step, ``None`` between two forwards."""
        self._left = False
        """Whether the running step has reached its end."""

    def _clear(self) -> None:
        self._hold(_Contents((), None, Ledger()))

    def _held(self) -> _Contents:
        buffers = tuple((layer, layer.keys, layer.values) for layer in self.layers)
        return _Contents(buffers, self._state, self._ledger)

    def _hold(self, contents: _Contents) -> None:
        """Commit, or take back: assignments on the host, nothing that waits for the device or takes memory of it."""
        if contents.buffers is not None:
            for layer in self.layers:
                layer.keys = layer.values = None
            for layer, keys, values in contents.buffers:
                layer.keys, layer.values = keys, values
        if contents.state is not None and contents.state is not self._state:
            storage.mark_for_compile((), contents.state)
        self._state, self._ledger = contents.state, contents.ledger

    @contextlib.contextmanager
    def _forward(self, kind: Phase, before: _Contents, after: Callable[[], _Contents]) -> Iterator[None]:
        """Run a forward, then hold what `after` returns, or `before` if anything has raised."""
        self._running = kind
        held = before
        try:
            yield
            held = after()
        finally:
            self._hold(held)
            self._running = None

    # ------------------------------------------------------------------ what a user reads

    @property
    def phase(self) -> Phase:
        """What the buffers hold: nothing, columns of prompts, or slots."""
        return self._ledger.phase

    @property
    def seen(self) -> int:
        """Tokens seen per row, padding columns included, evicted tokens too (SPEC D9)."""
        return self._ledger.seen

    @property
    def rows(self) -> int:
        """Number of sequences in the cache, 0 while it is empty."""
        return self._ledger.rows

    @property
    def slots(self) -> int:
        """Physical length of every layer's buffers."""
        return 0 if self._state is None else self._state.positions.shape[1]

    @property
    def columns(self) -> int:
        """Cached columns that a prompt's forward finds, and that its mask has to cover. Read it inside :meth:`prompt`."""
        return self._ledger.capacity

    @property
    def budget(self) -> list[int]:
        """Tokens that survive each decode step, per row; empty while the cache is."""
        return [] if self.config is None else list(self._ledger.budgets(self.config))

    @property
    def nbytes(self) -> int:
        """Bytes of key-value storage that are really held."""
        return storage.nbytes(buffer for layer in self.layers for buffer in (layer.keys, layer.values))

    @property
    def state(self) -> RetentionState:
        """Momentum and positions, by slot.

        Raises:
            CacheError: the cache is empty.
        """
        if self._state is None:
            raise CacheError("The cache is empty: run a prompt through the model first.")
        return self._state

    @property
    def refreshing(self) -> bool:
        """Whether the coming (or running) decode step reads scores.

        Raises:
            CacheError: the cache has no Config.
        """
        return self._settings().refreshes_at(self._ledger.steps + 1)

    @property
    def momentum(self) -> list[Tensor]:
        """Momentum of the live tokens, one 1-D fp32 tensor per row, in the order of :meth:`retained_positions`."""
        return [momentum for _, momentum in self._retained()]

    def retained_positions(self) -> list[Tensor]:
        """List the true positions of the live tokens, sorted: one 1-D int64 tensor per row."""
        return [positions for positions, _ in self._retained()]

    def _retained(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self._state is None:
            return
        for positions, momentum, alive in zip(self._state.positions, self._state.momentum, self._alive(), strict=True):
            kept, order = positions[alive].sort()
            yield kept, momentum[alive][order]

    def _alive(self) -> Tensor:
        """[B, S] bool: slots whose token is still in the cache between steps."""
        state = self.state
        alive = state.positions >= 0
        if self.phase is Phase.DECODE:
            place = torch.arange(alive.shape[1], device=alive.device)
            alive = alive & (place != state.free.unsqueeze(1))
        return alive

    # ------------------------------------------------------------------ prompts

    @contextlib.contextmanager
    def prompt(self, rows: int, tokens: int, padding: Tensor | None = None) -> Iterator[None]:
        """Prefill: around a forward of `tokens` tokens per row that belong to a prompt (SPEC D13, D16).

        Args:
            rows: batch size.
            tokens: columns of this forward, padding included.
            padding: [rows, tokens], true or 1 where a column is a real token; ``None`` if all are.

        Raises:
            CacheError: another forward is running, or the shapes do not fit each other or the cache.
            UnsupportedModelError: not every layer has cached every token.
        """
        self._require_idle()
        self._require_rows(rows)
        real = _real_tokens(rows, tokens, padding)

        def joined() -> _Contents:
            self._require_columns(self._ledger.capacity + tokens)
            device = self.layers[0].keys.device
            state = RetentionState.empty(rows, device) if self._state is None else self._state
            columns = torch.ones(rows, tokens, dtype=torch.bool, device=device)
            state = storage.join(state, columns if padding is None else padding.to(device).bool())
            return _Contents(None, state, self._ledger.add_prompt(tokens, real))

        with self._forward(Phase.PREFILL, self._held(), joined):
            if self.phase is Phase.DECODE:
                self._to_columns()
            yield

    def columns_mask(self, tokens: int, padding: Tensor | None) -> Tensor | None:
        """Make the mask of a prompt's forward over cached and new columns; call it inside :meth:`prompt`.

        Args:
            tokens, padding: as there.

        Returns:
            [B, cached columns + tokens] int64, 1 where a column holds a token; ``None`` if every one does.
        """
        if self._state is None:
            return padding
        if padding is None and self._ledger.is_dense:
            return None
        cached = self._state.positions >= 0
        new = cached.new_ones(cached.shape[0], tokens) if padding is None else padding.to(cached.device).bool()
        return torch.cat([cached, new], dim=1).long()

    def _to_columns(self) -> None:
        """Slots to columns: the live tokens, sorted by position, short rows closed at the end."""
        live, ledger = self._ledger.live, self._ledger.to_columns()
        order = eviction.text_order(self.state, self._alive())[:, : ledger.capacity]
        state = storage.gather(self.layers, self.state, order, live, live, ledger.capacity)
        self._hold(_Contents(None, state, ledger))

    # ------------------------------------------------------------------ decode steps

    @contextlib.contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Decode: around one step of one token per row. Buffers grow before it; it evicts and compacts after it.

        Args:
            rows: batch size.

        Raises:
            CacheError: another forward is running, the cache is empty or has no Config, a row has no token, `rows` does
                not fit, or the body ran no decode step.
        """
        self._require_idle()
        self._require_rows(rows)
        if self.phase is Phase.EMPTY:
            raise CacheError("A decode step needs a non-empty cache: run a prompt first.")
        if 0 in self._ledger.live:
            raise CacheError(
                f"Row {self._ledger.live.index(0)} of the prompt was padding alone: every row needs a token."
            )
        self._settings()
        if self.phase is Phase.PREFILL:
            self._to_slots()
        if not storage.is_writable(self.layers, self.state):
            state = storage.make_writable(self.layers, self.state)
            self._hold(_Contents(None, state, self._ledger))
        self._left = False
        # The step writes into the state's tensors, so what it may have to be taken back to is a copy. Of the buffers it
        # writes the free slot only; they are not held here, as a first eviction would then take all of them twice.
        before = _Contents(None, self.state.clone(), self._ledger)
        with self._forward(Phase.DECODE, before, self._stepped):
            yield

    def _to_slots(self) -> None:
        """Columns to slots, with room for the steps up to the first eviction."""
        ledger, more = self._ledger.to_slots(self._settings())
        state = storage.extend(self.layers, self.state, more.room, more.limits, more.full)
        self._hold(_Contents(None, state, ledger))

    def _stepped(self) -> _Contents:
        """What the cache holds after a step whose graph has run: evict, compact and grow where it is time."""
        if not self._left:
            raise CacheError("The body of `with cache.step(...)` ran no decode step: it must call enter and leave.")
        config, state = self._settings(), self.state
        result = self._ledger.add_step(config)
        if result.pooled is not None:
            eviction.pool(state, config.pool_width, result.pooled, *self._protected)
        if result.compaction is not None:
            top = result.compaction
            kept = eviction.survivors(state, top.keep, *self._protected)
            state = storage.gather(self.layers, state, kept, top.keep, top.limits, top.capacity)
            state.free.copy_(storage.column(top.keep, kept).squeeze(1))
        if result.extension is not None:
            more = result.extension
            state = storage.extend(self.layers, state, more.room, more.limits, more.full)
        return _Contents(None, state, result.ledger)

    def enter(self) -> Entry:
        """Enter the new token, at the start of a step (traced): it takes the free slot, at the mean momentum (SPEC D2)."""
        assert self._state is not None
        state = self._state
        momentum, positions = enter(state.momentum, state.positions, state.free, state.length)
        return Entry(positions >= 0, momentum, positions)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Cache one layer's new keys and values.

        Args:
            key, value: [B, N, tokens, D] and [B, N, tokens, Dv]; one token in a decode step.
            layer_idx: which layer, from 0.

        Returns:
            Keys and values that attention should read.

        Raises:
            CacheError: no forward is running.
        """
        if self._in_step:
            assert self._state is not None
            rows = torch.arange(self._state.free.shape[0], device=self._state.free.device)
            layer = self.layers[layer_idx]
            # Tells the tracer that all layers have the same number of slots: one symbol instead of two per layer.
            assert layer.keys.shape[2] == layer.values.shape[2] == self._state.positions.shape[1]
            return layer.write(key, value, rows, self._state.free)
        if self._running is Phase.PREFILL:
            while len(self.layers) <= layer_idx:
                self.layers.append(self.layer_class())
            return self.layers[layer_idx].append(key, value)
        raise CacheError(
            "This cache was handed to a model that does not drive it. Use it with the model that"
            " inertia_fx.compile(model) returned, or inside `with cache.prompt(...)` / `with cache.step(...)`."
        )

    def leave(self, entry: Entry) -> None:
        """Leave the step, at its end (traced): the marker. Writes the state back and chooses the slot to overwrite next."""
        assert self._state is not None
        state = self._state
        commit_step(
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

    @property
    def _in_step(self) -> bool:
        return self._running is Phase.DECODE

    @property
    def _protected(self) -> tuple[int, int]:
        assert self.config is not None
        return self.config.protect_first, self.config.protect_recent

    # ------------------------------------------------------------------ rows

    def select_rows(self, index: Tensor) -> None:
        """Make row i what row index[i] was: K/V, momentum, positions and counts together (beam search).

        Args:
            index: [rows from now on] int64.

        Raises:
            CacheError: a forward is running, or no row would stay.
        """
        self._require_idle()
        if self._state is None:
            return
        if index.numel() == 0:
            raise CacheError("No row would stay in the cache: call cache.reset() to empty it.")
        ledger = self._ledger
        if index.numel() != self.rows or not ledger.is_uniform:
            ledger = ledger.select(index.tolist())
        state = storage.select_rows(self.layers, self._state, index)
        trimmed = ledger if self.config is None else ledger.trim(self.config)
        if trimmed.capacity < ledger.capacity:
            state = storage.narrow(self.layers, state, trimmed.capacity)
        self._hold(_Contents(None, state, trimmed))

    def reset(self) -> None:
        """Forget everything and let the storage go; the cache can then serve any batch size."""
        self._require_idle()
        self._clear()

    # ------------------------------------------------------------------ what is refused

    def _settings(self) -> Config:
        if self.config is None:
            raise CacheError("A decode step needs to know what to keep: make the cache with a Config.")
        return self.config

    def _require_idle(self) -> None:
        if self._running is not None:
            running = "step" if self._in_step else "prompt"
            raise CacheError(
                f"The cache is inside another {running}: two forwards cannot share one cache at the same time."
            )

    def _require_rows(self, rows: int) -> None:
        if self.rows and rows != self.rows:
            raise CacheError(
                f"The cache holds {self.rows} sequence(s) and the forward has {rows}: use a new InertiaCache for"
                " another batch, or call cache.reset() first."
            )

    def _require_columns(self, columns: int) -> None:
        if not self.layers:
            raise CacheError(
                "The body of `with cache.prompt(...)` cached nothing: it must call update for every layer."
            )
        for index, layer in enumerate(self.layers):
            held = 0 if layer.keys is None else layer.keys.shape[2]
            if held != columns:
                raise UnsupportedModelError(
                    f"Layer {index} cached {held} tokens where {columns} were expected: the model does not cache"
                    " every token in every layer (shared or sliding key-value layers). Use the uncompiled model."
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
