"""Decode attention in Triton, split along the slots, whose scores come with it (needs `triton`).

One query token per row attends to S slots (SPEC "One decode step"). With z = q k scale, softcapped, plus the mask:

    attend   program (row, KV head, split): one pass over its tiles of K and V for all query heads of the group.
             max and sum of exp(z), sum of exp(z) v, and, if scores are read, z itself: fp32
    merge    program (row, query head): the splits' partial sums, weighted to a common maximum -> output
             program (row, block of slots): p = exp(z - max) / sum per head, pooled over the heads -> s,
             and at once m = old_weight m + new_weight s
    weigh    (scorer "entropy" only) s times H(s) / ln L, once H is known

So scores cost H S logits in fp32 written and read once, which stay in the L2 cache, beside N S (D + Dv) keys and values.
Everything is fp32 but the operands of the two products, which are the model's dtype, as in `reference.py`, the
definition. Flash-decoding's split is Dao et al., 2023 (https://crfm.stanford.edu/2023/10/12/flashdecoding.html).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from .plan import Plan, plan_for, splits_for

LOG2E = tl.constexpr(1.4426950408889634)
"""Logits are kept times log2(e), so that every exponential is an exp2, which the hardware has."""

LN2 = tl.constexpr(0.6931471805599453)

SLOTS_PER_MERGE, HEADS_PER_MERGE, SPLITS_PER_MERGE = 256, 16, 32
"""Tile of one merge program: slots of a block; heads and splits of one turn of its loops."""


@triton.jit
def attend_kernel(
    query, key, value, mask, sink, live, partial, stats, logits, norms, norm_stats,
    scale, softcap, kv_heads, slots, splits,
    query_row, query_head, query_width,
    key_row, key_head, key_slot, key_width,
    value_row, value_head, value_slot, value_width,
    mask_row, mask_slot, live_row, live_slot,
    GROUPS: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    BLOCK_GROUP: tl.constexpr, BLOCK_SLOTS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SCORED: tl.constexpr, VNORM: tl.constexpr, SOFTCAP: tl.constexpr, SINK: tl.constexpr,
):  # fmt: skip
    """Sum one split. Grid: (rows * KV heads, splits, chunks of a group). Names ending in an axis are strides."""
    row = (tl.program_id(0) // kv_heads).to(tl.int64)
    head = tl.program_id(0) % kv_heads
    split = tl.program_id(1)
    group = tl.program_id(2) * BLOCK_GROUP + tl.arange(0, BLOCK_GROUP)
    in_group = group < GROUPS
    heads = kv_heads * GROUPS
    query_heads = row * heads + head * GROUPS + group
    width = tl.arange(0, BLOCK_WIDTH)
    widths = tl.arange(0, BLOCK_VALUE)
    q = tl.load(
        query + row * query_row + (head * GROUPS + group)[:, None] * query_head + width[None, :] * query_width,
        mask=in_group[:, None] & (width < WIDTH)[None, :], other=0.0,
    )  # fmt: skip

    # A sink is one more logit without a value; the first split counts it.
    largest = tl.full([BLOCK_GROUP], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_GROUP], tl.float32)
    if SINK:  # noqa: SIM102 (a constant of the compile; the split is not)
        if split == 0:
            largest = tl.load(sink + head * GROUPS + group, mask=in_group, other=0.0).to(tl.float32) * LOG2E
            total = tl.full([BLOCK_GROUP], 1.0, tl.float32)
    weighted = tl.zeros([BLOCK_GROUP, BLOCK_VALUE], tl.float32)
    norm_total = tl.zeros([BLOCK_SLOTS], tl.float32)
    live_total = tl.zeros([BLOCK_SLOTS], tl.float32)

    tiles = tl.cdiv(tl.cdiv(slots, BLOCK_SLOTS), splits)
    begin = split * tiles * BLOCK_SLOTS
    end = tl.minimum(begin + tiles * BLOCK_SLOTS, slots)
    key += row * key_row + head * key_head
    value += row * value_row + head * value_head
    for start in range(begin, end, BLOCK_SLOTS):
        slot = start + tl.arange(0, BLOCK_SLOTS)
        inside = slot < end
        k = tl.load(
            key + slot[:, None] * key_slot + width[None, :] * key_width,
            mask=inside[:, None] & (width < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        bias = tl.load(mask + row * mask_row + slot * mask_slot, mask=inside, other=-float("inf"))
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFTCAP:
            z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
        z = (z + bias[None, :]) * LOG2E
        if SCORED:
            tl.store(logits + query_heads[:, None] * slots + slot[None, :], z, mask=in_group[:, None] & inside[None, :])
        larger = tl.maximum(largest, tl.max(z, 1))
        # While nothing but masked slots has been seen the maximum is -inf, and -inf - -inf is not a number.
        base = tl.where(larger == -float("inf"), 0.0, larger)
        p = tl.exp2(z - base[:, None])
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(
            value + slot[:, None] * value_slot + widths[None, :] * value_width,
            mask=inside[:, None] & (widths < VALUE_WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        weighted = weighted * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = larger
        if VNORM:
            alive = tl.load(live + row * live_row + slot * live_slot, mask=inside, other=0).to(tl.float32)
            norm = tl.sqrt(tl.sum(v.to(tl.float32) * v.to(tl.float32), 1)) * alive
            norm_total += norm
            live_total += alive
            tl.store(norms + (row * kv_heads + head) * slots + slot, norm, mask=inside)

    place = query_heads * splits + split
    tl.store(stats + place * 2, largest, mask=in_group)
    tl.store(stats + place * 2 + 1, total, mask=in_group)
    tl.store(
        partial + place[:, None] * VALUE_WIDTH + widths[None, :], weighted,
        mask=in_group[:, None] & (widths < VALUE_WIDTH)[None, :],
    )  # fmt: skip
    if VNORM:
        place = (row * kv_heads + head) * splits + split
        tl.store(norm_stats + place * 2, tl.sum(norm_total, 0))
        tl.store(norm_stats + place * 2 + 1, tl.sum(live_total, 0))


@triton.jit
def _largest_and_total(stats, heads, inside, splits, HEADS: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find each head's largest logit over all splits (0 if everything is masked), and the sum of exponentials."""
    largest = tl.full([HEADS], -float("inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for first in range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        given = inside[:, None] & (split < splits)[None, :]
        place = stats + (heads[:, None] * splits + split[None, :]) * 2
        part = tl.load(place, mask=given, other=-float("inf"))
        sums = tl.load(place + 1, mask=given, other=0.0)
        larger = tl.maximum(largest, tl.max(part, 1))
        base = tl.where(larger == -float("inf"), 0.0, larger)
        total = total * tl.exp2(largest - base) + tl.sum(sums * tl.exp2(part - base[:, None]), 1)
        largest = larger
    return tl.where(largest == -float("inf"), 0.0, largest), total


@triton.jit
def merge_kernel(
    partial, stats, logits, norms, norm_stats, live, old, output, scores, entropies,
    old_weight, new_weight, heads, kv_heads, slots, splits, live_row, live_slot, old_row, old_slot,
    GROUPS: tl.constexpr, VALUE_WIDTH: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
    SCORED: tl.constexpr, VNORM: tl.constexpr, ENTROPY: tl.constexpr, BLEND: tl.constexpr,
):  # fmt: skip
    """Merge the splits to output and scores. Grid: (rows, query heads + blocks of slots); without scores (rows, query heads).

    The grid alone would keep the scores from being written, but torch reads what a kernel may write off its code: it
    would take `scores`, which is then the mask, for written to, and copy the mask for every layer.
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) < heads:
        one = row * heads + tl.program_id(1) + tl.arange(0, 1)
        largest, total = _largest_and_total(stats, one, one >= 0, splits, 1, SPLITS)
        widths = tl.arange(0, BLOCK_VALUE)
        first_place = (row * heads + tl.program_id(1)) * splits
        result = tl.zeros([BLOCK_VALUE], tl.float32)
        for first in range(0, splits, SPLITS):
            split = first + tl.arange(0, SPLITS)
            part = tl.load(stats + (first_place + split) * 2, mask=split < splits, other=-float("inf"))
            weight = tl.exp2(part - tl.max(largest, 0))
            sums = tl.load(
                partial + (first_place + split)[:, None] * VALUE_WIDTH + widths[None, :],
                mask=(split < splits)[:, None] & (widths < VALUE_WIDTH)[None, :], other=0.0,
            )  # fmt: skip
            result += tl.sum(sums * weight[:, None], 0)
        result = result / tl.max(total, 0)
        place = output + (row * heads + tl.program_id(1)) * VALUE_WIDTH + widths
        tl.store(place, result.to(output.dtype.element_ty), mask=widths < VALUE_WIDTH)
    elif SCORED:
        block = tl.program_id(1) - heads
        slot = block * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
        inside = slot < slots
        pooled = tl.zeros([BLOCK_SLOTS], tl.float32)
        for first in range(0, heads, HEADS):
            head = first + tl.arange(0, HEADS)
            there = head < heads
            largest, total = _largest_and_total(stats, row * heads + head, there, splits, HEADS, SPLITS)
            given = there[:, None] & inside[None, :]
            z = tl.load(logits + (row * heads + head)[:, None] * slots + slot[None, :], mask=given, other=-float("inf"))
            p = tl.exp2(z - largest[:, None]) / tl.where(there, total, 1.0)[:, None]
            if VNORM:
                kv_head = row * kv_heads + head // GROUPS
                # Summed over the splits after the loop: Triton 3.6 fails on a sum inside whose result is used twice.
                norm_sums = tl.zeros([HEADS, SPLITS], tl.float32)
                counts = tl.zeros([HEADS, SPLITS], tl.float32)
                for first_split in range(0, splits, SPLITS):
                    split = first_split + tl.arange(0, SPLITS)
                    place = norm_stats + (kv_head[:, None] * splits + split[None, :]) * 2
                    found = there[:, None] & (split < splits)[None, :]
                    norm_sums += tl.load(place, mask=found, other=0.0)
                    counts += tl.load(place + 1, mask=found, other=0.0)
                norm_sum, count = tl.sum(norm_sums, 1), tl.sum(counts, 1)
                norm = tl.load(norms + kv_head[:, None] * slots + slot[None, :], mask=given, other=0.0)
                p = p * (norm * (count / tl.where(norm_sum > 0, norm_sum, 1.0))[:, None])
            pooled += tl.sum(p, 0)
        pooled = pooled / heads
        if ENTROPY:
            # Summed with what the other blocks find; the weight, and with it the momentum, is the next kernel's.
            tl.store(scores + row * slots + slot, pooled, mask=inside)
            entropy = -tl.sum(tl.where(pooled > 0, pooled * tl.log2(pooled), 0.0), 0) * LN2
            alive = tl.load(live + row * live_row + slot * live_slot, mask=inside, other=0).to(tl.float32)
            # A name of its own: both sides of the outer `if` must agree on the type of a name they share.
            summed = entropies + (row * tl.cdiv(slots, BLOCK_SLOTS) + block) * 2
            tl.store(summed, entropy)
            tl.store(summed + 1, tl.sum(alive, 0))
        else:
            _store_scores(
                scores, old, pooled, row, slot, inside, slots, old_row, old_slot, old_weight, new_weight, BLEND
            )


@triton.jit
def _store_scores(
    scores, old, pooled, row, slot, inside, slots, old_row, old_slot, old_weight, new_weight, BLEND: tl.constexpr
):  # type: ignore[no-untyped-def]
    """s, or m = old_weight m + new_weight s. A weight of 0 drops the old momentum: -inf * 0 is not a number."""
    if BLEND:
        before = tl.load(old + row * old_row + slot * old_slot, mask=inside, other=0.0)
        pooled = tl.where(old_weight == 0, 0.0, before * old_weight) + pooled * new_weight
    tl.store(scores + row * slots + slot, pooled, mask=inside)


@triton.jit
def weigh_kernel(
    scores, entropies, old, result, old_weight, new_weight, slots, blocks, old_row, old_slot,
    BLOCK_SLOTS: tl.constexpr, BLOCKS: tl.constexpr, BLEND: tl.constexpr,
):  # fmt: skip
    """s H(s) / ln L (SPEC D21) and the blend with the momentum. Grid: (rows, blocks of slots)."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.program_id(1) * BLOCK_SLOTS + tl.arange(0, BLOCK_SLOTS)
    entropy = tl.zeros([BLOCKS], tl.float32)
    alive = tl.zeros([BLOCKS], tl.float32)
    for first in range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        place = entropies + (row * blocks + block) * 2
        entropy += tl.load(place, mask=block < blocks, other=0.0)
        alive += tl.load(place + 1, mask=block < blocks, other=0.0)
    # One live token carries no information: its entropy and ln(1) are both 0, and so is its weight.
    weight = tl.sum(entropy, 0) / (tl.log2(tl.maximum(tl.sum(alive, 0), 2.0)) * LN2)
    inside = slot < slots
    s = tl.load(scores + row * slots + slot, mask=inside, other=0.0) * weight
    _store_scores(result, old, s, row, slot, inside, slots, old_row, old_slot, old_weight, new_weight, BLEND)


def scored_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    live: Tensor,
    scale: float,
    kv_heads: int,
    scorer: str | None,
    *,
    old: Tensor | None = None,
    old_weight: float = 0.0,
    new_weight: float = 1.0,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    processors: int = 1,
    plan: Plan | None = None,
    splits: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Launch the kernels. Shapes as in :func:`inertia_fx.kernels.reference.scored_attention`, any strides.

    Args:
        scorer: ``None`` emits no scores.
        old: [B, S] fp32; the second result is then old_weight * old + new_weight * s instead of s.
        softcap: c > 0 makes the logits c tanh(logits / c); 0 leaves them as they are.
        sink: [H], one more logit per head, without a value (its probability is in no slot).
        processors: of the device; decides the splits.
        plan, splits: tests and benchmarks choose them themselves.

    Returns:
        output [B, H, 1, Dv] in the value's dtype, and s [B, S] fp32 (or the blend, or ``None``).

    Slots hold finite numbers also where they are masked, as everywhere in this library: 0 times NaN is not 0.
    """
    rows, heads, _, width = query.shape
    slots, value_width = key.shape[2], value.shape[3]
    groups = heads // kv_heads
    if plan is None:
        plan = plan_for(groups, width, value_width, key.element_size(), torch.version.hip is not None)
    chunks = (groups + plan.block_group - 1) // plan.block_group
    if splits is None:
        splits = splits_for(rows * kv_heads * chunks, slots, processors, plan.block_slots)
    mask = mask.expand(rows, 1, 1, slots)

    def empty(*shape: int) -> Tensor:
        return query.new_empty(shape, dtype=torch.float32)

    unused = mask  # a pointer that is never followed
    # What has one place per split or block is flat: torch asks whether a dimension is 1, and for a symbolic number of
    # splits the answer would become a guard on the slot count.
    partial, stats = empty(rows * heads * splits * value_width), empty(rows * heads * splits * 2)
    output = value.new_empty(rows, heads, 1, value_width)
    scored, vnorm, entropy = scorer is not None, scorer == "vnorm", scorer == "entropy"
    logits = empty(rows, heads, slots) if scored else unused
    norms = empty(rows, kv_heads, slots) if vnorm else unused
    norm_stats = empty(rows * kv_heads * splits * 2) if vnorm else unused
    scores = empty(rows, slots) if scored else unused
    blocks = (slots + SLOTS_PER_MERGE - 1) // SLOTS_PER_MERGE
    entropies = empty(rows * blocks * 2) if entropy else unused
    old_strides = (0, 0) if old is None else old.stride()

    wrap_triton(attend_kernel)[(rows * kv_heads, splits, chunks)](
        query, key, value, mask, unused if sink is None else sink, live, partial, stats, logits, norms, norm_stats,
        scale, softcap, kv_heads, slots, splits,
        query.stride(0), query.stride(1), query.stride(3),
        key.stride(0), key.stride(1), key.stride(2), key.stride(3),
        value.stride(0), value.stride(1), value.stride(2), value.stride(3),
        mask.stride(0), mask.stride(3), live.stride(0), live.stride(1),
        GROUPS=groups, WIDTH=width, VALUE_WIDTH=value_width,
        BLOCK_GROUP=plan.block_group, BLOCK_SLOTS=plan.block_slots,
        BLOCK_WIDTH=plan.block_width, BLOCK_VALUE=plan.block_value,
        SCORED=scored, VNORM=vnorm, SOFTCAP=softcap > 0, SINK=sink is not None,
        num_warps=plan.warps, num_stages=plan.stages,
    )  # fmt: skip
    wrap_triton(merge_kernel)[(rows, heads + blocks if scored else heads)](
        partial, stats, logits, norms, norm_stats, live, unused if old is None else old, output, scores, entropies,
        old_weight, new_weight, heads, kv_heads, slots, splits, live.stride(0), live.stride(1), *old_strides,
        GROUPS=groups, VALUE_WIDTH=value_width, BLOCK_VALUE=plan.block_value,
        BLOCK_SLOTS=SLOTS_PER_MERGE, HEADS=HEADS_PER_MERGE, SPLITS=SPLITS_PER_MERGE,
        SCORED=scored, VNORM=vnorm, ENTROPY=entropy, BLEND=old is not None, num_warps=4,
    )  # fmt: skip
    if not scored:
        return output, None
    if entropy:
        weighed = empty(rows, slots)
        wrap_triton(weigh_kernel)[(rows, blocks)](
            scores, entropies, unused if old is None else old, weighed, old_weight, new_weight, slots, blocks,
            *old_strides, BLOCK_SLOTS=SLOTS_PER_MERGE, BLOCKS=256, BLEND=old is not None, num_warps=4,
        )  # fmt: skip
        scores = weighed
    return output, scores
