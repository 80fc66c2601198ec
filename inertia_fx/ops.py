"""Define the operators that a decode graph carries between the passes (`torch.library`).

`commit_step` is the marker: traced code calls it once, at the end of a step, with the sequence's state and slot buffers.
It does the right thing by itself (the step then decodes with a momentum that never moves), and the passes rewrite it.
The attention operators exist between `emit_scores` and `lower`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .kernels import reference


@torch.library.custom_op("inertia_fx::commit_step", mutates_args=("momentum", "positions", "free", "length"))
def commit_step(
    momentum: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    new_momentum: Tensor,
    new_positions: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    protect_first: int,
    protect_recent: int,
) -> None:
    """Write the state back and choose the slot to overwrite next: (momentum, position) smallest, dead slots first.

    Args:
        momentum: [B, S] fp32, mutated.
        positions: [B, S] int64, mutated.
        free: [B] int64, mutated.
        length: [B] int64, tokens seen, mutated (+1).
        new_momentum, new_positions: [B, S], the state with the new token in it.
        keys, values: each layer's slot buffers in model order; unused here, they tell the passes what to look for.
        protect_first, protect_recent: tokens at either end of the text that are never chosen.
    """
    free.copy_(reference.next_free(new_momentum, new_positions, length, protect_first, protect_recent))
    momentum.copy_(new_momentum)
    positions.copy_(new_positions)
    length.add_(1)


@commit_step.register_fake
def _(momentum, positions, free, length, new_momentum, new_positions, keys, values, protect_first, protect_recent):  # type: ignore[no-untyped-def]
    return None


@torch.library.custom_op("inertia_fx::scored_attention", mutates_args=())
def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, live: Tensor, scale: float, kv_heads: int, scorer: str
) -> tuple[Tensor, Tensor]:
    """Attend and score as :func:`inertia_fx.kernels.reference.scored_attention` does."""
    return reference.scored_attention(query, key, value, mask, live, scale, kv_heads, scorer)


@scored_attention.register_fake
def _(query, key, value, mask, live, scale, kv_heads, scorer):  # type: ignore[no-untyped-def]
    batch, heads = query.shape[:2]
    scores = query.new_empty(batch, key.shape[2], dtype=torch.float32)
    return value.new_empty(batch, heads, 1, value.shape[3]), scores


@torch.library.custom_op("inertia_fx::slot_attention", mutates_args=())
def slot_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Attend as :func:`inertia_fx.kernels.reference.slot_attention` does."""
    return reference.slot_attention(query, key, value, mask, scale, kv_heads)


@slot_attention.register_fake
def _(query, key, value, mask, scale, kv_heads):  # type: ignore[no-untyped-def]
    return value.new_empty(query.shape[0], query.shape[1], 1, value.shape[3])


@torch.library.custom_op("inertia_fx::blend", mutates_args=())
def blend(old: Tensor, new: Tensor, old_weight: float, new_weight: float) -> Tensor:
    """Blend two momenta [B, S] fp32 as :func:`inertia_fx.kernels.reference.blend` does."""
    return reference.blend(old, new, old_weight, new_weight).clone()  # an operator's result may not be its input


@blend.register_fake
def _(old, new, old_weight, new_weight):  # type: ignore[no-untyped-def]
    return torch.empty_like(new)
