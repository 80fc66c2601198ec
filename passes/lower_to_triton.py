"""Our operators -> Triton kernels, as operators that Inductor launches itself (`inertia_fx.kernels.triton_ops`).

A layer's momentum update goes into the attention that emits its scores, so that a scored layer is two launches; the
new token's entry is one launch per step. What the kernels do not take (fp64, heads wider than 256) becomes plain aten,
and the report says so.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from ..kernels import reference
from ..kernels.triton import plan
from .check_mask import run_on_a_small_state
from .graph_utils import PassResult, Refusal, Rewrite, ancestors, calls, erase_dead

SCORED, UNSCORED = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default
BLEND = torch.ops.inertia_fx.blend.default


def lower_to_triton(rewrite: Rewrite) -> PassResult:
    """Scored and unscored attention, blends and the entry of the new token; what is skipped is left for `lower` to inline."""
    from ..kernels.triton import ops as triton_ops  # noqa: F401  (defines the operators; needs triton)

    graph, triton = rewrite.graph, torch.ops.inertia_fx
    matched, skipped = [], []
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (SCORED, UNSCORED):
            continue
        scored = node.target is SCORED
        query, key, value = (argument.meta["example_value"] for argument in node.args[:3])
        if (why := plan.refusal(query, key, value)) is not None:
            skipped.append(f"'{node.name}' -> aten (reference): {why}")
            continue
        blend = _blend_of(node) if scored else None
        with graph.inserting_before(node):
            if blend is not None:
                old, _, *weights = blend.args
                new = graph.call_function(triton.triton_blended_attention.default, (*node.args, old, *weights))
                matched.append(f"'{node.name}' and '{blend.name}' -> '{new.name}'")
            else:
                target = triton.triton_scored_attention if scored else triton.triton_slot_attention
                new = graph.call_function(target.default, node.args)
                matched.append(f"'{node.name}' -> '{new.name}'")
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        if blend is not None:
            blend.replace_all_uses_with(blend.args[1])
            graph.erase_node(blend)
    matched += _lower_enter(rewrite)
    return PassResult("lower", tuple(matched), tuple(skipped))


def _blend_of(node: fx.Node) -> fx.Node | None:
    """The blend that alone reads a layer's scores, if the momentum it starts from is known before that layer."""
    scores = [user for user in node.users if calls(user, "", operator.getitem) and user.args[1] == 1]
    if len(scores) != 1 or len(scores[0].users) != 1:
        return None
    (blend,) = scores[0].users
    if blend.target is not BLEND or blend.args[1] is not scores[0]:
        return None
    old = blend.args[0]
    assert isinstance(old, fx.Node)
    return blend if old < node and old is not scores[0] else None


def _lower_enter(rewrite: Rewrite) -> list[str]:
    """The graph's own arithmetic for the new token's entry -> one kernel, where it is what `reference.enter` computes."""
    graph, marker = rewrite.graph, rewrite.marker
    try:
        values = run_on_a_small_state([marker.new_momentum], marker)
    except Refusal:
        return []
    expect = reference.enter(*(values[node] for node in marker.state))
    given = (values[marker.new_momentum], values[marker.new_positions])
    if not all(torch.equal(ours, theirs) for ours, theirs in zip(expect, given, strict=True)):
        return []
    own = {*ancestors(marker.new_momentum), *ancestors(marker.new_positions)}
    first = next(node for node in graph.nodes if node in own and node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        entered = graph.call_function(torch.ops.inertia_fx.triton_enter.default, marker.state)
        momentum = graph.call_function(operator.getitem, (entered, 0))
        positions = graph.call_function(operator.getitem, (entered, 1))
    marker.new_momentum.replace_all_uses_with(momentum)
    marker.new_positions.replace_all_uses_with(positions)
    names = marker.new_momentum.name, marker.new_positions.name
    erase_dead(graph, marker.new_momentum, marker.new_positions)
    return [f"'{names[0]}' and '{names[1]}' -> '{entered.name}'"]
