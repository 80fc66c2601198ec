"""Equal layers -> one subgraph that the inner compiler compiles once and every layer calls (`invoke_subgraph`).

A decode step repeats the same nodes once per layer, and compiling them once per layer is most of what the first step
takes. So the stretches between the layers' slot writes are compared, and what they have in common becomes a region, up
to two per layer:

    ... | write K[0], V[0] | attend, project, feed forward | query, key, value | write K[1], V[1] | attend, ...
      second region          first region                    second region                          first region

The writes stay outside: a region then neither mutates nor aliases what it is given, so no compiler has a reason to copy
K or V. Stretches are equal if their nodes are (targets, constants, wiring) and if everything that flows in has the same
metadata. A layer that is like no other stays as it was traced, which takes longer to compile and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .graph_utils import VIEWS, PassResult, Rewrite, calls, writes
from .metadata import fake_mode, fill_metadata, frozen, metadata

_SHARE = 0.5
"""Layers are cut in two where the last one stops being like the others, if that is this much of a layer."""

_KNOW_REGIONS = ("inductor", "aot_eager")


def outline_layers(rewrite: Rewrite) -> PassResult:
    """Make regions of what equal layers have in common."""
    if rewrite.options.backend not in _KNOW_REGIONS:
        return _skipped("the inner compiler takes the graph as it stands")
    fill_metadata(rewrite.graph)
    if not rewrite.options.regions:
        return _skipped("switched off (regions=False)")
    if torch.is_grad_enabled():
        return _skipped("the step is compiled with gradients: wrap it in torch.no_grad()")
    stretches = _stretches(rewrite)
    if stretches is None:
        return _skipped("the slots are not written layer by layer")
    start, *layers = stretches
    cut = _cut([_signature(nodes) for nodes in layers])
    heads = {f"layer {index}": nodes[:cut] for index, nodes in enumerate(layers)}
    if cut is None:
        heads.popitem()  # the last layer runs into the end of the step
    matched, skipped = [], []
    groups = [("attention and after", heads)]
    if cut is not None:
        feet = {f"layer {index + 1}": nodes[cut:] for index, nodes in enumerate(layers[:-1])}
        width = max(map(len, feet.values()))
        groups.append(("up to the slot write", {"layer 0": start[len(start) - width :]} | feet if width else {}))
    for part, pieces in groups:
        for number, equal in enumerate(_equal(pieces)):
            names = list(equal)
            if len(names) == 1:
                skipped.append(f"{part}: {names[0]} is like no other")
                continue
            name = f"layer_{part.split()[0]}_{number}"
            outcome = _outline(rewrite.gm, name, list(equal.values()))
            line = f"{part}: {names[0]} to {names[-1]} ({len(names)} of them)"
            if outcome is None:
                matched.append(f"{line} -> '{name}'")
            else:
                skipped.append(f"{line}: {outcome}")
    return PassResult("outline_layers", tuple(matched), tuple(skipped))


def _skipped(reason: str) -> PassResult:
    return PassResult("outline_layers", (), (reason,))


def _stretches(rewrite: Rewrite) -> list[list[fx.Node]] | None:
    """The nodes before the first slot write, and behind each layer's last one up to the next layer's first."""
    place = {node: index for index, node in enumerate(rewrite.graph.nodes)}
    nodes = list(place)
    borders = []
    for buffers in zip(rewrite.marker.keys, rewrite.marker.values, strict=True):
        written = [place[user] for buffer in buffers for user in buffer.users if writes(user, buffer)]
        if not written:
            return None
        borders.append((min(written), max(written)))
    if any(first >= second for (_, first), (second, _) in zip(borders, borders[1:], strict=False)):
        return None
    begins = [0, *(last + 1 for _, last in borders)]
    ends = [*(first for first, _ in borders), len(nodes)]
    return [
        [node for node in nodes[begin:end] if node.op not in ("placeholder", "output")]
        for begin, end in zip(begins, ends, strict=True)
    ]


def _cut(signatures: list[list[Any]]) -> int | None:
    """How far into the stretch behind its write the last layer is like another one; ``None`` if not far enough."""
    *others, last = signatures
    best = 0
    for other in others:
        shared = next((i for i, (a, b) in enumerate(zip(other, last, strict=False)) if a != b), min(len(other), len(last)))
        if shared >= _SHARE * len(other):
            best = max(best, shared)
    return best or None


def _equal(pieces: dict[str, list[fx.Node]]) -> Iterator[dict[str, list[fx.Node]]]:
    """The pieces in groups of equal ones, each as far as it can be outlined at all."""
    groups: dict[Any, dict[str, list[fx.Node]]] = {}
    for name, nodes in pieces.items():
        signature = _signature(nodes)
        if signature:
            groups.setdefault(tuple(signature), {})[name] = nodes[: len(signature)]
    yield from groups.values()


def _signature(nodes: Sequence[fx.Node]) -> list[Any]:
    """One hashable entry per node; equal entries up to a place mean equal graphs up to there.

    Ends before the first node that cannot be part of a region.
    """
    inside: dict[fx.Node, Any] = {}
    outside: dict[fx.Node, Any] = {}
    result = []
    for node in nodes:
        if node.op not in ("call_function", "call_method") or any(writes(node, other) for other in node.all_input_nodes):
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


def _outline(gm: fx.GraphModule, name: str, members: list[list[fx.Node]]) -> str | None:
    """Replace each member, lists of nodes that correspond one by one, by a call of one new subgraph; or why not."""
    kept = _kept(members[0])
    pieces = [[nodes[index] for index in kept] for nodes in members]
    wanted: list[int] = sorted(
        {index for nodes in pieces for index, node in enumerate(nodes) if not set(node.users) <= set(nodes)}
    )
    subgraph = _subgraph(gm, pieces[0], wanted)
    values = [node.meta["example_value"] for node in subgraph.graph.find_nodes(op="placeholder")]
    mode = fake_mode(gm.graph)
    assert mode is not None
    with mode, torch.no_grad():
        results = subgraph(*values)
    if not all(isinstance(value, Tensor) for value in results):
        return "something else than a tensor comes out of it"
    storages = [value.untyped_storage()._cdata for value in (*values, *results) if isinstance(value, Tensor)]
    if len(set(storages[-len(results) :])) < len(results) or set(storages[-len(results) :]) & set(storages[: -len(results)]):
        return "what comes out of it shares memory with something else"
    gm.add_module(name, subgraph)
    for nodes in pieces:
        _call(gm.graph, name, nodes, wanted)
    return None


def _kept(nodes: list[fx.Node]) -> list[int]:
    """Indices of the nodes without views and constants that only what follows reads: they would alias, or be copied."""
    kept: list[int] = []
    used: set[fx.Node] = set()
    for index in reversed(range(len(nodes))):
        node = nodes[index]
        is_view = (node.op == "call_method" and node.target in VIEWS) or calls(node, "", operator.getitem)
        if node in used or not (is_view or not node.all_input_nodes):
            kept.append(index)
            used.update(node.all_input_nodes)
    return kept[::-1]


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
