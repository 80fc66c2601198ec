"""Our operators -> Triton kernels on CUDA and ROCm devices (lower_to_triton.py), elsewhere plain aten that Inductor fuses."""

from __future__ import annotations

from typing import Any

from torch import fx

from .. import ops  # noqa: F401  (defines the operators named below)
from ..kernels import cpu as inductor_cpu
from ..kernels import reference
from .graph_utils import PassResult, Rewrite, replace
from .lower_to_triton import BLEND, SCORED, UNSCORED, lower_to_triton

_MASK, _LIVE = 3, 4
"""Places of the mask and, where scores are read, of the liveness among the attention operators' arguments."""


def lower(rewrite: Rewrite) -> PassResult:
    """Kernels on CUDA and ROCm devices; elsewhere inline every operator of ours, in the form the inner compiler likes best."""
    if rewrite.kernels != "reference":
        _write_masks_once(rewrite)
    result = lower_to_triton(rewrite) if rewrite.kernels == "triton" else PassResult("lower", ())
    inlined = _inline(rewrite)
    return result if rewrite.kernels == "triton" else PassResult("lower", inlined)


def _write_masks_once(rewrite: Rewrite) -> None:
    """Into memory, for all layers: Inductor would compute them anew in every loop, or write them for every kernel."""
    places = (_MASK, _LIVE) if rewrite.kernels == "triton" else (_MASK,)
    written: dict[fx.Node, fx.Node] = {}
    for node in list(rewrite.graph.nodes):
        if node.op != "call_function" or node.target not in (SCORED, UNSCORED):
            continue
        for place in places if node.target is SCORED else (_MASK,):
            mask = node.args[place]
            if mask not in written:  # beside the mask, so that the first layer reads like the others
                written[mask] = rewrite.emit(mask.next, inductor_cpu.materialize, mask)
            node.update_arg(place, written[mask])


def _inline(rewrite: Rewrite) -> tuple[str, ...]:
    """What is left of our operators as plain aten; one line for each attention."""
    form = "inductor_cpu" if rewrite.kernels == "inductor_cpu" else "reference"
    kernels: Any = inductor_cpu if form == "inductor_cpu" else reference
    half = rewrite.marker.keys[0].meta["example_value"].dtype.itemsize == 2
    lines = []
    for node in list(rewrite.graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is BLEND:
            replace(rewrite.graph, node, rewrite.emit(node, reference.blend, *node.args))
        elif node.target in (SCORED, UNSCORED):
            attend = kernels.scored_attention if node.target is SCORED else kernels.slot_attention
            group = node.args[0].meta["example_value"].shape[1] // node.args[1].meta["example_value"].shape[1]
            more = (group, half) if form == "inductor_cpu" else ()
            lines.append(f"'{node.name}' -> aten ({form})")
            replace(rewrite.graph, node, rewrite.emit(node, attend, *node.args, *more))
    return tuple(lines)
