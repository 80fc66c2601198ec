"""The same maths as `reference.py`, in the form that Inductor compiles best on CPUs. Shapes as there.

Two things differ. Sums over the slots run in fp64, see :func:`total`. And half-precision products are written as
multiply-and-sum, which Inductor fuses into one loop that reads K or V once and converts as it goes; as matrix products
they would go to a library that, on CPUs without bf16 instructions, takes two to four times as long
(`benchmarks/attention_forms.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import group_queries, pooled_scores


def total(tensor: Tensor) -> Tensor:
    """Sum over the last dimension in fp64, kept as 1, returned as fp32.

    Inductor sums fp32 in chunks once more than 4096 elements are summed, and guards on that: a step over 4097 slots
    and one over 410 would be two compiles. fp64 needs no chunks, so one graph serves every slot count, at no cost
    that could be measured.
    """
    return tensor.sum(-1, keepdim=True, dtype=torch.float64).float()


def materialize(tensor: Tensor) -> Tensor:
    """The tensor, computed once into memory: `as_strided` is a view that Inductor does not compute through.

    Left to itself it would inline the query's rotary embedding, sines and all, into the loop over the slots.
    """
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.size(), tensor.stride())


def _exponentials(
    query: Tensor, key: Tensor, mask: Tensor, scale: float, kv_heads: int, half: bool
) -> tuple[Tensor, Tensor]:
    """exp(logits - max) [B, N, G, S] and its sum over the slots [B, N, G, 1], both fp32."""
    grouped = group_queries(query, kv_heads)
    if half:
        grouped = materialize(grouped.float() * scale)
        logits = (grouped.unsqueeze(3) * key.float().unsqueeze(2)).sum(-1)
    else:
        logits = torch.matmul(grouped, key.transpose(2, 3)).float() * scale
    logits = logits + mask
    exponentials = torch.exp(logits - logits.amax(-1, keepdim=True))
    return exponentials, total(exponentials)


def _output(exponentials: Tensor, sums: Tensor, value: Tensor, half: bool) -> Tensor:
    if half:
        weighted = (exponentials.unsqueeze(4) * value.float().unsqueeze(2)).sum(3, dtype=torch.float64).float()
    else:
        weighted = torch.matmul(exponentials, value.float())
    return (weighted / sums).to(value.dtype).flatten(1, 2).unsqueeze(2)


def slot_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kv_heads: int, half: bool
) -> Tensor:
    """As :func:`reference.slot_attention`; `half` says whether K and V are in half precision."""
    return _output(*_exponentials(query, key, mask, scale, kv_heads, half), value, half)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    live: Tensor,
    scale: float,
    kv_heads: int,
    scorer: str,
    half: bool,
) -> tuple[Tensor, Tensor]:
    """As :func:`reference.scored_attention`; `half` says whether K and V are in half precision."""
    exponentials, sums = _exponentials(query, key, mask, scale, kv_heads, half)
    scores = pooled_scores(exponentials / sums, value, live, scorer, total)
    return _output(exponentials, sums, value, half), scores
