r"""Equal layers -> one subgraph that the inner compiler compiles once and every layer calls (`invoke_subgraph`).

A decode step repeats the same nodes once per layer, and compiling them once per layer is most of what the first step
takes. Layers are told apart by their slot writes, and one layer ends where the last one stops being like the others:

    | query, key, value | write K[0], V[0] | attend, project, feed forward | query, key, value | write K[1], V[1] | ...
      \__________________________ layer 0 ________________________________/ \____________________ layer 1 _____ ...

Layers are equal if their nodes are (targets, constants, wiring) and if everything that flows in has the same metadata.
One that is like no other stays as it was traced, which takes longer to compile and nothing else. The writes into K and
V are inside: torch functionalizes a region that mutates what it is given and writes in place again in the end. It does
not look into the Triton operators of such a region (2.11 to 2.13), so on GPUs every layer is compiled by itself.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels import targets
from .aliasing import Memory
from .contract import PassOptions, record_match, record_skip, require_marker
from .metadata import fake_mode, fill_metadata, frozen, metadata, running_on

_KNOW_REGIONS = ("inductor", "aot_eager")


def outline_layers_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace equal layers by calls of one subgraph."""
    marker = require_marker(gm)
    target = targets.target_for(marker.device.type, options.backend)
    why_not = None
    if options.backend not in _KNOW_REGIONS:
        why_not = "the inner compiler takes the graph as it stands"
    elif not options.regions:
        why_not = "switched off (regions=False)"
    elif not target.regions:
        why_not = (
            f"{target.name}: its operators would be called one by one in a region instead of compiled into the step"
        )
    elif torch.is_grad_enabled():
        why_not = "the step is compiled with gradients: wrap it in torch.no_grad()"
    if why_not is not None:
        record_skip(gm, why_not)
        return gm
    fill_metadata(gm.graph)
    buffers = {*marker.keys, *marker.values}
    memory = Memory(gm.graph)
    layers = _layers(gm.graph, list(zip(marker.keys, marker.values, strict=True)), memory)
    if layers is None:
        record_skip(gm, "the slots are not written layer by layer")
        return gm
    groups: dict[Any, dict[int, list[fx.Node]]] = {}
    for index, nodes in enumerate(layers):
        signature = _signature(nodes, buffers, memory)
        groups.setdefault(tuple(signature), {})[index] = nodes[: len(signature)]
    for number, (signature, equal) in enumerate(groups.items()):
        indices = (
            ", ".join(map(str, equal)) if len(equal) < 4 else f"{min(equal)} to {max(equal)} ({len(equal)} of them)"
        )
        if len(equal) == 1 or not signature:
            record_skip(gm, "like no other", layer=next(iter(equal)))
            continue
        name = f"decoder_layer_{number}"
        why_not = _outline(gm, name, list(equal.values()), buffers)
        if why_not is None:
            record_match(gm, f"layers {indices}", into=name)
        else:
            record_skip(gm, f"layers {indices}: {why_not}")
    return gm


