"""Regions that are in the graph already (`torch.compiler.nested_compile_region`) -> the nodes they are made of.

The other passes read one flat graph, so that an attention is found wherever it stands; `outline_layers` makes regions
again of what is equal, with the scores and the momentum in them.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from .contract import Marker, PassOptions, find_marker, record_match


def marker_in(gm: fx.GraphModule) -> Marker | None:
    """Find the marker of a decode step, be it in a region; ``None`` if the graph is none."""
    markers = (find_marker(part.graph) for part in gm.modules() if isinstance(part, fx.GraphModule))
    return next((marker for marker in markers if marker is not None), None)


def inline_regions_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Put the nodes of every region in the place of its calls. Each call gets its own."""
    for name in _inline_all(gm):
        record_match(gm, "inlined", node=name)
    return gm


def _inline_all(gm: fx.GraphModule) -> list[str]:
    calls: list[Any] = list(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph))
    attributes = dict.fromkeys(call.args[0] for call in calls)
    names = [call.name for call in calls]
    for attribute in attributes:
        _inline_all(getattr(gm, attribute.target))
    for call in calls:
        _inline(gm, call)
    for attribute in attributes:
        if not attribute.users:
            gm.graph.erase_node(attribute)
    for name in {attribute.target for attribute in attributes}:
        if not gm.graph.find_nodes(op="get_attr", target=name):
            delattr(gm, name)
    return names


def _inline(gm: fx.GraphModule, call: Any) -> None:
    attribute, _, *operands = call.args
    region = getattr(gm, attribute.target)
    values: dict[fx.Node, fx.Node] = dict(zip(region.graph.find_nodes(op="placeholder"), operands, strict=True))
    with gm.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            values[node] = gm.graph.node_copy(node, values.__getitem__)
            if node.op == "get_attr":
                name = f"{attribute.target}_{node.target}"
                if not hasattr(gm, name):
                    setattr(gm, name, getattr(region, node.target))
                values[node].target = name
    results = region.graph.output_node().args[0]
    for user in list(call.users):
        assert user.target is operator.getitem, f"'{user.name}' takes the results of a region as a whole"
        result = results[user.args[1]]
        user.replace_all_uses_with(values[result] if isinstance(result, fx.Node) else result)
        gm.graph.erase_node(user)
    gm.graph.erase_node(call)
