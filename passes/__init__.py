"""The passes over a decode graph as Dynamo traced it, in order (`PASSES`). README.md says how to add one.

    inline_regions    regions that the user marked -> their nodes
    find_attention    every layer's attention -> an AttentionSite in its node's `meta`, or a refusal with a reason
    prove_attention   every site is run beside its replacement, on small states
    lower_enter       the new token's entry into the state -> one kernel, where the device has one
    emit_scores       site -> scored attention: the same output, plus the pooled scores s
    update_momentum   m = alpha m + (1 - alpha) s, chained through the layers
    lower             our operators -> plain aten that the inner compiler fuses, or Triton kernels
    outline_layers    equal layers -> one subgraph that is compiled once
    evict             the marker -> next free slot = argmin by (m, position), state written back in place
    share_symbols     sizes that are equal -> one symbol in the example inputs

    contract.py       what they agree on: options, marker, sites, refusals, records
    runner.py         the list, and what is done around each pass
    nodes.py, aliasing.py, slices.py, small_states.py, metadata.py, check_mask.py   reading, running and writing graphs

They know graphs, not Hugging Face. Matching less than every layer is a refusal, never a partial rewrite.
"""

from __future__ import annotations

from ..debug import MatchRecord, PassResult
from .contract import AttentionSite, Marker, Pass, PassOptions, attention_sites, find_marker, record_match, record_skip
from .inline_regions import marker_in
from .runner import OPTIONAL, PASSES, check_passes, name_of, run_passes

__all__ = [
    "OPTIONAL",
    "PASSES",
    "AttentionSite",
    "Marker",
    "MatchRecord",
    "Pass",
    "PassOptions",
    "PassResult",
    "attention_sites",
    "check_passes",
    "find_marker",
    "marker_in",
    "name_of",
    "record_match",
    "record_skip",
    "run_passes",
]
