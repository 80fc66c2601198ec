"""Is a mask the liveness of the slots, and nothing else? Answered by where it comes from, and by running it.

What a mask's graph *says* can be spelled in many ways (bool or additive, `where`, `masked_fill`, casts, arithmetic), so
it is not matched but tried out on a small state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ..errors import PositionBiasError
from .graph_utils import Marker, Refusal, ancestors, shape_of


def check_mask(mask: Any, marker: Marker) -> fx.Node:
    """The mask's node, [B or 1, 1, 1, S].

    Raises:
        Refusal: it is missing, depends on more than the retention state, or is not the liveness of the slots.
    """
    if not isinstance(mask, fx.Node):
        raise Refusal(f"its mask is {mask!r}, not a tensor")
    sources = [node for node in ancestors(mask) if node.op in ("placeholder", "get_attr")]
    foreign = [node for node in sources if node not in marker.state and shape_of(node) is not None]
    if foreign:
        raise Refusal(
            f"what is added to its logits depends on '{foreign[0].name}': a bias by position (ALiBi, relative positions)"
            " would be wrong once slots are not in text order",
            PositionBiasError,
        )
    shape = shape_of(mask)
    if shape is None or len(shape) != 4 or shape[1] != 1 or shape[2] != 1:
        raise Refusal(f"its mask has shape {shape} where [batch, 1, 1, slots] was expected")
    values = run_on_a_small_state([mask], marker)
    shown = values[mask].cpu()
    expect = (values[marker.new_positions] >= 0)[:, None, None, :].cpu()
    if shown.dtype == torch.bool:
        right = torch.equal(shown.expand_as(expect), expect)
    else:
        hidden = torch.where(expect, shown, 0)
        right = bool((hidden == 0).all()) and bool((torch.where(expect, -math.inf, shown.float()) < -1e4).all())
    if not right:
        raise Refusal(
            "its mask is not the liveness of the slots (tried on a small state): a window, a causal rule or a bias that"
            " depends on positions, or no mask at all"
        )
    return mask


def run_on_a_small_state(targets: Sequence[fx.Node], marker: Marker) -> dict[fx.Node, Any]:
    """Run what `targets` and the state with the new token in it are computed from; returns every node's value.

    The state is such that slot order is not text order, so a window, a causal rule or a bias by position shows.

    Raises:
        Refusal: something they are computed from is not part of the retention state, or cannot be run.
    """
    slots = 8
    batch = shape_of(marker.free)
    # A symbolic batch size must not be turned into a number: that would compile the step for this batch size alone.
    rows = batch[0] if batch is not None and isinstance(batch[0], int) else 2
    positions = torch.tensor([[40, -1, 3, 0, 41, 7, -1, 39]]).repeat(rows, 1)
    values: dict[fx.Node, Any] = {
        marker.positions: positions,
        marker.momentum: torch.tensor([[0.5, -math.inf, 0.75, 0.5, 0.125, 0.5, math.inf, 2.0]]).repeat(rows, 1),
        marker.free: torch.full((rows,), 1),
        marker.length: torch.full((rows,), 42),
    }
    sizes = {str(size): number for size, number in zip(shape_of(marker.positions) or (), (rows, slots), strict=False)}
    needed = set(ancestors(marker.new_positions)).union(*map(ancestors, targets))
    for node in marker.node.graph.nodes:
        if node not in needed or node in values:
            continue
        if node.op == "placeholder":
            size = node.meta.get("example_value")
            if not isinstance(size, (int, torch.SymInt)):
                raise Refusal(f"its mask depends on '{node.name}', which is not part of the retention state")
            values[node] = sizes.get(str(size), size if isinstance(size, int) else size.node.hint)
            continue
        try:
            values[node] = _run_node(node, values)
        except Exception as failure:
            raise Refusal(f"its mask could not be checked at '{node.name}': {failure}") from failure
    return values


def _run_node(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = dict(fx.node.map_arg(node.kwargs, values.__getitem__))
    if "device" in kwargs:
        kwargs["device"] = "cpu"
    with torch.no_grad():
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert node.op == "call_function" and callable(node.target), f"a node of kind {node.op}"
        return node.target(*args, **kwargs)
