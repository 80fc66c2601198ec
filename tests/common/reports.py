"""Make up reports of `inertia_fx.verify.check`, so that every number in them is known."""

from __future__ import annotations

import random

from inertia_fx.verify.check.report import Report
from inertia_fx.verify.check.report_data import Finding, Ranking, RowReport, Stability

ASSUMPTION = (
    "Broken here: a token's score depends on the one before (correlation 0.57, independent scores: -0.02) and tokens'"
    " scores move together (median |correlation| 0.35, independent scores: 0.10). The bound describes this model, it"
    " does not certify it."
)
FINDINGS = [
    Finding("retained sets are the reference's", "invariant 2, D7", True, "the same positions in all 64 steps"),
    Finding("momentum is the reference's", "recurrence, D2, D4, D8", True, "off by at most 3.7e-07 of the largest"),
    Finding("every row keeps its budget", "invariant 1, D5, D6, D10", True, "tokens kept: 100"),
    Finding("evicted tokens never return", "one decode step", True, "none did"),
]
VIOLATION = Finding(
    "at most one token leaves per step",
    "invariant 8",
    False,
    "row 0, step 17: 3 tokens left in one step; graph node scaled_dot_product_attention_" + "x" * 60 + " (the end)",
)


def row(seed: int = 0, steps: int = 64, prompt: int = 1000, budget: int = 100) -> RowReport:
    """A row as a real model's looks: one eviction down to the budget, then one token per step."""
    draw = random.Random(seed)
    kept = sorted(draw.sample(range(prompt), min(prompt, budget)))
    retained = []
    for step in range(steps):
        kept = [*kept, prompt + step]
        while len(kept) > budget:
            del kept[int(len(kept) * draw.random() ** 2)]
        retained.append(list(kept))
    shown = 12 if budget < prompt else 0
    smoothed = [[max(0, budget - 6 + token + draw.randint(-3, 3)) for token in range(shown)] for _ in range(steps)]
    raw = [[min(prompt - 1, int(rank * draw.lognormvariate(0, 1))) for rank in step] for step in smoothed]
    return RowReport(
        prompt_tokens=prompt,
        budget=budget,
        tokens=list(range(steps + 1)),
        full_tokens=[token if token < 12 + seed else 0 for token in range(steps + 1)],
        first_divergence=12 + seed if steps >= 12 + seed else None,
        first_set_difference=None,
        set_jaccard=[1.0] * steps,
        ties=[],
        momentum_error=3.7e-7,
        logits_error=1.74e-6,
        disagreement=[step // 16 for step in range(1, steps + 1)],
        kl=[0.0 if step == 0 else draw.lognormvariate(-4, 1.5) for step in range(steps)],
        output_error=[draw.uniform(0.01, 0.2) for _ in range(steps)],
        retained=retained,
        evicted_mass=[0.123] + [0.0004] * (steps - 1) if budget < prompt else [0.0] * steps,
        churn=[draw.choice([0.0, 2 / (budget + 1)]) for _ in range(steps - 1)] if budget < prompt else [],
        churn_ceiling=2 / (budget + 1),
        scorer_spearman={"attention/vnorm": 0.991, "attention/entropy": 0.9972},
        scorer_jaccard={"attention/vnorm": 0.889, "attention/entropy": 0.958},
        raw_churn=[draw.uniform(0.1, 0.4) for _ in range(steps - 1)],
        smoothed_churn=[draw.uniform(0.02, 0.08) for _ in range(steps - 1)],
        ranking=Ranking(draw.sample(range(prompt), shown), budget, raw, smoothed) if shown else None,
        stability=Stability(30, 0.00124, 8.98, 0.1036, steps, 130_816, 0.144, 0.876, 0.02, 0.572, -0.0156, 0.354, ASSUMPTION),
        why_no_stability=None,
    )  # fmt: skip


def fake(*rows: RowReport, findings: list[Finding] | None = None) -> Report:
    rows = rows or (row(),)
    return Report(
        model="LlamaForCausalLM, 134.5 M parameters",
        dtype="float32",
        backend="inductor",
        settings="Config(ratio=0.9 (evicted), evict_after=4, pool_width=5, alpha_time=0.9, alpha_layer=0.95)",
        steps=len(rows[0].retained),
        findings=FINDINGS if findings is None else findings,
        rows=list(rows),
        seconds={"full cache: prompt of 1,000 tokens": 4.36, "compiled model: first step (compiles)": 31.5},
        versions={"torch": "2.13.0", "transformers": "5.24.0", "inertia_fx": "0.1.0"},
    )


def unwrapped(text: str) -> str:
    """Join wrapped lines into one."""
    return " ".join(text.split())
