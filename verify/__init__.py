"""Is the rewrite right, on your model? The checks, their theory, and a test kit.

    check(model, ids)      runs a compiled model beside the reference and the full cache -> Report
    bounds.py              the recurrence's weights, gap, variance and rank-stability bound, derived with sympy
    reference.py           the literal growing-list decoder of SPEC.md
    parity.py, inputs.py   check(): what is run, and which clause of the contract is held against what
    metrics.py             sets, rankings, divergence; Proposition 1 on a model's own scores
    report.py, show.py     the Report: data and JSON; printed and drawn
    decoders.py            tiny decoders of every supported attention form, and one whose attention you write down
    strategies.py          hypothesis strategies for scores, momenta, cache geometries, prompts and decoders
    contract.py            DecoderContract: the contract as pytest tests on a model of yours

`check` needs ``pip install "inertia_fx[verify]"``, as do the strategies and the contract.
"""

from __future__ import annotations

from .parity import check
from .report import Finding, Report, RowReport, Stability

__all__ = ["Finding", "Report", "RowReport", "Stability", "check"]
