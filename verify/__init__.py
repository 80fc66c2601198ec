"""Verify the rewrite on a model of yours: the check, its theory, and a kit for tests.

    check(model, ids)      compare a compiled model with the reference and the full cache -> Report
    reference.py           the literal growing-list decoder of SPEC.md
    retention.py           its eviction rule, on two Python lists
    optional.py            optional packages, and the error where one is missing

    check/compare.py       check(): the three decoders and what is taken from each
    check/tokens.py        its inputs as rows of token ids
    check/driver.py        a hand-written decoding loop over a compiled model
    check/record.py        the record of a run, and what rounding may do to it
    check/clauses.py       the contract, clause by clause, over that record
    check/metrics.py       sets, rankings, divergence
    check/score_log.py     a model's own scores, and Proposition 1 against them
    check/report_data.py   what was found out: data and JSON
    check/report.py        the Report: that data, with print() (console.py) and plot() (plots.py, figures.py)

    theory/recurrence.py   the recurrence's weights, gap, variance and rank-stability bound, derived with sympy
    theory/bounds.py       those evaluated for the rule of a Config
    theory/roofline.py     bytes and FLOPs of decode attention with scores, and what a GPU needs for them at the least

    testing/decoders.py    tiny decoders of every supported attention form
    testing/synthetic.py   a decoder with given attention, and its differential run against retention lists
    testing/strategies.py  hypothesis strategies for scores, momenta, cache geometries, prompts and decoders
    testing/contract.py    DecoderContract: the contract as pytest tests on a model of yours
    testing/harness.py     what its tests share: the compiled model, settings, prompts, decoding loops
    testing/launches.py    the launches of our Triton kernels, recorded instead of run
    testing/ahead_of_time.py  those compiled for GPUs that are not here: registers, spills, loads

`check` needs ``pip install "inertia_fx[verify]"``, as do the strategies and the contract.
"""

from __future__ import annotations

from .check import Finding, Ranking, Report, RowReport, Stability, check

__all__ = ["Finding", "Ranking", "Report", "RowReport", "Stability", "check"]
