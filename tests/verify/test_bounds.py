"""Proposition 1: every number of `verify/theory/bounds.py` against the recurrence itself, iterated in exact fractions."""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inertia_fx import Config
from inertia_fx.errors import ConfigError
from inertia_fx.verify.theory import Rule, symbols
from tests.common.examples import examples

S = symbols()
INITIAL = (0, 0)  # the key of m_0 among the coefficients; scores have (step, layer), from (1, 1)

below_one = st.one_of(
    st.sampled_from([0.0, 0.3, 0.8, 0.95, 1 - 2**-53]), st.integers(0, 2**20 - 1).map(lambda n: n / 2**20)
)
to_one = st.one_of(below_one, st.just(1.0), st.just(1))
scales = st.one_of(st.just(0), st.just(1.0), st.integers(1, 2**30).map(lambda n: n / 2**15))
rules = st.builds(
    Rule,
    alpha=below_one,
    layers=st.integers(1, 5),
    alpha_time=st.none() | below_one,
    alpha_layer=st.none() | to_one,
    refresh_every=st.none() | st.integers(1, 5),
)
steps_ = st.integers(1, 9)


def coefficients(rule: Rule, steps: int) -> dict[tuple[int, int], Fraction]:
    """What m is made of after `steps` steps: SPEC's loop, with m as a vector over m_0 and all past scores."""
    m = {INITIAL: Fraction(1)}
    alpha, layers = Fraction(rule.alpha), rule.layers
    for step in range(1, steps + 1):
        if step > 1 and (rule.refresh_every is None or (step - 1) % rule.refresh_every != 0):
            continue
        if rule.alpha_time is None and rule.alpha_layer is None:
            for layer in range(1, layers + 1):
                m = {key: alpha * value for key, value in m.items()}
                m[step, layer] = 1 - alpha
            continue
        time = alpha**layers if rule.alpha_time is None else Fraction(rule.alpha_time)
        ratio = alpha if rule.alpha_layer is None else Fraction(rule.alpha_layer)
        weights = [ratio ** (layers - layer) for layer in range(1, layers + 1)]
        m = {key: time * value for key, value in m.items()}
        for layer, weight in enumerate(weights, 1):
            m[step, layer] = (1 - time) * weight / sum(weights)
    return m


def scores_of(rule: Rule, steps: int) -> dict[tuple[int, int], Fraction]:
    return {key: value for key, value in coefficients(rule, steps).items() if key != INITIAL}


def token_variance(rule: Rule, steps: int, correlation: float) -> Fraction:
    """Var m for scores of variance 1: the sum over pairs of coefficients times their covariance."""
    m = scores_of(rule, steps)
    covariance = {True: Fraction(1), False: Fraction(correlation)}
    return sum(
        (m[a] * m[b] * covariance[a == b] for a, b in itertools.product(m, m) if a[0] == b[0]),  # steps independent
        start=Fraction(0),
    )


def close(value: float, exact: Fraction) -> bool:
    return abs(Fraction(value) - exact) <= exact * Fraction(1, 10**14) + Fraction(1, 10**300)


# Numbers


@given(rule=rules, steps=steps_)
def test_weights_are_those_of_the_loop(rule: Rule, steps: int) -> None:
    exact = coefficients(rule, steps)
    weights = rule.weights(steps)
    assert len(weights) == steps and all(len(row) == rule.layers for row in weights)
    for step, row in enumerate(weights, 1):
        for layer, weight in enumerate(row, 1):
            if (step, layer) in exact:
                assert close(weight, exact[step, layer])
            else:
                assert weight == 0.0
    assert close(rule.initial_weight(steps), exact[INITIAL])
    assert math.fsum([rule.initial_weight(steps), *itertools.chain(*weights)]) == pytest.approx(1, abs=1e-14)


@given(rule=rules, steps=steps_)
def test_one_step_gives_the_layer_and_time_weights(rule: Rule, steps: int) -> None:
    first = coefficients(rule, 1)
    added = 1 - first[INITIAL]
    assert close(rule.time_weight, first[INITIAL])
    relative = [first[1, layer] / added for layer in range(1, rule.layers + 1)]
    assert all(close(w, exact) for w, exact in zip(rule.layer_weights(), relative, strict=True))
    assert math.fsum(rule.layer_weights()) == pytest.approx(1, abs=1e-15)
    assert close(rule.effective_layers, 1 / sum(w**2 for w in relative))
    assert 1 - 1e-15 <= rule.effective_layers <= rule.layers + 1e-14
    assert rule.updates(steps) == len({step for step, _ in scores_of(rule, steps)})
    if rule.refresh_every is not None:
        assert rule.updates(steps) == math.ceil(Fraction(steps, rule.refresh_every))


