"""The maths of a step once more, literally, and inputs for it: what kernels are compared with."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def definition(
    query: Any, key: Any, value: Any, live: Any, scale: float, scorer: str, softcap: float = 0.0, sink: Any = None
) -> tuple[Any, Any]:
    """Row by row, head by head, in fp64, over the live slots only."""
    rows, heads = query.shape[:2]
    groups = heads // key.shape[1]
    output = torch.zeros(rows, heads, 1, value.shape[3], dtype=torch.float64)
    scores = torch.zeros(rows, key.shape[2], dtype=torch.float64)
    for row in range(rows):
        slots = live[row].nonzero().squeeze(1)
        pooled = torch.zeros(len(slots), dtype=torch.float64)
        for head in range(heads):
            k, v = key[row, head // groups, slots].double(), value[row, head // groups, slots].double()
            logits = k @ query[row, head, 0].double() * scale
            logits = softcap * (logits / softcap).tanh() if softcap else logits
            weights = logits.exp()
            p = weights / (weights.sum() + (0 if sink is None else sink[head].double().exp()))
            output[row, head, 0] = p @ v
            norms = v.norm(dim=1)
            pooled += p * (norms / norms.mean()) if scorer == "vnorm" else p
        pooled /= heads
        if scorer == "entropy":  # of one token it is 0 (or what a sink leaves of it): ln(1) is no divisor
            pooled = pooled * float(-(pooled * pooled.log()).nansum() / math.log(max(len(slots), 2)))
        scores[row, slots] = pooled
    return output, scores


def additive(live: Any) -> Any:
    return torch.where(live, 0.0, -math.inf)[:, None, None, :]


@st.composite
def states(draw: Any) -> tuple[Any, Any, Any]:
    """Momentum with ties, dead (-inf) and closed (+inf) slots, positions in any order."""
    slots = draw(st.integers(1, 12))
    kinds = draw(st.lists(st.sampled_from(["live", "live", "live", "dead", "closed"]), min_size=slots, max_size=slots))
    values = draw(st.lists(st.sampled_from([0.0, 0.1, 0.1, 0.25, 3.0]), min_size=slots, max_size=slots))
    order = draw(st.permutations(range(slots)))
    momentum = [
        {"live": value, "dead": -math.inf, "closed": math.inf}[kind] for kind, value in zip(kinds, values, strict=True)
    ]
    positions = [place if kind == "live" else -1 for kind, place in zip(kinds, order, strict=True)]
    return kinds, momentum, positions
