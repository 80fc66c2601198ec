"""The passes, in order. Each is a plain function over one decode graph as Dynamo traced it.

    find_attention.py   every layer's attention as an AttentionSite, or a refusal with a reason
    emit_scores.py      site -> scored attention: the same output, plus the pooled scores s
    update_momentum.py  m = alpha m + (1 - alpha) s, chained through the layers
    evict.py            the marker -> next free slot = argmin by (m, position), state written back in place
    lower.py            our operators -> plain aten that Inductor fuses, or, on CUDA and ROCm,
    lower_to_triton.py  Triton kernels
    outline_layers.py   equal layers -> one subgraph that is compiled once
    inline_regions.py   before all of them: regions that the user marked -> their nodes
    metadata.py         example values of nodes, compared and filled in
    check_mask.py       find_attention's proof that a mask hides the slots without a token, and only those
    graph_utils.py      what they share: the marker, walking through views, erasing what died

The passes know graphs, not Hugging Face. They find the state and the slot buffers through the marker operator
(`inertia_fx::retain`), and remove it. Matching less than every layer is a refusal, never a partial rewrite.
"""

from __future__ import annotations

from .emit_scores import emit_scores
from .evict import evict
from .find_attention import AttentionSite, find_attention
from .graph_utils import Marker, PassResult, Rewrite, find_marker
from .inline_regions import has_marker, inline_regions
from .lower import lower
from .outline_layers import outline_layers
from .update_momentum import update_momentum

PASSES = (find_attention, emit_scores, update_momentum, evict, lower, outline_layers)

__all__ = [
    "PASSES",
    "AttentionSite",
    "Marker",
    "PassResult",
    "Rewrite",
    "find_marker",
    "has_marker",
    "inline_regions",
    "run_passes",
]


def run_passes(rewrite: Rewrite) -> tuple[PassResult, ...]:
    """Run every pass over the graph; returns their reports.

    Raises:
        UnsupportedAttentionError: an attention is not understood.
    """
    results = []
    for run in PASSES:
        results.append(run(rewrite))
    rewrite.graph.lint()
    rewrite.gm.recompile()
    return tuple(results)
