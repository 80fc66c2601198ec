"""Our operators -> Triton kernels on CUDA and ROCm devices (lower_to_triton.py), elsewhere plain aten that Inductor fuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from .. import ops  # noqa: F401  (defines the operators named below)
from ..kernels import inductor_cpu, reference
from .graph_utils import PassResult, Rewrite, replace
from .lower_to_triton import lower_to_triton

_SCORED, _UNSCORED = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default
_BLEND = torch.ops.inertia_fx.blend.default
_MASK = 3
"""Place of the mask among both operators' arguments."""


def lower(rewrite: Rewrite) -> PassResult:
    """Kernels on CUDA and ROCm devices; elsewhere inline every operator of ours, in the form the inner compiler likes best."""
    if rewrite.kernels == "triton":
        return lower_to_triton(rewrite)
    form = rewrite.kernels
    kernels = inductor_cpu if form == "inductor_cpu" else reference
    lowerings: dict[Any, Callable[..., Any]] = {_SCORED: kernels.scored_attention, _UNSCORED: kernels.slot_attention}
    matched = []
    masks: dict[fx.Node, fx.Node] = {}
    for node in list(rewrite.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is _BLEND:
            replace(rewrite.graph, node, rewrite.emit(node, reference.blend, *node.args))
        if node.target not in lowerings:
            continue
        arguments = node.args
        if kernels is inductor_cpu:
            mask = arguments[_MASK]
            if mask not in masks:  # computed once for all layers and heads, not once per element of every loop
                masks[mask] = rewrite.emit(mask.next, inductor_cpu.materialize, mask)
            arguments = (*arguments[:_MASK], masks[mask], *arguments[_MASK + 1 :], _is_half(rewrite))
        result = rewrite.emit(node, lowerings[node.target], *arguments)
        matched.append(f"'{node.name}' -> aten ({form})")
        replace(rewrite.graph, node, result)
    return PassResult("lower", tuple(matched))


def _is_half(rewrite: Rewrite) -> bool:
    return rewrite.marker.keys[0].meta["example_value"].dtype.itemsize == 2
