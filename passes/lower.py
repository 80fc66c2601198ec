"""Our attention operators -> plain aten that Inductor fuses. (GPU kernels are chosen here, by device.)"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import ops  # noqa: F401  (defines the operators named below)
from ..kernels import inductor_cpu, reference
from .graph_utils import PassResult, Rewrite

_SCORED, _UNSCORED = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default
_BLEND = torch.ops.inertia_fx.blend.default
_MASK = 3
"""Place of the mask among both operators' arguments."""


def lower(rewrite: Rewrite) -> PassResult:
    """Inline every operator of ours as plain torch, in the form that the inner compiler makes the most of."""
    kernels = inductor_cpu if _is_inductor_on_cpu(rewrite) else reference
    form = kernels.__name__.rsplit(".", 1)[-1]
    lowerings: dict[Any, Callable[..., Any]] = {_SCORED: kernels.scored_attention, _UNSCORED: kernels.slot_attention}
    matched = []
    masks: dict[fx.Node, fx.Node] = {}
    for node in list(rewrite.graph.nodes):
        if node.op == "call_function" and node.target is _BLEND:
            _replace(rewrite.graph, node, rewrite.emit(node, reference.blend, *node.args))
        if node.op != "call_function" or node.target not in lowerings:
            continue
        arguments = node.args
        if kernels is inductor_cpu:
            mask = arguments[_MASK]
            if mask not in masks:  # computed once for all layers and heads, not once per element of every loop
                masks[mask] = rewrite.emit(mask.next, inductor_cpu.materialize, mask)
            arguments = (*arguments[:_MASK], masks[mask], *arguments[_MASK + 1 :], _is_half(rewrite))
        result = rewrite.emit(node, lowerings[node.target], *arguments)
        matched.append(f"'{node.name}' -> aten ({form})")
        _replace(rewrite.graph, node, result)
    return PassResult("lower", tuple(matched))


def _is_inductor_on_cpu(rewrite: Rewrite) -> bool:
    keys = rewrite.marker.keys[0].meta["example_value"]
    return rewrite.options.backend == "inductor" and keys.device.type == "cpu"


def _is_half(rewrite: Rewrite) -> bool:
    return rewrite.marker.keys[0].meta["example_value"].dtype.itemsize == 2


def _replace(graph: fx.Graph, node: fx.Node, result: fx.Node | tuple[fx.Node, ...]) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
