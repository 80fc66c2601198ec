"""Replace the arithmetic by which the new token enters the state by the target's kernel, where there is one."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from ..kernels import reference, targets
from .aliasing import erase_dead
from .contract import PassOptions, Refusal, record_match, record_skip, require_marker
from .nodes import ancestors
from .slices import Slicer
from .small_states import Runner, SmallState


def lower_enter_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace the traced entry of the new token by one kernel, if it is what `reference.enter` computes."""
    graph, marker = gm.graph, require_marker(gm)
    target = targets.target_for(marker.device.type, options.backend)
    traced = marker.new_momentum, marker.new_positions
    if target.enter is None:
        record_skip(gm, f"the inner compiler fuses the traced arithmetic ({target.name})", node=traced[0].name)
        return gm
    try:
        piece = Slicer(graph, marker).cut(traced, marker.node)
        runner = Runner(marker, SmallState(slots=8, seed=5), torch.float32, wide=False)
        values = runner.run(piece, runner.draw(piece))
    except Refusal as refusal:
        record_skip(gm, f"left as traced: {refusal.reason}", node=traced[0].name)
        return gm
    expect = reference.enter(*(values[node] for node in marker.state))
    if not all(torch.equal(values[node], tensor) for node, tensor in zip(traced, expect, strict=True)):
        record_skip(gm, "left as traced: the new token enters in a way of its own", node=traced[0].name)
        return gm
    own = {*ancestors(traced[0]), *ancestors(traced[1])}
    first = next(node for node in graph.nodes if node in own and node.op not in ("placeholder", "get_attr"))
    with graph.inserting_before(first):
        kernel = graph.call_function(target.enter, marker.state)
        for place, node in enumerate(traced):
            new = graph.call_function(operator.getitem, (kernel, place))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
    record_match(gm, f"with '{traced[1].name}' in it ({target.name})", node=traced[0].name, into=kernel.name)
    erase_dead(graph, traced)
    return gm
