"""Replace the marker: choose the slot to overwrite next, and write the state back in place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import next_free
from .graph_utils import PassResult, Rewrite, erase_dead


def evict(rewrite: Rewrite) -> PassResult:
    """Emit argmin by (momentum, position), dead slots first; erase the marker."""
    marker = rewrite.marker
    protect = marker.protect_first, marker.protect_recent
    if rewrite.kernels == "triton":
        from ..kernels.triton import ops as triton_ops  # noqa: F401  (defines the operator)

        with rewrite.graph.inserting_before(marker.node):
            rewrite.graph.call_function(
                torch.ops.inertia_fx.triton_evict.default,
                (*marker.state, rewrite.moved, marker.new_momentum, marker.new_positions, *protect),
            )
        if rewrite.momentum is not rewrite.moved:  # the kernel keeps the marks of dead slots itself
            erase_dead(rewrite.graph, rewrite.momentum)
    else:
        rewrite.emit(marker.node, _write_back, *marker.state, rewrite.momentum, marker.new_positions, *protect)
    rewrite.graph.erase_node(marker.node)
    protected = f", sparing the first {marker.protect_first} and the last {marker.protect_recent} tokens"
    if marker.protect_first == marker.protect_recent == 0:
        protected = ""
    return PassResult("evict", (f"'{marker.free.name}' = argmin of (momentum, position){protected}",))


def _write_back(
    momentum: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    new_momentum: Tensor,
    new_positions: Tensor,
    protect_first: int,
    protect_recent: int,
) -> Tensor:
    free.copy_(next_free(new_momentum, new_positions, length, protect_first, protect_recent))
    momentum.copy_(new_momentum)
    positions.copy_(new_positions)
    return length.add_(1)
