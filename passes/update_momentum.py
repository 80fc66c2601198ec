"""Chain the momentum through the scored layers: m = alpha m + (1 - alpha) s, in the cache's order (paper eq. 4)."""

from __future__ import annotations

import torch
from torch import fx

from .. import ops  # noqa: F401  (defines `inertia_fx::blend`)
from .graph_utils import PassResult, Rewrite


def update_momentum(rewrite: Rewrite) -> PassResult:
    """Fill `rewrite.momentum` with the step's final momentum; dead and closed slots keep their marks."""
    options, scores = rewrite.options, rewrite.scores
    rewrite.moved = rewrite.momentum = rewrite.marker.new_momentum
    if not scores:
        return PassResult("update_momentum", (), ("no layer emits scores on this step: the momentum is frozen",))
    layers = len(rewrite.sites)
    time = options.alpha_time
    if options.last_layer_alone:
        if options.aggregator == "single_step":
            time = 0.0
        elif time is None:
            time = options.alpha**layers
        rule, moved = f"m = {time:.6g} m + {1 - time:.6g} s of the last layer", rewrite.momentum
        moved = _blend(rewrite, scores[-1], moved, scores[-1], time, 1 - time)
    elif options.aggregator == "cumulative":
        rule, moved = "m = m + s per layer", rewrite.momentum
        for score in scores:
            moved = _blend(rewrite, score, moved, score, 1.0, 1.0)
    elif time is None and options.alpha_layer is None:
        rule, moved = f"m = {options.alpha:.6g} m + {1 - options.alpha:.6g} s per layer", rewrite.momentum
        for score in scores:
            moved = _blend(rewrite, score, moved, score, options.alpha, 1 - options.alpha)
    else:
        # Horner's scheme: sum_l w^(K-l) s_l, then one step of the filter over time.
        weight = options.alpha if options.alpha_layer is None else options.alpha_layer
        time = options.alpha**layers if time is None else time
        weights = sum(weight**power for power in range(layers))
        rule = f"m = {time:.6g} m + {1 - time:.6g} mean of s, layers weighted by {weight:.6g}^(K - l)"
        total = scores[0]
        for score in scores[1:]:
            total = _blend(rewrite, score, total, score, weight, 1.0)
        moved = _blend(rewrite, total, rewrite.momentum, total, time, (1 - time) / weights)
    rewrite.moved = moved
    # At the end of the step, so that the last layer reads like the others (see outline_layers).
    rewrite.momentum = rewrite.emit(rewrite.marker.node, torch.where, rewrite.live, moved, rewrite.momentum)
    return PassResult("update_momentum", (f"{len(scores)} of {layers} layers: {rule}",))


def _blend(
    rewrite: Rewrite, after: fx.Node, old: fx.Node | None, new: fx.Node, old_weight: float, new_weight: float
) -> fx.Node:
    """An operator, and not its arithmetic, so that `lower` can fold it into the attention that emits `new`."""
    with rewrite.graph.inserting_after(after):
        return rewrite.graph.call_function(torch.ops.inertia_fx.blend.default, (old, new, old_weight, new_weight))
