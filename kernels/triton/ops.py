"""Wrap the Triton kernels as operators (`torch.library.triton_op`); imported only where there is Triton to run them.

`lower` puts them into graphs on CUDA and ROCm devices. torch.compile sees through them: Inductor plans their buffers
and launches the kernels from its own code, without a dispatch per operator. On any other device an operator is its
definition in plain torch, which is what lets graphs that hold them be tested without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import triton_op

from .. import reference
from . import attention
from . import state as rows


def _processors(tensor: Tensor) -> int:
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


@triton_op("inertia_fx::triton_slot_attention", mutates_args={})
def slot_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kv_heads: int) -> Tensor:
    """Attend as :func:`inertia_fx.kernels.reference.slot_attention` does."""
    if not query.is_cuda:
        return reference.slot_attention(query, key, value, mask, scale, kv_heads)
    output, _ = attention.scored_attention(
        query, key, value, mask, mask[:, 0, 0], scale, kv_heads, None, processors=_processors(query)
    )
    return output


@triton_op("inertia_fx::triton_scored_attention", mutates_args={})
def scored_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, live: Tensor, scale: float, kv_heads: int, scorer: str
) -> tuple[Tensor, Tensor]:
    """Attend and score as :func:`inertia_fx.kernels.reference.scored_attention` does."""
    if not query.is_cuda:
        return reference.scored_attention(query, key, value, mask, live, scale, kv_heads, scorer)
    output, scores = attention.scored_attention(
        query, key, value, mask, live, scale, kv_heads, scorer, processors=_processors(query)
    )
    assert scores is not None
    return output, scores


@triton_op("inertia_fx::triton_blended_attention", mutates_args={})
def blended_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    live: Tensor,
    scale: float,
    kv_heads: int,
    scorer: str,
    old: Tensor,
    old_weight: float,
    new_weight: float,
) -> tuple[Tensor, Tensor]:
    """Attend, score and update the momentum: the second result is old_weight * old + new_weight * s, in place of s."""
    if not query.is_cuda:
        output, scores = reference.scored_attention(query, key, value, mask, live, scale, kv_heads, scorer)
        return output, reference.blend(old, scores, old_weight, new_weight)
    output, moved = attention.scored_attention(
        query, key, value, mask, live, scale, kv_heads, scorer,
        old=old, old_weight=old_weight, new_weight=new_weight, processors=_processors(query),
    )  # fmt: skip
    assert moved is not None
    return output, moved


@triton_op("inertia_fx::triton_enter", mutates_args={})
def enter(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Enter the new token as :func:`inertia_fx.kernels.reference.enter` does."""
    if not momentum.is_cuda:
        return reference.enter(momentum, positions, free, length)
    return rows.enter(momentum, positions, free, length)


@triton_op("inertia_fx::triton_evict", mutates_args={"momentum", "positions", "free", "length"})
def evict(
    momentum: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    moved: Tensor,
    marks: Tensor,
    new_positions: Tensor,
    protect_first: int,
    protect_recent: int,
) -> None:
    """See :func:`inertia_fx.kernels.triton.state.evict`."""
    if not momentum.is_cuda:
        moved = torch.where(new_positions >= 0, moved, marks)
        free.copy_(reference.next_free(moved, new_positions, length, protect_first, protect_recent))
        momentum.copy_(moved)
        positions.copy_(new_positions)
        length.add_(1)
        return
    rows.evict(momentum, positions, free, length, moved, marks, new_positions, protect_first, protect_recent)
