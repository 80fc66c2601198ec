"""Proposition 1 and Corollary 2 of the paper, held against the momentum that the compiled graph itself computes.

Every row of a batch is one independent run of the process: `ROWS` of them go through the compiled synthetic decoder at
once, with scores drawn for two tokens i and j (a third one, a sink, takes the rest of the attention, so that theirs are
independent). What the graph makes of them is compared with the expressions that `verify.theory.bounds` derived.

Error rates are those of tests/common/propositions.py. Examples are the same in every CI run. That they fail for a wrong
update is shown in test_mutations.py.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inertia_fx import Config
from inertia_fx.verify.testing import strategies
from inertia_fx.verify.testing.synthetic import SyntheticRun
from tests.common.examples import examples
from tests.common.propositions import (
    AHEAD,
    BEHIND,
    CHECKS,
    KURTOSIS,
    MEAN,
    POSITIONS,
    ROWS,
    SINK,
    Process,
    check_expected_gap,
    check_gap_variance,
    check_misranking,
    noise,
)

rules = st.one_of(
    st.fixed_dictionaries({"alpha": st.sampled_from((0.0, 0.3, 0.8, 0.95))}),
    st.fixed_dictionaries({"alpha_time": st.sampled_from((0.0, 0.9)), "alpha_layer": st.sampled_from((0.0, 0.7, 1.0))}),
    st.just({"aggregator": "single_step"}),
)


@examples(25)
@given(
    rule=rules,
    refresh_every=st.sampled_from((1, 1, 3, None)),
    layers=st.sampled_from((1, 3)),
    steps=st.integers(1, 12),
    gap=st.sampled_from((0.01, 0.05)),
    kind=st.sampled_from(tuple(KURTOSIS)),
    same_in_all_layers=st.booleans(),
    seed=strategies.seeds(),
)
def test_proposition_1(rule: dict[str, Any], refresh_every: int | None, seed: int, **chosen: Any) -> None:
    process = Process(rule | {"refresh_every": refresh_every}, seed=seed, **chosen)
    check_expected_gap(process)
    check_gap_variance(process)
    spread = process.rule.gap_variance(
        process.steps, process.deviation**2, layer_correlation=float(process.same_in_all_layers)
    )
    # A gap that makes Chebyshev's bound 1/4: small enough that tokens are misranked, large enough that it says something.
    telling = 2 * math.sqrt(spread) / process.rule.expected_gap(process.steps, 1.0)
    check_misranking(dataclasses.replace(process, gap=telling))


def test_one_update_per_step_is_the_papers_statement() -> None:
    """The paper's own setting and closed forms: K = 1, alpha 0.8, the gap's variance near its limit 2 (1-a)/(1+a) s^2."""
    process = Process({"alpha": 0.8}, layers=1, steps=20, gap=0.02, deviation=0.03)
    limit = 2 * 0.2 / 1.8 * 0.03**2
    assert process.rule.variance_bound(0.03**2) == pytest.approx(limit)
    gaps = process.gaps()
    assert float(gaps.var()) == pytest.approx(limit, rel=0.2)
    assert float(gaps.mean()) == pytest.approx(0.02, rel=0.1)
    assert float((gaps < 0).double().mean()) <= limit / 0.02**2
    for check in CHECKS:
        check(process)


def test_where_the_bound_stops_applying() -> None:
    """Scores that depend on the step before (AR(1), correlation 0.95) break the proposition's assumption, and its bound."""
    process = Process({"alpha": 0.8}, layers=1, steps=20, deviation=0.03)
    innovations = noise("uniform", (process.steps, 1, ROWS, 2), seed=3)
    states = [innovations[0]]
    for innovation in innovations[1:]:
        states.append(0.95 * states[-1] + math.sqrt(1 - 0.95**2) * innovation)
    scores = torch.stack(states) * process.deviation + torch.tensor([MEAN + process.gap, MEAN])
    assert float(scores[..., 1].var(dim=2).mean()) == pytest.approx(process.deviation**2, rel=0.05)
    variance, bound = float(process.gaps(scores).var()), process.rule.variance_bound(process.deviation**2)
    assert variance > 3 * bound


@examples(20)
@given(
    alpha=st.sampled_from((0.3, 0.8)),
    layers=st.sampled_from((1, 3)),
    steps=st.integers(1, 8),
    kind=st.sampled_from(("near_ties", "heavy_tailed", "exact_ties", "drift")),
    seed=strategies.seeds(),
)
def test_whoever_is_never_behind_stays_ahead(alpha: float, layers: int, steps: int, kind: str, seed: int) -> None:
    """Near ties decided to the last bit: s(i) >= s(j) in every layer and step makes m(i) >= m(j), whatever the rounding."""
    drawn = strategies.draw_scores(kind, (steps, layers, 8, 2), seed)
    ordered = drawn.sort(-1, descending=True).values
    process = Process({"alpha": alpha}, layers, steps)
    run = SyntheticRun(process.config, [3] * 8, layers=layers, positions=POSITIONS)
    for step in ordered:
        whole = torch.ones(layers, 8, 1, POSITIONS)
        whole[:, :, 0, AHEAD], whole[:, :, 0, BEHIND] = step[..., 0], step[..., 1]
        run.step(whole)
    for momentum in run.momentum:
        assert momentum[AHEAD] >= momentum[BEHIND]


@examples(15)
@given(
    alpha=st.sampled_from((0.0, 0.3, 0.8)),
    layers=st.sampled_from((1, 3)),
    mapping=st.sampled_from(("square", "root", "affine", "step")),
    seed=strategies.seeds(),
)
def test_corollary_2(alpha: float, layers: int, mapping: str, seed: int) -> None:
    """A strictly increasing map of expected scores leaves the ranking of expected momenta as it was.

    Five tokens, mean momentum over `ROWS` runs; neighbours' expected momenta are at least 10 standard errors apart.
    """
    maps = {
        "square": lambda x: 3 * x**2,
        "root": lambda x: 0.5 * x**0.5,
        "affine": lambda x: 0.02 + 0.7 * x,
        "step": lambda x: x + 0.05 * (x > 0.09),
    }
    tokens, steps = 5, 6
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    means = torch.linspace(0.04, 0.14, tokens, dtype=torch.float64)[order]
    rankings = []
    for expected in (means, maps[mapping](means)):
        drawn = expected * (1 + 0.2 * noise("uniform", (steps, layers, ROWS, tokens), seed))
        run = SyntheticRun(
            Config(budget=10**9, evict_after=steps + 1, alpha=alpha),
            [tokens + 1] * ROWS,
            layers=layers,
            positions=POSITIONS,
        )
        for step in drawn:
            whole = torch.full((layers, ROWS, 1, POSITIONS), 1e-9, dtype=torch.float64)
            whole[:, :, 0, 1 : tokens + 1], whole[:, :, 0, SINK] = step, 1 - step.sum(-1)
            run.step(whole.float())
        momentum = torch.zeros(tokens, dtype=torch.float64)
        state = run.cache.state
        for token in range(tokens):
            momentum[token] = state.momentum[state.positions == token + 1].double().mean()
        rankings.append(momentum.argsort().tolist())
    assert rankings[0] == rankings[1] == means.argsort().tolist()
