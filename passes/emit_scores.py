"""Attention site -> our attention operator: the same output, and (on a refresh step) the pooled scores s of the layer."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from .graph_utils import PassResult, Rewrite, dtype_of, erase_dead


def emit_scores(rewrite: Rewrite) -> PassResult:
    """Replace every site; fill `rewrite.scores` with one [B, S] node per scored layer, in the cache's order."""
    graph, marker, options = rewrite.graph, rewrite.marker, rewrite.options
    rewrite.live = rewrite.emit(marker.new_positions.next, _is_live, marker.new_positions)
    masks: dict[fx.Node | None, fx.Node] = {}
    matched, skipped, scores = [], [], []
    for site in rewrite.sites:
        if site.mask not in masks:
            masks[site.mask] = _additive(rewrite, site.mask)
        attend = (site.query, site.key, site.value, masks[site.mask])
        with graph.inserting_before(site.output):
            if _is_scored(rewrite, site.layer):
                node = graph.call_function(
                    torch.ops.inertia_fx.scored_attention.default,
                    (*attend, rewrite.live, site.scale, site.kv_heads, options.scorer),
                )
                output = graph.call_function(operator.getitem, (node, 0))
                scores.append(graph.call_function(operator.getitem, (node, 1)))
                matched.append(f"layer {site.layer}: '{site.output.name}' -> '{node.name}' with scores")
            else:
                output = graph.call_function(
                    torch.ops.inertia_fx.slot_attention.default, (*attend, site.scale, site.kv_heads)
                )
                why = "the last layer's scores alone count" if options.score else "this step reads no scores"
                skipped.append(f"layer {site.layer}: '{site.output.name}' -> '{output.name}' without scores: {why}")
        site.output.replace_all_uses_with(output)
        erase_dead(graph, site.output)
    rewrite.scores = tuple(scores)
    return PassResult("emit_scores", tuple(matched), tuple(skipped))


def _additive(rewrite: Rewrite, mask: fx.Node | None) -> fx.Node:
    """The mask as fp32 summands; without one, the live slots: dead ones are never attended to."""
    if mask is None:
        assert rewrite.live is not None
        return rewrite.emit(rewrite.live.next, _from_live, rewrite.live)
    return rewrite.emit(mask.next, _from_bool if dtype_of(mask) == torch.bool else _from_float, mask)


def _from_live(live: Tensor) -> Tensor:
    return torch.where(live, 0.0, -math.inf)[:, None, None, :]


def _is_scored(rewrite: Rewrite, layer: int) -> bool:
    """Only layers whose scores can move the momentum are scored."""
    if not rewrite.options.score:
        return False
    return not rewrite.options.last_layer_alone or layer == len(rewrite.sites) - 1


def _is_live(positions: Tensor) -> Tensor:
    return positions >= 0


def _from_bool(mask: Tensor) -> Tensor:
    return torch.where(mask, 0.0, -math.inf)


def _from_float(mask: Tensor) -> Tensor:
    return mask.float()
