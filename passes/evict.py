"""Replace the marker: choose the slot to overwrite next, and write the state back in place."""

from __future__ import annotations

from torch import Tensor, fx

from ..kernels import targets
from .contract import PassOptions, record_match, require_marker
from .nodes import emit


def evict_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace the marker by argmin of (momentum, position), slots without a token first, and the state's write-back."""
    marker = require_marker(gm)
    protect = marker.protect_first, marker.protect_recent
    chosen = marker.new_momentum
    moved, entered = marker.moved_and_entered
    commit = targets.target_for(marker.device.type, options.backend).commit
    emit(gm.graph, marker.node, commit, *marker.state, moved, entered, marker.new_positions, *protect)
    gm.graph.erase_node(marker.node)
    if moved is not chosen:  # the commit puts the marks back itself
        valid, *_ = chosen.all_input_nodes
        gm.graph.erase_node(chosen)
        gm.graph.erase_node(valid)
    protected = f", sparing the first {marker.protect_first} and the last {marker.protect_recent} tokens"
    if marker.protect_first == marker.protect_recent == 0:
        protected = ""
    record_match(gm, f"argmin of (momentum, position){protected}", into=marker.free.name)
    return gm
