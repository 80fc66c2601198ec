"""Our attention operators -> plain aten that Inductor fuses. (GPU kernels are chosen here, by device.)"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import ops  # noqa: F401  (defines the operators named below)
from ..kernels import reference
from .graph_utils import PassResult, Rewrite

_LOWERINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.inertia_fx.scored_attention.default: reference.scored_attention,
    torch.ops.inertia_fx.slot_attention.default: reference.slot_attention,
}


def lower(rewrite: Rewrite) -> PassResult:
    """Inline every operator of ours as the plain torch that defines it."""
    matched = []
    for node in list(rewrite.graph.nodes):
        if node.op == "call_function" and node.target in _LOWERINGS:
            result = rewrite.emit(node, _LOWERINGS[node.target], *node.args)
            matched.append(f"'{node.name}' -> aten")
            _replace(rewrite.graph, node, result)
    return PassResult("lower", tuple(matched))


def _replace(graph: fx.Graph, node: fx.Node, result: fx.Node | tuple[fx.Node, ...]) -> None:
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)
