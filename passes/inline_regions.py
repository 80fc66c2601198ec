"""Regions that are in the graph already (`torch.compiler.nested_compile_region`) -> the nodes they are made of.

The other passes read one flat graph, so that an attention is found wherever it stands; `outline_layers` makes regions
again of what is equal, with the scores and the momentum in them.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from .graph_utils import find_marker


def has_marker(gm: fx.GraphModule) -> bool:
    """Whether a graph is a decode step, be the marker in a region."""
    return any(find_marker(part.graph) is not None for part in gm.modules() if isinstance(part, fx.GraphModule))


def inline_regions(gm: fx.GraphModule) -> None:
    """Put the nodes of every region in the place of its calls. Each call gets its own."""
    calls = list(gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph))
    attributes = dict.fromkeys(call.args[0] for call in calls)
    for attribute in attributes:
        inline_regions(getattr(gm, attribute.target))
    for call in calls:
        _inline(gm, call)
    for attribute in attributes:
        if not attribute.users:
            gm.graph.erase_node(attribute)
    for name in {attribute.target for attribute in attributes}:
        if not gm.graph.find_nodes(op="get_attr", target=name):
            delattr(gm, name)


def _inline(gm: fx.GraphModule, call: fx.Node) -> None:
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
