"""Write the maths of `reference.py` in the form that Inductor compiles best on CPUs. Shapes as there.

Two things differ. Sums over the slots run in fp64, see :func:`total`, but not those with V, see :func:`_weighted_sums`.
And products with K, in half precision also with V, are written as multiply-and-sum, head by head of a group: Inductor
fuses the heads into one loop that reads and converts K or V once for all of them. As matrix products they would go to a
library that, on CPUs without bf16 instructions, takes two to four times as long (`benchmarks/attention_forms.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


_CHUNK = 4096
"""Elements that Inductor sums one after the other in fp32, before it begins a new partial sum."""


def _weighted_sums(weights: Tensor, value: Tensor, group: int) -> Tensor:
    """Sum over the slots weights [B, N, G, S] times value [B, N, S, D] in half precision: [B, N, G, D], fp32.

    The first 4096 slots in fp32, the others in fp64. Converting every product to fp64 takes as long as all the rest of
    it, and "at most 4096" is true of min(S, 4096) whatever S is: no guard. The second sum begins two slots early,
    with zeros, as a sum over one slot or none would be a case of its own. Read through indices, not as slices, since a
    slice is contiguous or not depending on where it ends.
    """
    slots = value.shape[2]
    first = torch.sym_min(slots, _CHUNK)
    begin, count = first - 2, torch.sym_max(slots, _CHUNK) - (_CHUNK - 2)

    def products(at: Tensor, again: Tensor | None, dtype: torch.dtype) -> Tensor:
        values = _take(value, None, None, at).float().unsqueeze(2)

        def summed(heads: Tensor) -> Tensor:
            product = heads.unsqueeze(4) * values
            if again is not None:  # not by a weight of 0, which would make an infinite value NaN
                product = torch.where(again.unsqueeze(1), 0.0, product)
            return product.sum(3, dtype=dtype)

        return _by_head(_take(weights, None, None, None, at), group, summed)

    numbers = _numbers(count)
    in_fp32 = products(_numbers(first), None, torch.float32)
    in_fp64 = products(numbers + begin, numbers < 2, torch.float64)
    return in_fp32 + in_fp64.float()


def _numbers(count: Any) -> Tensor:
    return torch.ops.aten.arange(count, device=torch.device("cpu"))


def _take(tensor: Tensor, *indices: Tensor | None) -> Tensor:
    """Index ``tensor[..., index]`` without a check of the bounds."""
    return torch.ops.aten._unsafe_index(tensor, indices)


def materialize(tensor: Tensor) -> Tensor:
    """Compute a tensor once, into memory: `as_strided` is a view that Inductor does not compute through.

    Left to itself it would inline the query's rotary embedding, sines and all, into the loop over the slots.
    """
    tensor = tensor.contiguous()
    return tensor.as_strided(tensor.size(), tensor.stride())


_UNROLLED = 8
"""Heads of a group in one loop, at most: more would not fit into registers."""


def _by_head(heads: Tensor, group: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `function` to some heads of every group at a time, [B, N, G, ...] -> [B, N, G, ...] put together again."""
    unrolled = max(count for count in range(1, min(group, _UNROLLED) + 1) if group % count == 0)
    parts = heads.unflatten(2, (group // unrolled, unrolled))
    return torch.stack([function(parts[:, :, :, index]) for index in range(unrolled)], 3).flatten(2, 3)


def _exponentials(
    query: Tensor, key: Tensor, mask: Tensor, scale: float, kv_heads: int, group: int
) -> tuple[Tensor, Tensor]:
    """Compute exp(logits - max) [B, N, G, S] and its sum over the slots [B, N, G, 1], both fp32."""
    grouped = materialize(group_queries(query, kv_heads).float() * scale)
    keys = key.float().unsqueeze(2)
    logits = _by_head(grouped, group, lambda heads: (heads.unsqueeze(3) * keys).sum(-1))
    logits = logits + mask
    exponentials = torch.exp(logits - logits.amax(-1, keepdim=True))
    return exponentials, total(exponentials)


def _output(exponentials: Tensor, sums: Tensor, value: Tensor, group: int, half: bool) -> Tensor:
    weighted = _weighted_sums(exponentials, value, group) if half else torch.matmul(exponentials, value.float())
    return (weighted / sums).to(value.dtype).flatten(1, 2).unsqueeze(2)


def slot_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, kv_heads: int, group: int, half: bool
) -> Tensor:
    """Attend as :func:`reference.slot_attention` does; `group` is G, `half` says whether K and V are in half precision."""
    return _output(*_exponentials(query, key, mask, scale, kv_heads, group), value, group, half)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    live: Tensor,
    scale: float,
    kv_heads: int,
    scorer: str,
    group: int,
    half: bool,
) -> tuple[Tensor, Tensor]:
    """Attend and score as :func:`reference.scored_attention` does; `group` is G, `half`: K and V are in half precision."""
    exponentials, sums = _exponentials(query, key, mask, scale, kv_heads, group)
    scores = pooled_scores(exponentials / sums, value, live, scorer, total)
    return _output(exponentials, sums, value, group, half), scores
