"""Replace our operators by what the target computes them with: kernels, or plain aten that the inner compiler fuses.

On CUDA and ROCm devices a layer's momentum update goes into the attention that emits its scores, so that a scored layer
is two launches. What the kernels do not take (fp64, heads wider than 256)
becomes plain aten, and the report says so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .. import ops  # noqa: F401  (defines the operators named below)
from ..kernels import cpu, reference, targets
from .contract import LAYER, PassOptions, record_match, record_skip, require_marker
from .emit_scores import SCORED, UNSCORED
from .nodes import calls, emit, replace

BLEND = torch.ops.inertia_fx.blend.default

_MASK, _VALID = 3, 4
"""Places of the mask and, where scores are read, of the validity among the attention operators' arguments."""


def lower_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace attention and momentum updates by the target's kernels or by plain aten."""
    target = targets.target_for(require_marker(gm).device.type, options.backend)
    _write_masks_once(gm.graph, target)
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target in (SCORED, UNSCORED):
            _lower_attention(gm, node, target)
    for node in list(gm.graph.find_nodes(op="call_function", target=BLEND)):
        replace(gm.graph, node, emit(gm.graph, node, reference.blend, *node.args, layer=node.meta.get(LAYER)))
    return gm


def _write_masks_once(graph: fx.Graph, target: targets.Target) -> None:
    """Into memory, for all layers: Inductor would compute them anew in every loop, or write them for every kernel."""
    written: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in (SCORED, UNSCORED):
            continue
        for place, name in ((_MASK, "mask"), (_VALID, "valid")):
            if name not in target.masks_in_memory or (name == "valid" and node.target is UNSCORED):
                continue
            mask = node.args[place]
            if mask not in written:  # beside the mask, so that the first layer reads like the others
                written[mask] = emit(graph, mask.next, cpu.materialize, mask)
            node.update_arg(place, written[mask])


def _lower_attention(gm: fx.GraphModule, node: fx.Node, target: targets.Target) -> None:
    graph, layer, scored = gm.graph, node.meta.get(LAYER), node.target is SCORED
    query, key, value = (argument.meta["example_value"] for argument in node.args[:3])  # type: ignore[union-attr]
    where = {"layer": layer, "node": node.name}
    blend = _blend_of(node) if scored and target.blended_attention is not None else None
    if (why := target.refusal(query, key, value)) is not None:
        record_skip(gm, f"aten (reference): {why}", **where)
        target, blend = targets.REFERENCE, None
    elif blend is not None:
        old, _, *weights = blend.args
        new = emit(graph, node, target.blended_attention, *node.args, old, *weights, layer=layer)
        record_match(gm, f"with '{blend.name}' in it ({target.name})", into=new.name, **where)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
        momentum = blend.args[1]
        assert isinstance(momentum, fx.Node)
        blend.replace_all_uses_with(momentum)
        graph.erase_node(blend)
        return
    else:
        record_match(gm, f"{'kernel' if target.enter else 'aten'} ({target.name})", **where)
    replace(graph, node, emit(graph, node, target.attention(scored, query, key), *node.args, layer=layer))


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
