"""Define the maths of one decode step in plain torch. Every kernel is tested against these functions.

They are written so that they run on tensors *and* on `torch.fx` proxies (no Python branch on a tensor's shape or
value): the `lower` pass inlines them into the graph by calling them on proxies, so there is one definition.

Shapes: B rows, H query heads, N key-value heads, G = H / N query heads per group, S slots, D and Dv head widths.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

NO_POSITION = -1
"""Position of a slot that holds no token."""

_POSITION_MAX = torch.iinfo(torch.int64).max


def group_queries(query: Tensor, kv_heads: int) -> Tensor:
    """Put the query heads that share a KV head side by side: [B, H, 1, D] -> [B, N, G, D]."""
    return query.squeeze(2).unflatten(1, (kv_heads, -1))


def attention_probabilities(
    query: Tensor,
    key: Tensor,
    mask: Tensor,
    scale: float,
    kv_heads: int,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Compute the softmax probabilities of the one query over the slots, grouped by KV head.

    Args:
        query: [B, H, 1, D], any float dtype.
        key: [B, N, S, D]; never expanded to the query heads.
        mask: [B or 1, 1, 1, S] fp32, added to the logits: 0 where attended, -inf where not.
        scale: factor of the logits.
        kv_heads: N.
        softcap: c > 0 makes the logits c tanh(logits / c), before the mask; 0 leaves them.
        sink: [H], one more logit per head, unscaled, that belongs to no slot: a row's probabilities then sum to less than 1.

    Returns:
        [B, N, G, S] in fp32, whatever the inputs' dtype (SPEC D8); 0 at masked slots.
    """
    logits = torch.matmul(group_queries(query, kv_heads), key.transpose(2, 3)).float() * scale
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits + mask
    if sink is None:
        return torch.softmax(logits, dim=-1)
    sink = sink.float().view(1, kv_heads, -1, 1).expand(logits.size(0), -1, -1, 1)
    return torch.softmax(torch.cat([logits, sink], dim=-1), dim=-1)[..., :-1]


def slot_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    kv_heads: int,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Attend with one query token over the slots: [B, H, 1, Dv] in the value's dtype. `mask` is additive, fp32."""
    return _weighted_values(attention_probabilities(query, key, mask, scale, kv_heads, softcap, sink), value)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    live: Tensor,
    scale: float,
    kv_heads: int,
    scorer: str,
    softcap: float = 0.0,
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one query token over the slots, and pool its probabilities to scores.

    Args:
        query, key, mask, scale, kv_heads, softcap, sink: as in :func:`attention_probabilities`.
        value: [B, N, S, Dv].
        live: [B, S] bool, slots that hold a token.
        scorer: "attention", "vnorm" or "entropy" (SPEC D21).

    Returns:
        output [B, H, 1, Dv] in the value's dtype, and s [B, S] in fp32: the mean of the probabilities over all query
        heads (paper eq. 1), which is the mean over KV heads of the groups' means.
    """
    probabilities = attention_probabilities(query, key, mask, scale, kv_heads, softcap, sink)
    return _weighted_values(probabilities, value), pooled_scores(probabilities, value, live, scorer)


def _weighted_values(probabilities: Tensor, value: Tensor) -> Tensor:
    return torch.matmul(probabilities.to(value.dtype), value).flatten(1, 2).unsqueeze(2)


def total(tensor: Tensor) -> Tensor:
    """Sum over the last dimension, kept as 1."""
    return tensor.sum(-1, keepdim=True)


def pooled_scores(
    probabilities: Tensor, value: Tensor, live: Tensor, scorer: str, total: Callable[[Tensor], Tensor] = total
) -> Tensor:
    """Pool probabilities [B, N, G, S] over the heads to scores s [B, S], fp32 (SPEC: "s", D4, D21)."""
    if scorer == "vnorm":
        alive = live.unsqueeze(1)
        norm = torch.where(alive, torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32), 0.0)
        mean = total(norm) / total(alive)
        probabilities = probabilities * (norm / mean).unsqueeze(2)
    scores = probabilities.mean(dim=(1, 2))
    if scorer == "entropy":
        entropy = -total(torch.special.xlogy(scores, scores))
        # One live token carries no information: its entropy and ln(1) are both 0, and so is its weight.
        scores = scores * (entropy / torch.log(total(live).clamp(min=2)))
    return scores


def blend(old: Tensor, new: Tensor, old_weight: float, new_weight: float) -> Tensor:
    """Blend: old_weight * old + new_weight * new, without products that change nothing. An old weight of 0 drops -inf * 0."""
    if old_weight == 0:
        return new * new_weight if new_weight != 1 else new
    kept = old if old_weight == 1 else old * old_weight
    return kept + (new if new_weight == 1 else new * new_weight)


def mean_momentum(momentum: Tensor, live: Tensor) -> Tensor:
    """Average the live momenta: [B, 1] fp32; 0 where nothing is live.

    Summed in fp64 (where the device has it): a token that enters at the mean leaves the mean as it is, so the next
    ones enter with *equal* momentum, and the tie must not be broken by rounding (SPEC D7). It also spares the CPU's
    compiled step a guard, see `cpu.total`.
    """
    wide = torch.float32 if momentum.device.type == "mps" else torch.float64
    mean = torch.where(live, momentum, 0.0).sum(-1, keepdim=True, dtype=wide) / live.sum(-1, keepdim=True).clamp(min=1)
    return mean.float()


def enter(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Enter the new token into the state: into the free slot, at the mean of the row's other live momenta (SPEC D2).

    Args:
        momentum: [B, S] fp32; -inf in dead slots, +inf in closed ones.
        positions: [B, S] int64 true positions; -1 where no token is.
        free: [B] int64, the slot the new token takes; what it held before counts as gone.
        length: [B] int64, tokens the row has seen, which is the new token's position.

    Returns:
        momentum [B, S] and positions [B, S], new tensors.
    """
    slots = torch.arange(positions.size(1), device=positions.device)
    taken = slots == free.unsqueeze(1)
    others = (positions >= 0) & ~taken
    mean = mean_momentum(momentum, others)
    return torch.where(taken, mean, momentum), torch.where(taken, length.unsqueeze(1), positions)


def is_protected(positions: Tensor, newest: Tensor, protect_first: int, protect_recent: int) -> Tensor:
    """Mark the tokens at either end of the text that are never chosen: [B, S] bool; `newest` is the last position, [B] int64."""
    # No branch on what is protected: torch.compile may have made the two numbers symbols.
    return (positions >= 0) & ((positions < protect_first) | (positions > newest.unsqueeze(1) - protect_recent))


def next_free(momentum: Tensor, positions: Tensor, length: Tensor, protect_first: int, protect_recent: int) -> Tensor:
    """Choose the slot to overwrite next, [B] int64: a dead slot if there is one, else the smallest (momentum, position).

    `length` is [B] int64, the new token's position. Dead slots carry momentum -inf and closed slots +inf, so both
    fall into place by themselves; equal momentum lets the oldest position go (SPEC D7). A token whose momentum is not
    a number goes first: it can be compared with nothing.
    """
    key = torch.where(momentum.isnan(), -math.inf, momentum)
    key = torch.where(is_protected(positions, length, protect_first, protect_recent), math.inf, key)
    smallest = key == key.amin(-1, keepdim=True)
    return torch.where(smallest, positions, _POSITION_MAX).argmin(-1)
