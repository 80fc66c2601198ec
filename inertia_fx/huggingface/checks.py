"""Refuse what of transformers cannot be compiled or read: models, attentions, caches, masks."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..errors import CacheError, PositionBiasError, UnsupportedAttentionError, UnsupportedModelError
from .cache import InertiaCache

CACHE_NAMES = ("cache", "past_key_values")
"""What a forward calls its cache: transformers 5.24 and later, and before."""


@functools.cache
def parameters_of(base: Any) -> tuple[str, ...]:
    """List the arguments of a model class's forward, by name."""
    return tuple(inspect.signature(base.forward).parameters)[1:]


def inspect_model(model: Any) -> tuple[str, int]:
    """Check that a model can be compiled.

    Returns:
        The forward's name for its cache, and the number of cached layers.

    Raises:
        UnsupportedModelError: it cannot; the message says why and what to do.
    """
    base: Any = type(model)
    kind = base.__name__
    if not isinstance(model, transformers.PreTrainedModel) or not callable(getattr(model, "generate", None)):
        raise UnsupportedModelError(
            f"{kind} is not a transformers model with generate(). For a decoder of your own, compile its step with"
            ' torch.compile(step, backend="inertia_fx") and an InertiaCache (see the README).'
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(
            f"{kind} is an encoder-decoder: its cross attention reads a cache that must not be evicted from."
            " inertia_fx compiles decoder-only models; use this one uncompiled."
        )
    if "forward" in model.__dict__:
        raise UnsupportedModelError(
            f"{kind}.forward was replaced on the instance (accelerate hooks, a patch, or forward = torch.compile(...)),"
            " which would hide the compiled step. Undo it first, for example with"
            " accelerate.hooks.remove_hook_from_module(model, recurse=True)."
        )
    name = next((name for name in CACHE_NAMES if name in parameters_of(base)), None)
    if name is None or not base._supports_default_dynamic_cache():
        raise UnsupportedModelError(
            f"{kind} keeps no key-value cache that attention reads, so there is nothing to evict: use it uncompiled."
        )
    config = model.config.get_text_config(decoder=True)
    if config.model_type in ("bloom", "mpt") or getattr(config, "alibi", False):
        raise PositionBiasError(
            None, None, f"{kind} biases attention by distance (ALiBi), read off the place of a key in the cache,"
            " which eviction changes",
        )  # fmt: skip
    layers = DynamicCache(config=config).layers
    other = {index: type(layer).__name__ for index, layer in enumerate(layers) if type(layer) is not DynamicLayer}
    if len(other) == len(layers) and not any("Sliding" in name for name in other.values()):
        raise UnsupportedModelError(f"{kind} has no attention over a key-value cache: there is nothing to evict.")
    if other:
        index, name_of = next(iter(other.items()))
        raise UnsupportedModelError(
            f"{kind} has {len(other)} of {len(layers)} layers without full attention (layer {index} caches in a"
            f" {name_of}): models that mix layer types are not supported yet. Use it uncompiled."
        )
    require_readable_attention(model)
    return name, len(layers)


def require_readable_attention(model: Any) -> None:
    """Raise :class:`UnsupportedAttentionError` unless attention's probabilities are in the graph."""
    implementation = model.config._attn_implementation
    if implementation not in ("sdpa", "eager"):
        raise UnsupportedAttentionError(
            None, None, f"attn_implementation={implementation!r} hides its probabilities from the graph",
        )  # fmt: skip


def require_ours(cache: Any) -> InertiaCache:
    """Return the cache, or raise :class:`CacheError` unless it is an InertiaCache."""
    if not isinstance(cache, InertiaCache):
        raise CacheError(
            f"A {type(cache).__name__} was passed to a compiled model, which keeps its tokens in an InertiaCache: pass"
            " inertia_fx.InertiaCache() (or no cache at all), and let the prompt run through this model."
        )
    return cache


def padding_of(mask: Any, seen: int, batch: int, width: int) -> Tensor | None:
    """Cut this forward's own tokens out of a 2-D attention mask.

    Args:
        mask: [batch, seen + width], nonzero where a token is real, or ``None``.
        seen: tokens in the cache.
        batch, width: of the forward.

    Returns:
        [batch, width] bool, False at padding; ``None`` if all of them are real.
    """
    if width == 0:
        return None  # the cache refuses an empty prompt, and knows why
    check_mask(mask, seen, batch, width)
    own = None if mask is None else mask[:, seen:].bool()
    return None if own is None or bool(own.all()) else own


def check_mask(mask: Any, seen: int, batch: int, width: int) -> None:
    """Raise :class:`CacheError` unless a mask is ``None`` or [batch, seen + width]."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        raise CacheError(
            "attention_mask must be 2-D, [batch, tokens]: from a prepared mask one cannot tell which tokens are padding,"
            " and padding must never be kept."
        )
    if mask.shape[0] != batch:
        raise CacheError(f"attention_mask has {mask.shape[0]} rows and the forward {batch}: they must agree.")
    if mask.shape[1] != seen + width:
        raise CacheError(
            f"attention_mask covers {mask.shape[1]} tokens, but {seen} are cached and {width} are new: pass"
            f" {seen + width}."
        )
