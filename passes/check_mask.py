"""Is a mask the validity of the slots, and nothing else? Answered by where it comes from, and by running it.

What a mask's graph *says* can be spelled in many ways (bool or additive, `where`, `masked_fill`, casts, arithmetic), so
it is not matched but run, on a handful of slots and on more than any window is wide.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import PositionBiasError
from .contract import Marker, Refusal
from .nodes import ancestors, describe, shape_of
from .slices import Slicer
from .small_states import Runner, SmallState

STATES = (
    SmallState(slots=8, seed=0),
    SmallState(slots=140_000, seed=1),
    SmallState(slots=9, seed=2, text=9),
)
"""What masks are tried on. The second has more slots than windows are wide, and positions 10^6 apart; the third is short."""

HIDDEN = -1e4
"""What hides a slot is not above this: logits of slots that are attended to may well be negative."""


def check_mask(mask: fx.Node, kind: str, end: fx.Node, marker: Marker, slicer: Slicer) -> None:
    """Check that a mask hides the slots without a token, and only those.

    Args:
        mask: [B or 1, 1, 1, S].
        kind: "add", "keep" or "hide", as in :class:`AttentionSite`.
        end: the attention's output: writes into the mask before it count.

    Raises:
        Refusal: it depends on more than the retention state, or is not the validity of the slots.
    """
    if slicer.is_foreign(mask):
        tensors = [node for node in ancestors(mask) if node.op == "placeholder" and slicer.is_foreign(node)]
        raise Refusal(
            f"what is added to its logits depends on '{tensors[0].name}': a bias by position (ALiBi, relative positions)"
            " would be wrong once slots are not in text order",
            PositionBiasError,
        )
    shape = shape_of(mask)
    if shape is None or len(shape) != 4 or shape[1] != 1 or shape[2] != 1:
        raise Refusal(f"its mask has shape {shape} where [batch, 1, 1, slots] was expected")
    piece = slicer.cut([mask, marker.new_positions], end)
    for state in STATES:
        runner = Runner(marker, state, torch.float32, wide=False)
        values = runner.run(piece, runner.draw(piece))
        valid = (values[marker.new_positions] >= 0)[:, None, None, :]
        if not _hides(values[mask], kind, valid):
            raise Refusal(
                "its mask is not the validity of the slots (tried on a small state): a window, a causal rule or a bias"
                " that depends on positions, or no mask at all"
            )


def check_fill(fill: Any, end: fx.Node, slicer: Slicer) -> None:
    """Check that what is filled in for the logits of hidden slots hides them whatever the other logits are.

    Raises:
        Refusal: it is too large, or no constant.
    """
    if isinstance(fill, fx.Node):
        if slicer.is_foreign(fill):
            raise Refusal(f"its hidden slots get logits that are computed, by {describe(fill)}")
        runner = Runner(slicer.marker, STATES[0], torch.float32, wide=False)
        piece = slicer.cut([fill], end)
        fill = runner.run(piece, runner.draw(piece))[fill]
    largest = torch.as_tensor(fill).max().item()
    if not largest <= HIDDEN:  # nor is NaN
        raise Refusal(f"its hidden slots get the logit {largest:g}, which attended ones may fall below")


def _hides(mask: Tensor, kind: str, valid: Tensor) -> bool:
    """Whether a mask's value hides all but the valid slots."""
    try:
        mask = mask.expand_as(valid)
    except RuntimeError:
        return False
    if kind != "add":
        return torch.equal(mask if kind == "keep" else ~mask, valid) if mask.dtype == torch.bool else False
    attended = torch.where(valid, mask.float(), 0.0)
    hidden = torch.where(valid, -math.inf, mask.float())
    return bool((attended == 0).all()) and bool((hidden <= HIDDEN).all())
