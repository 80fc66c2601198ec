"""Attention that reads like attention and is something else, by kind: each is equal to the traced step, or refused.

Each is ``(q, k, v, live, extra) -> output``, as in `inertia_fx.verify.testing.decoders.FORMS`, for 4 query and 2 KV heads
of width 8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 1 / math.sqrt(8)


def repeat(x: Tensor, heads: int = 4) -> Tensor:
    rows, kv, slots, width = x.shape
    return x[:, :, None].expand(rows, kv, heads // kv, slots, width).reshape(rows, heads, slots, width)


def hidden(live: Tensor) -> Tensor:
    return torch.where(live, 0.0, torch.finfo(torch.float32).min)


def logits_of(q: Tensor, k: Tensor, live: Tensor) -> Tensor:
    return q @ repeat(k).mT * SCALE + hidden(live)


def sdpa(q: Tensor, k: Tensor, v: Tensor, live: Tensor, **more: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live, enable_gqa=True, **more)


# ---------------------------------------------------------------------- written through a view


def select_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.select(logits, -1, 0).fill_(-1e9)
    return F.softmax(logits, -1) @ repeat(v)


def transposed_attribute(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    logits.mT[:, :, 0].fill_(-1e9)
    return F.softmax(logits, -1) @ repeat(v)


def chunk_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.chunk(logits, 2, 1)[0].mul_(0.1)
    return F.softmax(logits, -1) @ repeat(v)


def mask_through_select(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = live.clone()
    torch.select(mask, -1, 0).fill_(False)
    return sdpa(q, k, v, mask)


def narrow_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.narrow(logits, 1, 0, 2).mul_(0.5)
    return F.softmax(logits, -1) @ repeat(v)


def movedim_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.movedim(logits, 3, 0)[0].sub_(5)
    return F.softmax(logits, -1) @ repeat(v)


def diagonal_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.diagonal(logits, 0, 1, 3).add_(3)
    return F.softmax(logits, -1) @ repeat(v)


def view_of_view(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.unbind(torch.swapaxes(logits, 1, 3)[:, 1], 1)[0].zero_()
    return F.softmax(logits, -1) @ repeat(v)


def unsafe_view_of_weights(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    weights = F.softmax(logits_of(q, k, live), -1)
    torch.atleast_1d(weights).mul_(0.5)
    return weights @ repeat(v)


def split_weights(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    weights = F.softmax(logits_of(q, k, live), -1)
    weights.tensor_split(2, 1)[1].mul_(2)
    return weights @ repeat(v)


def mask_through_real(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    mask = hidden(live)
    torch.real(mask)[..., 0] = -1e9
    return F.softmax(q @ repeat(k).mT * SCALE + mask, -1) @ repeat(v)


# ---------------------------------------------------------------------- written by what does not look like it


def overload(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.ops.aten.mul_.Scalar(logits, 0.1)
    return F.softmax(logits, -1) @ repeat(v)


def packet(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.ops.aten.clamp_(logits, -0.1, 0.1)
    return F.softmax(logits, -1) @ repeat(v)


def relu_in_place(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    F.relu(logits, True)
    return F.softmax(logits, -1) @ repeat(v)


def out_argument(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.mul(logits, 0.1, out=logits)
    return F.softmax(logits, -1) @ repeat(v)


def foreach(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch._foreach_mul_([logits], 0.1)
    return F.softmax(logits, -1) @ repeat(v)


def augmented(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = q @ repeat(k).mT * SCALE
    logits += hidden(live)
    logits *= 0.3
    return F.softmax(logits, -1) @ repeat(v)


def copy_function(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    torch.ops.aten.copy_.default(logits, logits * 0.1)
    return F.softmax(logits, -1) @ repeat(v)


# ---------------------------------------------------------------------- inputs written on the way


def query_zeroed(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    q = q * 1.0
    logits = logits_of(q, k, live)
    q.mul_(0.0)
    return F.softmax(logits, -1) @ repeat(v)


def keys_grown(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    k.mul_(1.001)
    return F.softmax(logits, -1) @ repeat(v)


def values_shifted(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    repeated = repeat(v)
    logits = logits_of(q, k, live)
    v[..., 0].add_(1.0)
    return F.softmax(logits, -1) @ repeated


def memory_behind_the_query(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    base = q * 1.0
    q = base.view(base.shape)
    logits = logits_of(q, k, live)
    base.view(-1).fill_(0.5)
    return F.softmax(logits, -1) @ repeat(v)


def one_slot_of_the_keys(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = logits_of(q, k, live)
    k.select(2, 1).mul_(1.5)
    return F.softmax(logits, -1) @ repeat(v)


def keys_read_before_they_change(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    early = repeat(k)
    k.mul_(0.5)
    return F.softmax(q @ early.mT * SCALE + hidden(live), -1) @ repeat(v)


# ---------------------------------------------------------------------- casts that change values


def keys_through_fp8(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return sdpa(q, k.to(torch.float8_e4m3fn).to(k.dtype), v, live)


def values_through_half(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax(logits_of(q, k, live), -1) @ repeat(v.to(torch.float16).float())


def weights_through_bfloat16(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax(logits_of(q, k, live), -1).to(torch.bfloat16).to(v.dtype) @ repeat(v)


def query_through_int(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return sdpa(q.to(torch.int32).to(q.dtype), k, v, live)


def logits_through_half(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax(logits_of(q, k, live).type(torch.bfloat16).float(), -1) @ repeat(v)


# ---------------------------------------------------------------------- arguments that nobody read


def floor_division(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = torch.div(q @ repeat(k).mT, math.sqrt(8), rounding_mode="floor")
    return F.softmax(logits + hidden(live), -1) @ repeat(v)


def truncated_division(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = (q @ repeat(k).mT).div(0.25, rounding_mode="trunc")
    return F.softmax(logits + hidden(live), -1) @ repeat(v)


def uneven_groups(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    times = torch.tensor([3, 1])
    k, v = (x.repeat_interleave(times, dim=1, output_size=4) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live)


def other_groups_for_values(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    keys = k.repeat_interleave(torch.tensor([2, 2]), dim=1, output_size=4)
    values = v.repeat_interleave(torch.tensor([1, 3]), dim=1, output_size=4)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=live)


def masked_with_little(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax((q @ repeat(k).mT * SCALE).masked_fill(~live, -1.0), -1) @ repeat(v)


def softmax_in_another_dtype(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax(logits_of(q, k, live), -1, dtype=torch.bfloat16).to(v.dtype) @ repeat(v)


def named_arguments(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = torch.mul(input=q @ repeat(k).mT, other=SCALE)
    return F.softmax(torch.add(input=logits, other=hidden(live)), -1) @ repeat(v)


def contiguous_in_another_format(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    k = k.contiguous(memory_format=torch.channels_last)
    return F.softmax(logits_of(q, k, live), -1) @ repeat(v)


# ---------------------------------------------------------------------- windows and rules wider than a small state


def window_of_slots(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    near = torch.arange(k.shape[2]) >= k.shape[2] - 16
    return sdpa(q, k, v, live & near)


def window_of_thousands(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return sdpa(q, k, v, live & (torch.arange(k.shape[2]) < 5000))


def window_of_positions(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    near = extra["positions"] > extra["positions"].amax(1, keepdim=True) - 4096
    return sdpa(q, k, v, live & near[:, None, None])


def even_slots(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return sdpa(q, k, v, live & (torch.arange(k.shape[2]) != 77))


def far_positions(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return sdpa(q, k, v, live & (extra["positions"] < 900_000)[:, None, None])


def bias_of_the_far(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    bias = hidden(live) - (extra["positions"] // 100_000)[:, None, None] * 1.0
    return F.softmax(q @ repeat(k).mT * SCALE + bias, -1) @ repeat(v)


# ---------------------------------------------------------------------- right, spelled otherwise


def einsum(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = torch.einsum("bhqd,bhkd->bhqk", q, repeat(k)) * SCALE
    return torch.einsum("bhqk,bhkd->bhqd", F.softmax(logits + hidden(live), -1), repeat(v))


def masked_fill(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = (SCALE * (q @ repeat(k).mT)).masked_fill(live.logical_not(), float("-inf"))
    return torch.softmax(input=logits, dim=-1).matmul(repeat(v))


def where(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = torch.where(live, q @ repeat(k).transpose(-1, -2) / math.sqrt(8), -1e30)
    return logits.softmax(dim=-1) @ repeat(v)


def scaled_twice(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    logits = 2.0 * ((q @ repeat(k).permute(0, 1, 3, 2)) * (SCALE / 2))
    return F.softmax(hidden(live) + logits, -1) @ repeat(v)


def query_scaled(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    return F.softmax((q * SCALE) @ repeat(k).mT + hidden(live), -1) @ repeat(v)


def query_written_into(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    q = q.contiguous().clone()
    q[..., 0] = 0
    return sdpa(q, k, v, live)


def unsqueezed(q, k, v, live, extra):  # type: ignore[no-untyped-def]
    k, v = (x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
    return F.softmax(q @ k.swapaxes(-2, -1) * SCALE + hidden(live), -1) @ v


KINDS: dict[str, tuple[Any, ...]] = {
    "written through a view": (
        select_function, transposed_attribute, chunk_function, mask_through_select, narrow_function, movedim_function,
        diagonal_function, view_of_view, unsafe_view_of_weights, split_weights, mask_through_real,
    ),
    "written by what does not look like it": (
        overload, packet, relu_in_place, out_argument, foreach, augmented, copy_function,
    ),
    "inputs written on the way": (
        query_zeroed, keys_grown, values_shifted, memory_behind_the_query, one_slot_of_the_keys,
        keys_read_before_they_change,
    ),
    "casts that change values": (
        keys_through_fp8, values_through_half, weights_through_bfloat16, logits_through_half,
    ),
    "arguments that nobody read": (
        floor_division, truncated_division, uneven_groups, other_groups_for_values, masked_with_little,
        softmax_in_another_dtype,
    ),
    "windows wider than a small state": (
        window_of_slots, window_of_thousands, window_of_positions, even_slots, far_positions, bias_of_the_far,
    ),
}  # fmt: skip
"""All of these have to be refused."""

SPELLINGS = (
    named_arguments, contiguous_in_another_format, einsum, masked_fill, where, scaled_twice, query_scaled, unsqueezed,
    query_through_int, query_written_into,
)  # fmt: skip
"""All of these have to be matched, and equal to the step as traced."""
