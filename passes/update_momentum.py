"""Chain the momentum through the scored layers: m = alpha m + (1 - alpha) s, in the cache's order (paper eq. 4)."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from .. import ops  # noqa: F401  (defines `inertia_fx::blend`)
from .contract import LAYER, PassOptions, record_match, record_skip, require_marker
from .emit_scores import SCORED


def update_momentum_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Make the step's final momentum the marker's operand; slots without a token keep their marks."""
    marker, scores = require_marker(gm), scores_of(gm.graph)
    if not scores:
        record_skip(gm, "no layer emits scores on this step: the momentum is frozen")
        return gm
    layers = len(marker.keys)
    time = options.alpha_time
    moved: fx.Node = marker.new_momentum
    if options.last_layer_alone:
        if options.aggregator == "single_step":
            time = 0.0
        elif time is None:
            time = options.alpha**layers
        rule = f"m = {time:.6g} m + {1 - time:.6g} s of the last layer"
        moved = _blend(scores[-1], moved, scores[-1], time, 1 - time)
    elif options.aggregator == "cumulative":
        rule = "m = m + s per layer"
        for score in scores:
            moved = _blend(score, moved, score, 1.0, 1.0)
    elif time is None and options.alpha_layer is None:
        rule = f"m = {options.alpha:.6g} m + {1 - options.alpha:.6g} s per layer"
        for score in scores:
            moved = _blend(score, moved, score, options.alpha, 1 - options.alpha)
    else:
        # Horner's scheme: sum_l w^(K-l) s_l, then one step of the filter over time.
        weight = options.alpha if options.alpha_layer is None else options.alpha_layer
        time = options.alpha**layers if time is None else time
        weights = sum(weight**power for power in range(layers))
        rule = f"m = {time:.6g} m + {1 - time:.6g} mean of s, layers weighted by {weight:.6g}^(K - l)"
        total = scores[0]
        for score in scores[1:]:
            total = _blend(score, total, score, weight, 1.0)
        moved = _blend(total, moved, total, time, (1 - time) / weights)
    # At the end of the step, so that the last layer reads like the others (see outline_layers).
    marker.set_momentum(moved)
    record_match(gm, f"{len(scores)} of {layers} layers: {rule}", into=moved.name)
    return gm


def scores_of(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """Collect the scores s [B, S] that the graph's attention emits, in the cache's order."""
    found = [
        user
        for node in graph.find_nodes(op="call_function", target=SCORED)
        for user in node.users
        if user.target is operator.getitem and user.args[1] == 1
    ]
    return tuple(sorted(found, key=lambda node: node.meta[LAYER]))


def _blend(after: fx.Node, old: fx.Node, new: fx.Node, old_weight: float, new_weight: float) -> fx.Node:
    """An operator, and not its arithmetic, so that `lower_pass` can fold it into the attention that emits `new`."""
    with after.graph.inserting_after(after):
        node = after.graph.call_function(torch.ops.inertia_fx.blend.default, (old, new, old_weight, new_weight))
    node.meta[LAYER] = new.meta[LAYER]
    return node