@given(rule=rules, steps=steps_, gap=scales.filter(bool))
def test_expected_gap(rule: Rule, steps: int, gap: float) -> None:
    exact = [sum(scores_of(rule, n).values()) * Fraction(gap) for n in (steps, steps + 1)]
    assert close(rule.expected_gap(steps, gap), exact[0])
    assert rule.expected_gap(steps, gap) <= rule.expected_gap(steps + 1, gap) <= gap


@given(rule=rules, steps=steps_, variance=scales, other=st.none() | scales, correlation=to_one)
def test_gap_variance(rule: Rule, steps: int, variance: float, other: float | None, correlation: float) -> None:
    tokens = Fraction(variance) + Fraction(variance if other is None else other)
    value = rule.gap_variance(steps, variance, other, layer_correlation=correlation)
    assert close(value, token_variance(rule, steps, correlation) * tokens)
    independent = sum(c**2 for c in scores_of(rule, steps).values())
    assert close(rule.gap_variance(steps, variance, other), independent * tokens)
    bound = rule.variance_bound(variance, other, layer_correlation=correlation)
    assert value <= rule.gap_variance(steps + 1, variance, other, correlation) <= bound
    if rule.refresh_every is None:
        assert value == bound
    if correlation == 1:  # every layer says the same: as if there were one
        one = Rule(layers=1, alpha_time=rule.time_weight, refresh_every=rule.refresh_every)
        assert value == pytest.approx(one.gap_variance(steps, variance, other), rel=1e-9)


@given(rule=rules, variance=scales, correlation=to_one)
def test_variance_bound_is_tight(rule: Rule, variance: float, correlation: float) -> None:
    """What the bound leaves is the bound times A**(2n): nothing, after enough steps."""
    bound = rule.variance_bound(variance, layer_correlation=correlation)
    many = 10**5 if rule.time_weight < 0.999 else 10**18
    assert rule.gap_variance(many, variance, layer_correlation=correlation) == pytest.approx(bound, rel=1e-15)
    if rule.refresh_every is not None:
        left = coefficients(rule, 7)[INITIAL] ** 2
        assert close(rule.gap_variance(7, variance, layer_correlation=correlation), Fraction(bound) * (1 - left))


@given(rule=rules, steps=steps_, gap=scales.filter(bool), variance=scales, other=st.none() | scales, correlation=to_one)
def test_misranking_bound(
    rule: Rule, steps: int, gap: float, variance: float, other: float | None, correlation: float
) -> None:
    tokens = Fraction(variance) + Fraction(variance if other is None else other)
    expected = sum(scores_of(rule, steps).values()) * Fraction(gap)
    exact = min(Fraction(1), token_variance(rule, steps, correlation) * tokens / expected**2)
    value = rule.misranking_bound(gap, variance, steps, other, correlation)
    assert close(value, exact)
    limit = rule.misranking_bound(gap, variance, other_variance=other, layer_correlation=correlation)
    assert 0 <= limit <= rule.misranking_bound(gap, variance, steps + 1, other, correlation) <= value <= 1
    if rule.refresh_every is None:
        assert limit == value
    else:
        ratio = Fraction(rule.variance_bound(variance, other, correlation)) / Fraction(gap) ** 2
        assert close(limit, min(Fraction(1), ratio))


@examples(25)
@given(
    rule=st.builds(
        Rule,
        alpha=below_one,
        layers=st.just(2),
        alpha_layer=st.none() | to_one,
        refresh_every=st.sampled_from([None, 1, 2]),
    ),
    better=st.fractions("1/2", "99/100", max_denominator=100),
    worse=st.fractions("1/100", "49/100", max_denominator=100),
)
def test_moments_and_misranking_of_coin_flips(rule: Rule, better: Fraction, worse: Fraction) -> None:
    """Every outcome of 0/1 scores over two steps, with its probability: nothing is assumed about m."""
    m = scores_of(rule, 2)
    outcomes = []
    for flips in itertools.product((0, 1), repeat=2 * len(m)):
        chances = [better] * len(m) + [worse] * len(m)
        chance = math.prod((p if flip else 1 - p for p, flip in zip(chances, flips, strict=True)), start=Fraction(1))
        signed = [*m.values(), *(-c for c in m.values())]
        outcomes.append((chance, sum(c * flip for c, flip in zip(signed, flips, strict=True))))
    mean = sum(p * gap for p, gap in outcomes)
    variance = sum(p * (gap - mean) ** 2 for p, gap in outcomes)
    delta, noise = float(better - worse), [float(p * (1 - p)) for p in (better, worse)]
    assert rule.expected_gap(2, delta) == pytest.approx(float(mean), rel=1e-13)
    assert rule.gap_variance(2, *noise) == pytest.approx(float(variance), rel=1e-13)
    misranked = float(sum(p for p, gap in outcomes if gap < 0))
    assert misranked <= rule.misranking_bound(delta, noise[0], 2, noise[1]) * (1 + 1e-13)


