"""The slot cache as a transformers cache: what models, `generate` and the mask functions ask of one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ..cache import Phase, SlotCache, SlotLayer
from ..config import Config
from ..errors import CacheError, ConfigError, UndoError


class InertiaLayer(SlotLayer, CacheLayerMixin):
    """One layer of an :class:`InertiaCache`: its two buffers. All counting is the cache's."""

    is_compileable = False
    is_croppable = False
    is_sliding = False
    supports_early_init = False

    def __init__(self) -> None:
        CacheLayerMixin.__init__(self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first prompt brings the buffers."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise CacheError("Layers of an InertiaCache are updated through the cache: call cache.update(...).")

    def get_seq_length(self) -> int:
        return 0 if self.keys is None else self.keys.shape[2]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class InertiaCache(SlotCache, Cache):
    """The bounded cache of a compiled model, as a `transformers` cache.

    `generate` makes one on its own. Make one yourself to keep it over several calls (second turns), or to give it
    other settings than the model's::

        cache = inertia_fx.InertiaCache()
        model.generate(**inputs, past_key_values=cache)
        cache.retained_positions(), cache.budget, cache.nbytes

    Args:
        config: what to keep; ``None`` takes the settings of the compiled model that first uses the cache.
    """

    layer_class = InertiaLayer

    def __init__(self, config: Config | None = None) -> None:
        if config is not None and not isinstance(config, Config):
            raise ConfigError(
                f"InertiaCache(config={type(config).__name__}) is not an inertia_fx.Config: pass"
                " inertia_fx.Config(ratio=...), or nothing to take the compiled model's settings."
            )
        Cache.__init__(self, layers=[])
        SlotCache.__init__(self, config)
        self._given = config
        self._owner: str | None = None
        self._dtype: torch.dtype | None = None
        self._prefilling = False

    def _bind(self, owner: str, config: Config, layers: int, dtype: torch.dtype) -> None:
        """Bind the cache to a compiled model. An empty one belongs to nobody yet, whoever has tried it before.

        Args:
            owner: which compiled model.
            config: its settings, unless the cache was given its own.
            layers, dtype: of the model.

        Raises:
            CacheError: the cache was filled by another model, or by this one in another dtype.
        """
        if self.phase is Phase.EMPTY:
            self._owner, self._dtype, self.config = owner, dtype, self._given or config
            self.layers = [self.layer_class() for _ in range(layers)]
            return
        if self._owner is not None and self._owner != owner:
            raise CacheError(
                "This InertiaCache was filled by another model: use a new InertiaCache, or call cache.reset() first."
            )
        if len(self.layers) != layers:
            raise CacheError(
                f"This InertiaCache holds {len(self.layers)} layers and the model has {layers}: use a new InertiaCache."
            )
        if self._dtype is not None and self._dtype != dtype:
            raise CacheError(
                f"The model has become {dtype} since this InertiaCache was filled in {self._dtype}: use a new InertiaCache."
            )
        self._owner, self._dtype = owner, dtype
        self.config = self.config or config

    @contextmanager
    def _whole_prompt(self) -> Iterator[None]:
        """Prefill inside `generate`: every forward is prompt, also one of one token (SPEC D16)."""
        self._prefilling = True
        try:
            yield
        finally:
            self._prefilling = False

    def _decodes(self, tokens: int) -> bool:
        """Whether a forward of so many tokens per row is a decode step."""
        return tokens == 1 and self.phase is not Phase.EMPTY and not self._prefilling

    def reset(self) -> None:
        """Forget everything, the model too; the cache can then serve any model and batch size."""
        super().reset()
        self._owner = self._dtype = None
        self.config = self._given
        self.layers = []

    # ------------------------------------------------------------------ lengths

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Logical length: tokens seen per row, padding columns included, evicted tokens too (SPEC D9)."""
        if self._in_step and torch.compiler.is_compiling():
            return self._seen_tensor  # type: ignore[return-value]  # an int would be a guard, and a recompile per step
        return self.seen

    @contextmanager
    def step(self, rows: int) -> Iterator[None]:
        """Decode, see :meth:`SlotCache.step`."""
        with super().step(rows):
            self._seen_tensor = torch.full((), self.seen, device=self.state.free.device)
            yield

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(columns that attention sees, 0): physical, as attention reads what is stored."""
        return (self.slots, 0) if self._in_step else (self.columns + query_length, 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Column of a prompt's first new token."""
        return self.slots - 1 if self._in_step else self.columns

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: text of any length fits."""
        return -1

    # ------------------------------------------------------------------ rows, and taking tokens back

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows for beam search; beam_idx [B] int64."""
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows; indices is int64 [rows to keep] or a bool mask [B]."""
        self.select_rows(indices.nonzero().squeeze(1) if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies side by side."""
        if self.rows:
            self.select_rows(torch.arange(self.rows, device=self.state.free.device).repeat_interleave(repeats))

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to take tokens back (SPEC D15), unless it is none.

        Raises:
            UndoError: tokens_to_remove is not 0.
        """
        if tokens_to_remove != 0:
            raise UndoError(
                f"crop({tokens_to_remove}) asks to take tokens back, but what they evicted is gone: an eviction cannot"
                " be undone. Assisted and prompt-lookup decoding need this: use the uncompiled model for them."
            )

    def activate_past_recording(self) -> None:
        """Refuse assisted decoding (SPEC D15).

        Raises:
            UndoError: always.
        """
        raise UndoError(
            "Assisted decoding takes tokens back, and an eviction cannot be undone: use the uncompiled model."
        )

    # ------------------------------------------------------------------ what else transformers asks

    @property
    def is_compileable(self) -> bool:
        """False: `generate` must not compile around a step that is compiled already."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: an eviction cannot be undone."""
        return False

    @property
    def is_initialized(self) -> bool:
        """Whether it has cached something."""
        return self.phase is not Phase.EMPTY

    @property
    def batch_size(self) -> int:
        """Number of sequences, -1 while the cache is empty."""
        return self.rows or -1

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        held = f"rows={self.rows}, seen={self.seen}, slots={self.slots}, budget={self.budget}, nbytes={self.nbytes}"
        return f"InertiaCache({held if self.rows else 'empty'}, {self.config!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> InertiaCache:
        result = type(self).__new__(type(self))
        memo[id(self)] = result
        result.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return result

    def __getstate__(self) -> dict[str, Any]:
        # A saved cache outlives its model: the next one that uses it becomes its owner.
        return self.__dict__ | {"_owner": None}
