"""The first eviction: which tokens each row keeps, and what happens to their momentum before.

Later evictions are one token per row and step, chosen in the compiled step (`kernels.reference.next_free`). As in
`storage`, how many tokens a row keeps is handed in and nothing waits for the device. B rows, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels.reference import is_protected, next_free
from .storage import CLOSED, DEAD, RetentionState, column

_POSITION_MAX = torch.iinfo(torch.int64).max
"""Sorts behind every position."""


def text_order(state: RetentionState, alive: Tensor) -> Tensor:
    """Sort slots by position: [B, S] slot indices in the order of the text, slots that are not `alive` behind them."""
    return torch.where(alive, state.positions, _POSITION_MAX).argsort(dim=1)


def survivors(state: RetentionState, keep: Sequence[int], protect_first: int, protect_recent: int) -> Tensor:
    """Choose each row's top tokens by (momentum, position) (SPEC D7).

    Args:
        keep: tokens that stay, per row.
        protect_first, protect_recent: tokens at either end of the text that stay in any case.

    Returns:
        [B, max(keep)] slot indices in text order, padded at the end of rows that keep fewer.
    """
    alive = state.positions >= 0
    held = is_protected(state.positions, state.length - 1, protect_first, protect_recent)
    known = alive & ~state.momentum.isnan()  # a momentum that is not a number goes first, as in next_free
    rank = torch.where(held, CLOSED, torch.where(known, state.momentum, DEAD))
    kept = _sortable(rank, state.positions).topk(max(keep), dim=1).indices
    survives = torch.arange(kept.shape[1], device=kept.device) < column(keep, kept)
    return kept.gather(1, torch.where(survives, state.positions.gather(1, kept), _POSITION_MAX).argsort(dim=1))


def _sortable(momentum: Tensor, positions: Tensor) -> Tensor:
    """int64 in the order of (momentum, position): of equal momentum the oldest is the smallest (SPEC D7), and no two tie.

    A float's bits order like an integer's, those of negative numbers in reverse; adding 0 makes -0 and 0 the same.
    """
    bits = (momentum + 0.0).view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) | (positions + 1)


def pool(state: RetentionState, width: int, rows: Sequence[bool], protect_first: int, protect_recent: int) -> None:
    """Pool momentum in these rows: the largest within (width - 1) / 2 places in text order (SPEC D19)."""
    alive = state.positions >= 0
    order = text_order(state, alive)
    momentum = torch.where(alive, state.momentum, DEAD).gather(1, order).unsqueeze(1)
    pooled = torch.nn.functional.max_pool1d(momentum, width, stride=1, padding=width // 2).squeeze(1)
    pooled = torch.empty_like(pooled).scatter_(1, order, pooled)
    chosen = column(rows, alive)
    state.momentum.copy_(torch.where(chosen & alive, pooled, state.momentum))
    free = next_free(state.momentum, state.positions, state.length - 1, protect_first, protect_recent)
    state.free.copy_(torch.where(chosen.squeeze(1), free, state.free))