def _layers(graph: fx.Graph, buffers_of: list[tuple[fx.Node, fx.Node]], memory: Memory) -> list[list[fx.Node]] | None:
    """The nodes of each layer, from the end of the layer before up to where the last one stops being like the others."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    nodes = list(place)
    borders = []
    for buffers in buffers_of:
        written = [place[user] for buffer in buffers for user in buffer.users if buffer in memory.effects[user].writes]
        if not written:
            return None
        borders.append((min(written), max(written) + 1))
    begins, ends = [0, *(end for _, end in borders)], [*(begin for begin, _ in borders), len(nodes)]
    if any(begin > end for begin, end in zip(begins, ends, strict=True)):
        return None
    # What lies before the first write, and behind each one up to the next.
    start, *between = [nodes[begin:end] for begin, end in zip(begins, ends, strict=True)]
    writes_of = [nodes[begin:end] for begin, end in borders]
    cut = _shared([_signature(stretch, set(), memory) for stretch in between])
    before = [stretch[cut:] for stretch in between[:-1]]
    width = max((len(stretch) for stretch in before), default=0)
    before = [start[len(start) - width :], *before]
    return [[*a, *b, *c[:cut]] for a, b, c in zip(before, writes_of, between, strict=True)]


def _shared(signatures: list[list[Any]]) -> int:
    """How far into the stretch behind its write the last layer is like another one."""
    *others, last = signatures
    pairs = [list(zip(other, last, strict=False)) for other in others]
    return max((next((i for i, (a, b) in enumerate(pair) if a != b), len(pair)) for pair in pairs), default=0)


def _signature(nodes: Sequence[fx.Node], buffers: set[fx.Node], memory: Memory) -> list[Any]:
    """One hashable entry per node; equal entries up to a place mean equal graphs up to there.

    Ends before the first node that cannot be part of a region, as it writes into something else than `buffers`.
    """
    inside: dict[fx.Node, Any] = {}
    outside: dict[fx.Node, Any] = {}
    result = []
    for node in nodes:
        if node.op not in ("call_function", "call_method"):
            break
        effects = memory.effects[node]
        if not effects.known or not buffers.issuperset(effects.writes):
            break
        if any(other not in inside and metadata(other) is None for other in node.all_input_nodes):
            break
        for other in node.all_input_nodes:
            if other not in inside and other not in outside:
                outside[other] = ("given", len(outside), metadata(other))
        entry = (node.op, node.target, frozen(node.args, inside | outside), frozen(node.kwargs, inside | outside))
        inside[node] = ("made", len(inside))
        result.append(entry)
    return result


def _outline(gm: fx.GraphModule, name: str, members: list[list[fx.Node]], buffers: set[fx.Node]) -> str | None:
    """Replace each member, lists of nodes that correspond one by one, by a call of one new subgraph; or why not."""
    wanted: set[int] = set()
    for nodes in members:
        inside = set(nodes)
        wanted |= {index for index, node in enumerate(nodes) if not inside.issuperset(node.users)}
    subgraph = _subgraph(gm, members[0], sorted(wanted))
    values = [node.meta["example_value"] for node in subgraph.graph.find_nodes(op="placeholder")]
    mode = fake_mode(gm.graph)
    assert mode is not None
    with running_on(mode):
        results = subgraph(*values)
    if not all(isinstance(value, Tensor) for value in results):
        return "something else than a tensor comes out of it"
    given, made = _storages(values), _storages(results)
    if len(set(made)) < len(made) or not set(given).isdisjoint(made):
        return "what comes out of it shares memory with something else"
    if any(_sees_writes_twice(nodes, buffers) for nodes in members):
        return "slots that it writes go into it a second time, as a view"
    gm.add_module(name, subgraph)
    for nodes in members:
        _call(gm.graph, name, nodes, sorted(wanted))
    return None


def _storages(values: Sequence[Any]) -> list[int]:
    return [value.untyped_storage()._cdata for value in values if isinstance(value, Tensor)]


def _sees_writes_twice(nodes: list[fx.Node], buffers: set[fx.Node]) -> bool:
    """Whether a view of what is written comes from outside: inside it would be a tensor of its own."""
    written: list[int] = []
    read: list[int] = []
    for node in _given(nodes):
        (written if node in buffers else read).extend(_storages([node.meta["example_value"]]))
    return not set(written).isdisjoint(read)


def _given(nodes: list[fx.Node]) -> list[fx.Node]:
    """What flows in, in the order in which it is first read."""
    inside = set(nodes)
    return list(dict.fromkeys(other for node in nodes for other in node.all_input_nodes if other not in inside))


def _subgraph(gm: fx.GraphModule, nodes: list[fx.Node], wanted: list[int]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in _given(nodes):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = {"example_value": node.meta["example_value"]}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[nodes[index]] for index in wanted))
    return fx.GraphModule(gm, graph)


def _call(graph: fx.Graph, name: str, nodes: list[fx.Node], wanted: list[int]) -> None:
    inside = set(nodes)
    with graph.inserting_before(nodes[0]):
        attribute = graph.get_attr(name)
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, (attribute, name, *_given(nodes)))
        call.meta["example_value"] = tuple(nodes[index].meta["example_value"] for index in wanted)
        for place, index in enumerate(wanted):
            result = graph.call_function(operator.getitem, (call, place))
            result.meta = dict(nodes[index].meta)
            nodes[index].replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(nodes):
        graph.erase_node(node)