@given(alpha=below_one, layers=st.integers(1, 80), steps=st.integers(1, 10**5), variance=scales)
def test_layers_are_that_many_single_updates(alpha: float, layers: int, steps: int, variance: float) -> None:
    paper, real = Rule(alpha=alpha), Rule(alpha=alpha, layers=layers)
    equal = functools.partial(pytest.approx, rel=1e-15, abs=0)
    assert real.gap_variance(steps, variance) == equal(paper.gap_variance(layers * steps, variance))
    assert real.expected_gap(steps, 1) == equal(paper.expected_gap(layers * steps, 1))
    assert real.variance_bound(variance) == equal(paper.variance_bound(variance))
    assert real.misranking_bound(2.0, variance) == equal(paper.misranking_bound(2.0, variance))
    exact = 2 * (1 - Fraction(alpha)) / (1 + Fraction(alpha)) * Fraction(variance)
    assert close(real.variance_bound(variance), exact)


@given(low=below_one, high=below_one, layers=st.integers(1, 80), gap=scales.filter(bool), wider=scales.filter(bool))
def test_more_smoothing_and_wider_gaps_lower_the_bound(
    low: float, high: float, layers: int, gap: float, wider: float
) -> None:
    (low, high), (gap, wider) = sorted((low, high)), sorted((gap, wider))
    weak, strong = Rule(alpha=low, layers=layers), Rule(alpha=high, layers=layers)
    assert strong.variance_bound(1) <= weak.variance_bound(1)
    assert strong.misranking_bound(gap, 1) <= weak.misranking_bound(gap, 1)
    assert weak.misranking_bound(wider, 1) <= weak.misranking_bound(gap, 1)
    assert weak.effective_layers <= strong.effective_layers
    assert weak.half_life <= strong.half_life


@given(alpha=st.integers(1, 2**20 - 1).map(lambda n: n / 2**20), layers=st.integers(1, 80), every=st.integers(1, 9))
def test_half_life(alpha: float, layers: int, every: int) -> None:
    rule = Rule(alpha=alpha, layers=layers, refresh_every=every)
    assert rule.half_life == pytest.approx(every * math.log(0.5) / (layers * math.log(alpha)), rel=1e-9)
    assert Rule(alpha_time=alpha, layers=layers).half_life == pytest.approx(math.log(0.5) / math.log(alpha), rel=1e-9)
    if alpha < 0.999:
        assert math.exp(layers * math.log(alpha) * rule.half_life / every) == pytest.approx(0.5, rel=1e-9)


# alpha**K / effective layers / half-life in steps, per K and alpha (METHODS section 2, which prints the one 1.5009e-19 as
# 1e-19 where rounding gives 2e-19)
ALPHAS = (0.3, 0.6, 0.8, 0.9, 0.95)
TABLE = """
4   8e-3/1.8/0.14   0.13/3.1/0.34   0.41/3.8/0.78      0.66/3.9/1.64    0.81/4.0/3.38
16  4e-9/1.9/0.04   3e-4/4.0/0.08   0.028/8.5/0.19     0.19/13.1/0.41   0.44/15.2/0.84
28  2e-15/1.9/0.02  6e-7/4.0/0.05   1.9e-3/9.0/0.11    0.052/17.1/0.23  0.24/24.0/0.48
32  2e-17/1.9/0.02  8e-8/4.0/0.04   7.9e-4/9.0/0.10    0.034/17.7/0.21  0.19/26.3/0.42
36  2e-19/1.9/0.02  1e-8/4.0/0.04   3.2e-4/9.0/0.09    0.023/18.2/0.18  0.16/28.4/0.38
48  8e-26/1.9/0.01  2e-11/4.0/0.03  2.2e-5/9.0/0.06    6e-3/18.8/0.14   0.085/32.9/0.28
80  1e-42/1.9/0.01  2e-18/4.0/0.02  1.8e-8/9.0/0.04    2e-4/19.0/0.08   0.017/37.7/0.17
"""


