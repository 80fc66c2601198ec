"""The same maths as `reference.py`, in the form that Inductor compiles best on CPUs. Shapes as there.

Two things differ. Sums over the slots run in fp64, see :func:`total`. And half-precision products are written as
multiply-and-sum, which Inductor fuses into one loop that reads K or V once and converts as it goes; as matrix products
they would go to a library that, on CPUs without bf16 instructions, takes four times as long (SmolLM2's shapes at 410
slots, AVX2: 150 us against 690 us; `benchmarks/attention_forms.py`).
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


def _probabilities(query: Tensor, key: Tensor, mask: Tensor, scale: float, kv_heads: int, half: bool) -> Tensor:
    grouped = group_queries(query, kv_heads)
    if half:
        logits = (grouped.float().unsqueeze(3) * key.float().unsqueeze(2)).sum(-1)
    else:
        logits = torch.matmul(grouped, key.transpose(2, 3)).float()
    logits = logits * scale + mask
    exponentials = torch.exp(logits - logits.amax(-1, keepdim=True))
    return exponentials / total(exponentials)


def _weighted_values(probabilities: Tensor, value: Tensor, half: bool) -> Tensor:
    if half:
        output = (probabilities.unsqueeze(4) * value.float().unsqueeze(2)).sum(3, dtype=torch.float64).to(value.dtype)
    else:
        output = torch.matmul(probabilities.to(value.dtype), value)
    return output.flatten(1, 2).unsqueeze(2)


def slot_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kv_heads: int, half: bool
) -> Tensor:
    """As :func:`reference.slot_attention`; `half` says whether K and V are in half precision."""
    return _weighted_values(_probabilities(query, key, mask, scale, kv_heads, half), value, half)


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
    probabilities = _probabilities(query, key, mask, scale, kv_heads, half)
    return _weighted_values(probabilities, value, half), pooled_scores(probabilities, value, live, scorer, total)
