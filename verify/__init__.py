"""Is the rewrite right, on your model? The checks, their theory, and a test kit.

    check(model, ids)      runs a compiled model beside the reference and the full cache -> Report
    bounds.py              the recurrence's weights, gap, variance and rank-stability bound, derived with sympy
    reference.py           the literal growing-list decoder of SPEC.md; who stays is decided in retention.py
    parity.py, inputs.py   check(): what it takes, what is run
    evidence.py            what was seen of each sequence, and what rounding may do
    clauses.py             the contract, clause by clause, over that evidence
    metrics.py             sets, rankings, divergence
    score_log.py           a model's own scores, and Proposition 1 beside them
    report.py              the Report: data and JSON; printed by show.py, drawn by draw.py
    driver.py              a hand-written decoding loop over a compiled model
    decoders.py            tiny decoders of every supported attention form
    scripted.py            a decoder whose attention you write down, and the same on plain lists
    strategies.py          hypothesis strategies for scores, momenta, cache geometries, prompts and decoders
    contract.py            DecoderContract: the contract as pytest tests on a model of yours

`check` needs ``pip install "inertia_fx[verify]"``, as do the strategies and the contract.
"""

from __future__ import annotations

from .check.compare import check
from .check.report import Finding, Ranking, Report, RowReport, Stability

__all__ = ["Finding", "Ranking", "Report", "RowReport", "Stability", "check"]
