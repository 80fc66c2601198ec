"""Replace each attention site by our attention operator: the same output, and on a refresh step the pooled scores."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor, fx

from .. import ops  # noqa: F401  (defines the operators)
from .aliasing import erase_dead
from .contract import LAYER, SITE, PassOptions, attention_sites, record_match, record_skip, require_marker
from .nodes import emit

SCORED, UNSCORED = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default


def emit_scores_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace every site by `scored_attention`, whose second result is s [B, S], or by `slot_attention`."""
    graph, marker, sites = gm.graph, require_marker(gm), attention_sites(gm.graph)
    valid = emit(graph, marker.new_positions.next, is_valid, marker.new_positions)
    masks: dict[tuple[fx.Node | None, str], fx.Node] = {}
    for site in sites:
        key = (site.mask, site.mask_kind)
        if key not in masks:
            behind = valid if site.mask is None else site.mask
            masks[key] = emit(graph, behind.next, additive_mask, site.mask, site.mask_kind, valid)
        attend = (site.query, site.key, site.value, masks[key])
        with graph.inserting_before(site.output):
            if _is_scored(site.layer, len(sites), options):
                node = graph.call_function(SCORED, (*attend, valid, site.scale, site.kv_heads, options.scorer))
                output = graph.call_function(operator.getitem, (node, 0))
                scores = graph.call_function(operator.getitem, (node, 1))
                new = [node, output, scores]
                record_match(gm, "with scores", layer=site.layer, node=site.output.name, into=node.name)
            else:
                output = graph.call_function(UNSCORED, (*attend, site.scale, site.kv_heads))
                new = [output]
                why = "the last layer's scores alone count" if options.score else "this step reads no scores"
                record_skip(gm, f"without scores: {why}", layer=site.layer, node=site.output.name, into=output.name)
        for node in new:
            node.meta[LAYER] = site.layer
        site.output.replace_all_uses_with(output)
        del site.output.meta[SITE]
        erase_dead(graph, [site.output])
    return gm


def _is_scored(layer: int, layers: int, options: PassOptions) -> bool:
    """Only layers whose scores can move the momentum are scored."""
    return options.score and (not options.last_layer_alone or layer == layers - 1)


def is_valid(positions: Tensor) -> Tensor:
    """Mark the slots that hold a token: [B, S] bool."""
    return positions >= 0


def additive_mask(mask: Tensor | None, kind: str, valid: Tensor) -> Tensor:
    """Turn a mask into fp32 summands [B or 1, 1, 1, S]; without one, hide the slots that hold no token."""
    if mask is None:
        return torch.where(valid, 0.0, -math.inf)[:, None, None, :]
    if kind == "hide":
        return torch.where(mask, -math.inf, 0.0)
    return torch.where(mask, 0.0, -math.inf) if kind == "keep" else mask.float()