@pytest.mark.parametrize("line", TABLE.strip().splitlines())
def test_the_published_table(line: str) -> None:
    layers, *cells = line.split()
    for alpha, cell in zip(ALPHAS, cells, strict=True):
        rule = Rule(alpha=alpha, layers=int(layers))
        for value, printed in zip(
            (rule.time_weight, rule.effective_layers, rule.half_life), cell.split("/"), strict=True
        ):
            digit = Decimal(printed).as_tuple().exponent
            assert abs(Decimal(value) - Decimal(printed)) <= Decimal((0, (5,), int(digit) - 1)), (alpha, printed, value)


@pytest.mark.parametrize("alpha", [0.0, 5e-324, 0.8, 1 - 2**-53])
@pytest.mark.parametrize("layer", [None, 0.0, 1 - 2**-53, 1.0])
@pytest.mark.parametrize("layers", [1, 80])
def test_extremes_stay_finite(alpha: float, layer: float | None, layers: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = Rule(alpha=alpha, layers=layers, alpha_layer=layer)
        bound = rule.variance_bound(1.0, 3.0, 0.25)
        assert 0 < rule.gap_variance(1, 1.0, 3.0, 0.25) <= rule.gap_variance(10**5, 1.0, 3.0, 0.25) <= bound <= 4
        assert 0 < rule.expected_gap(10**5, 1e300) <= 1e300
        assert 0 <= rule.misranking_bound(1e300, 1e-300, 10**5) < 1e-300
        assert rule.misranking_bound(5e-324, 1.0, 10**5) == 1.0
        assert sum(rule.layer_weights()) == pytest.approx(1, abs=1e-14)
        assert 0 <= rule.half_life < math.inf
    if layer == 1:
        assert rule.layer_weights() == [1 / layers] * layers and rule.effective_layers == layers
    if layer == 0 or (layer is None and alpha == 0):
        assert rule.layer_weights() == [0.0] * (layers - 1) + [1.0] and rule.effective_layers == 1
    if alpha == 0:
        assert rule.time_weight == 0 and rule.half_life == 0.0 and rule.initial_weight(1) == 0
        assert rule.expected_gap(1, 2.5) == 2.5


def test_many_steps_of_weights() -> None:
    weights = Rule(alpha_time=0.999, layers=1, refresh_every=10).weights(10**5)
    assert len(weights) == 10**5 and weights[10**5 - 10] == [pytest.approx(0.001)]
    assert math.fsum(itertools.chain(*weights)) == pytest.approx(1 - 0.999**10**4)


def test_score_free_never_forgets() -> None:
    rule = Rule(layers=4, refresh_every=None)
    assert rule.half_life == math.inf
    assert rule.weights(3)[1:] == [[0.0] * 4] * 2
    assert rule.updates(10**9) == 1
    assert rule.expected_gap(10**9, 1) == pytest.approx(1 - 0.8**4)
    # Chebyshev's ratio does not notice that m is small: the layers' mean of one step, whatever A is.
    assert rule.misranking_bound(1, 0.1) == pytest.approx(2 * 0.1 / rule.effective_layers)


def test_known_values_at_the_defaults() -> None:
    """The paper's factor 2 (1 - 0.8) / (1 + 0.8) = 2 / 9; at K = 32 one step is all there is."""
    assert Rule().variance_bound(1) == Rule(layers=32).variance_bound(1) == pytest.approx(2 / 9, rel=1e-15)
    assert Rule().misranking_bound(0.5, 0.1) == pytest.approx(0.8 / 9, rel=1e-15)
    assert Rule().gap_variance(1, 1) == pytest.approx(0.08, rel=1e-15)
    assert Rule(layers=32).gap_variance(1, 1) == pytest.approx(2 / 9, rel=1e-6)
    assert Rule(layers=32).variance_bound(1, layer_correlation=1) == pytest.approx(2, rel=2e-3)
    assert Rule(layers=32, alpha_time=0.8).variance_bound(1, layer_correlation=1) == pytest.approx(2 / 9, rel=1e-15)
    assert Rule(layers=10, alpha_time=0.5, alpha_layer=1).variance_bound(1) == pytest.approx(2 / 30, rel=1e-15)


# Settings


@pytest.mark.parametrize(
    ("settings_", "rule"),
    [
        ({}, Rule(layers=7)),
        ({"alpha": 0.5, "refresh_every": 4}, Rule(alpha=0.5, layers=7, refresh_every=4)),
        ({"refresh_every": None, "scorer": "vnorm"}, Rule(layers=7, refresh_every=None)),
        ({"alpha_time": 0.9, "alpha_layer": 1.0}, Rule(layers=7, alpha_time=0.9, alpha_layer=1.0)),
        ({"aggregator": "single_step"}, Rule(layers=7, alpha_time=0.0, alpha_layer=0.0)),
    ],
)
def test_of_config(settings_: dict[str, Any], rule: Rule) -> None:
    assert Rule.of(Config(**settings_), 7) == rule


def test_single_step_is_the_last_layer_of_the_last_refresh() -> None:
    rule = Rule.of(Config(aggregator="single_step", refresh_every=2), 2)
    assert rule.weights(4) == [[0, 0], [0, 0], [0, 1], [0, 0]]
    assert rule.variance_bound(0.25, 0.5) == 0.75


def test_cumulative_has_no_bound() -> None:
    with pytest.raises(
        ConfigError, match=r"'cumulative' has no stability bound: .* Use aggregator='ema' or 'single_step'"
    ):
        Rule.of(Config(aggregator="cumulative"), 4)


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"alpha": 1.0}, "alpha=1.0 is outside [0, 1)"),
        ({"alpha": math.nan}, "alpha=nan is outside [0, 1)"),
        ({"alpha_time": 1}, "alpha_time=1 is outside [0, 1)"),
        ({"alpha_layer": 1.5}, "alpha_layer=1.5 is outside [0, 1]"),
        ({"refresh_every": 0}, "refresh_every=0 is below 1"),
        ({"layers": 0}, "layers=0 is not a number of eligible layers: pass a whole number, 1 or more."),
        ({"layers": 2.0}, "layers=2.0 is not a number of eligible layers: pass a whole number, 1 or more."),
        ({"layers": True}, "layers=True is not a number of eligible layers: pass a whole number, 1 or more."),
    ],
)
def test_bad_rules(settings_: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Rule(**settings_)


STEPS = "is not a number of decode steps: pass a whole number, 1 or more."
GAP = "is not the larger expected score minus the smaller: pass a finite number above 0."
VARIANCE = "is not the variance of a token's score: pass a finite number, 0 or more."


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("updates", {"steps": 0}, f"steps=0 {STEPS}"),
        ("weights", {"steps": -1}, f"steps=-1 {STEPS}"),
        ("initial_weight", {"steps": 1.0}, f"steps=1.0 {STEPS}"),
        ("expected_gap", {"steps": 0, "gap": 1}, f"steps=0 {STEPS}"),
        ("expected_gap", {"steps": 1, "gap": 0}, f"gap=0 {GAP}"),
        ("gap_variance", {"steps": True, "variance": 1}, f"steps=True {STEPS}"),
        ("gap_variance", {"steps": 1, "variance": -0.5}, f"variance=-0.5 {VARIANCE}"),
        ("gap_variance", {"steps": 1, "variance": "1"}, f"variance='1' {VARIANCE}"),
        ("variance_bound", {"variance": math.nan}, f"variance=nan {VARIANCE}"),
        ("variance_bound", {"variance": math.inf}, f"variance=inf {VARIANCE}"),
        ("variance_bound", {"variance": 1, "other_variance": -1}, "other_variance=-1 is not the variance of the other"),
        (
            "variance_bound",
            {"variance": 1, "layer_correlation": 1.5},
            "layer_correlation=1.5 is not a correlation: pass 0 (independent layers) to 1 (every layer says the same).",
        ),
        ("misranking_bound", {"gap": -1.0, "variance": 1}, f"gap=-1.0 {GAP}"),
        ("misranking_bound", {"gap": math.inf, "variance": 1}, f"gap=inf {GAP}"),
        ("misranking_bound", {"gap": 1, "variance": 1, "steps": 0}, f"steps=0 {STEPS}"),
        ("misranking_bound", {"gap": 1, "variance": 1, "layer_correlation": -0.1}, "layer_correlation=-0.1 is not a"),
    ],
)
@pytest.mark.parametrize("every", [1, None])
def test_bad_arguments(method: str, arguments: dict[str, Any], message: str, every: int | None) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        getattr(Rule(refresh_every=every), method)(**arguments)
