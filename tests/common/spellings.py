"""Spell attention in every way that is refused, on the tiny decoder of `inertia_fx.verify.testing.decoders`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from inertia_fx.verify.testing.decoders import FORMS as MATCHED
from inertia_fx.verify.testing.decoders import TinyDecoder as TinyDecoder
from inertia_fx.verify.testing.decoders import minimum, sdpa_gqa, sdpa_repeat

__all__ = [
    "HEADS",
    "KV_HEADS",
    "MATCHED",
    "REFUSED",
    "SCALE",
    "WIDTH",
    "TinyDecoder",
    "alibi",
    "sdpa_gqa",
    "sdpa_repeat",
]

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALE = 1 / math.sqrt(WIDTH)


def repeat(x: Tensor) -> Tensor:
    rows, heads, slots, width = x.shape
    return x[:, :, None, :, :].expand(rows, heads, HEADS // heads, slots, width).reshape(rows, HEADS, slots, width)


def mask_written_into(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    mask = live.clone()
    mask[..., :2] = False
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def logits_written_into(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = q @ repeat(k).mT * SCALE + minimum(live)
    logits[..., :2] = -1e9
    return F.softmax(logits, -1) @ repeat(v)


def weights_written_into(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    weights = F.softmax(q @ repeat(k).mT * SCALE + minimum(live), -1)
    weights[..., :2] = 0
    return weights @ repeat(v)


def weights_scaled_in_place(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    weights = F.softmax(q @ repeat(k).mT * SCALE + minimum(live), -1)
    weights.mul_(2.0)
    return weights @ repeat(v)


def view_of_weights_written_into(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    weights = F.softmax(q @ repeat(k).mT * SCALE + minimum(live), -1)
    weights[:, 0].mul_(2.0)
    return weights @ repeat(v)


def scaled_by_add(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.softmax(torch.add(minimum(live), q @ repeat(k).mT, alpha=SCALE), -1) @ repeat(v)


def bool_mask_added(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.softmax(q @ repeat(k).mT * SCALE + live, -1) @ repeat(v)


def _attend_in(dtype: torch.dtype, q: Tensor, k: Tensor, v: Tensor, live: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype), attn_mask=live, enable_gqa=True)


def cast_up(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return _attend_in(torch.float64, q, k, v, live).float()


def open_slots(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    """Hides dead slots, attends to closed ones."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=extra["not_dead"][:, None, None, :], enable_gqa=True)


def constant_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones_like(live), enable_gqa=True)


def window(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    """The last four slots only: as if slots were in text order."""
    near = torch.arange(k.shape[2]) >= k.shape[2] - 4
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live & near, enable_gqa=True)


def alibi_of_constants(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    bias = minimum(live) - 0.1 * torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def alibi(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    bias = minimum(live) + extra["slope"] * torch.arange(k.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=True)


def alibi_in_softmax(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = q @ repeat(k).mT * SCALE + extra["slope"] * torch.arange(k.shape[2]) + minimum(live)
    return F.softmax(logits, -1) @ repeat(v)


def causal(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) + 0 * live.sum()


def dropout(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live, dropout_p=0.1, enable_gqa=True)


def dropout_in_softmax(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    weights = F.softmax(q @ repeat(k).mT * SCALE + minimum(live), -1)
    return F.dropout(weights, 0.1, training=True) @ repeat(v)


def softcap(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = torch.tanh(q @ repeat(k).mT * SCALE / 30) * 30
    return F.softmax(logits + minimum(live), -1) @ repeat(v)


def sinks(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = q @ repeat(k).mT * SCALE + minimum(live)
    logits = torch.cat([logits, logits.new_zeros((*logits.shape[:3], 1))], dim=-1)
    return F.softmax(logits, -1)[..., :-1] @ repeat(v)


def tiled(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    """Heads tiled 0 1 0 1 instead of repeated 0 0 1 1: another grouping of the query heads."""
    k, v = k.repeat(1, HEADS // KV_HEADS, 1, 1), v.repeat(1, HEADS // KV_HEADS, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live)


def tiled_by_reshape(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    rows, heads, slots, width = k.shape
    k, v = (
        x[:, None].expand(rows, HEADS // heads, heads, slots, width).reshape(rows, HEADS, slots, width) for x in (k, v)
    )
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live)


def latent(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, F.linear(k, extra["up"]), v, attn_mask=live, enable_gqa=True)


def doubled_values(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v * 2, attn_mask=live, enable_gqa=True)


def twice(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=live, enable_gqa=True)
    return F.scaled_dot_product_attention(first, k, v, attn_mask=live, enable_gqa=True)


def per_head_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live.expand(-1, HEADS, -1, -1), enable_gqa=True)


def squared_weights(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    weights = F.softmax(q @ repeat(k).mT * SCALE + minimum(live), -1)
    return (weights * weights) @ repeat(v)


def not_attention(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return (k.mean(2, keepdim=True) + v.mean(2, keepdim=True)).repeat(1, HEADS // KV_HEADS, 1, 1) * q


REFUSED: dict[str, tuple[Callable[..., Tensor], str]] = {
    function.__name__: (function, reason)
    for function, reason in (
        (mask_written_into, "is written into by setitem"),
        (logits_written_into, "is written into by setitem"),
        (weights_written_into, "is written into by setitem"),
        (weights_scaled_in_place, "is written into by mul_"),
        (view_of_weights_written_into, "its weights are used 2 times"),
        (scaled_by_add, "scaled by alpha="),
        (bool_mask_added, "its mask is boolean"),
        (cast_up, "not of one dtype"),
        (open_slots, "not the validity"),
        (constant_mask, "not the validity"),
        (window, "not the validity"),
        (alibi_of_constants, "not the validity"),
        (alibi, "a bias by position"),
        (alibi_in_softmax, "2 tensors are added to its logits"),
        (causal, "is_causal=True"),
        (dropout, "it drops attention weights"),
        (dropout_in_softmax, "it drops attention weights"),
        (softcap, "tanh"),
        (sinks, "cat"),
        (tiled, "its keys are not a slot buffer of the cache, but computed by repeat"),
        (tiled_by_reshape, "its keys are not a slot buffer of the cache, but computed by reshape"),
        (latent, "its keys are not a slot buffer of the cache, but computed by linear"),
        (doubled_values, "its values are not the slot buffer of layer 0"),
        (twice, "a second attention reads the keys"),
        (per_head_mask, "its mask has shape"),
        (squared_weights, "its weights"),
        (not_attention, "leads to no attention"),
    )
}
