"""Proposition 1: the expressions of `verify/theory/recurrence.py` against closed forms, typed in here and only here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import sympy

from inertia_fx.verify.theory import derivation, symbols

S = symbols()
a, at, al = S["alpha"], S["alpha_time"], S["alpha_layer"]
T, tau, K, layer, r = S["steps"], S["step"], S["layers"], S["layer"], S["refresh_every"]
delta, sigma2, other2, rho = S["gap"], S["variance"], S["other_variance"], S["layer_correlation"]
PROCESSES = ("paper", "sequential", "lazy", "score_free", "apart")


def known(name: str) -> Any:
    return derivation()[name]


def same(a: Any, b: Any) -> bool:
    return sympy.simplify(a - b) == 0


def generic(expression: Any) -> Any:
    """For alpha and alpha_layer other than 1."""
    return expression.subs(sympy.Eq(al, 1), False).subs(sympy.Eq(a, 1), False)


def test_derivation_is_a_read_only_mapping_of_expressions_in_its_symbols() -> None:
    general = {"layer_weight", "layer_variance", "effective_layers", "updates", "half_life"}
    parts = ("weight", "step_weight", "initial_weight", "expected_gap", "expected_gap_limit", "gap_variance")
    parts += ("gap_variance_limit", "misranking", "misranking_limit")
    assert set(derivation()) == general | {f"{process}.{part}" for process in PROCESSES for part in parts}
    assert all(isinstance(e, sympy.Expr) and e.free_symbols <= set(S.values()) for e in derivation().values())
    assert derivation() is derivation()
    with pytest.raises(TypeError):
        derivation()["half_life"] = 0  # type: ignore[index]


def test_the_papers_closed_forms() -> None:
    assert same(known("paper.weight"), (1 - a) * a ** (T - tau))
    assert same(known("paper.initial_weight"), a**T)
    assert same(known("paper.expected_gap"), (1 - a**T) * delta)
    assert same(known("paper.expected_gap_limit"), delta)
    one = {other2: sigma2}
    assert same(known("paper.gap_variance").subs(one), 2 * (1 - a) / (1 + a) * (1 - a ** (2 * T)) * sigma2)
    assert same(known("paper.gap_variance_limit").subs(one), 2 * (1 - a) / (1 + a) * sigma2)
    assert same(known("paper.misranking_limit").subs(one), 2 * (1 - a) * sigma2 / ((1 + a) * delta**2))
    assert same(known("paper.misranking"), known("paper.misranking_limit") * (1 + a**T) / (1 - a**T))


def test_the_sequential_rules_closed_forms() -> None:
    assert same(known("sequential.weight"), (1 - a) * a ** (K - layer) * a ** (K * (T - tau)))
    assert same(known("sequential.initial_weight"), a ** (K * T))
    assert same(known("sequential.expected_gap"), (1 - a ** (K * T)) * delta)
    tokens = sigma2 + other2
    bound = known("sequential.gap_variance_limit")
    assert same(bound.subs(rho, 0), (1 - a) / (1 + a) * tokens)  # the paper's, for any number of layers
    assert same(bound.subs(rho, 1), (1 - a**K) / (1 + a**K) * tokens)
    assert same(known("sequential.gap_variance"), bound * (1 - a ** (2 * K * T)))
    assert same(generic(known("effective_layers")), (1 + al) / (1 - al) * (1 - al**K) / (1 + al**K))
    assert known("effective_layers").subs(al, 1) == K
    assert known("layer_weight").subs(al, 1) == 1 / K
    assert same(known("half_life"), r * sympy.log(sympy.Rational(1, 2)) / sympy.log(at))


def test_solved_recurrence_agrees_with_summed_weights_over_time() -> None:
    """With layers that all say the same (correlation 1), so that only time is left."""
    newest = known("apart.step_weight").subs(tau, T)
    age = sympy.Symbol("age", integer=True, nonnegative=True)
    decay = known("apart.step_weight").subs(tau, T - age) / newest
    sums = [sympy.summation(sympy.powsimp(term), (age, 0, T - 1)) for term in (decay, decay**2)]
    total, squares = (term.subs({sympy.Eq(at, 1): False, sympy.Eq(at**2, 1): False}) for term in sums)
    assert same(newest * total * delta, known("apart.expected_gap"))
    assert same(newest * total + known("apart.initial_weight"), 1)
    assert same(newest**2 * squares * (sigma2 + other2), generic(known("apart.gap_variance").subs(rho, 1)))


@pytest.mark.parametrize("process", ["sequential", "apart"])
def test_summed_weights_over_layers(process: str) -> None:
    base = {"sequential": a, "apart": al}[process]
    age = sympy.Symbol("age", integer=True, nonnegative=True)
    weight = generic(known(f"{process}.weight")).subs(tau, T)
    newest = weight.subs(layer, K)
    decay = sympy.powsimp(weight.subs(layer, K - age) / newest)
    sums = [sympy.summation(term, (age, 0, K - 1)) for term in (decay, decay**2)]
    total, squares = (term.subs({sympy.Eq(base, 1): False, sympy.Eq(base**2, 1): False}) for term in sums)
    step = known(f"{process}.step_weight").subs(tau, T)
    assert same(newest * total, step)
    assert same(total**2 / squares, generic(known("effective_layers")).subs(al, base))
    variance = generic(known(f"{process}.gap_variance")).subs({T: 1, rho: 0})
    assert same(variance / (step**2 * (sigma2 + other2)), squares / total**2)


def test_the_sequential_rule_is_the_papers_with_more_updates() -> None:
    updates = {T: K * T, tau: (tau - 1) * K + layer}
    for part in ("weight", "initial_weight", "expected_gap", "gap_variance", "misranking", "gap_variance_limit"):
        paper = known(f"paper.{part}").subs(updates, simultaneous=True)
        assert same(paper, known(f"sequential.{part}").subs(rho, 0)), part


def test_apart_contains_the_sequential_rule() -> None:
    for part in ("weight", "step_weight", "expected_gap", "gap_variance", "gap_variance_limit", "misranking"):
        coupled = generic(known(f"apart.{part}").subs({at: a**K, al: a}))
        assert same(coupled, known(f"sequential.{part}")), part


@pytest.mark.parametrize(("steps", "every"), [(1, 1), (4, 4), (5, 4), (9, 4), (10, 3), (3, 100)])
def test_lazy_is_the_sequential_rule_after_fewer_steps(steps: int, every: int) -> None:
    updates = math.ceil(steps / every)
    assert known("updates").subs({T: steps, r: every}) == updates
    for part in ("initial_weight", "expected_gap", "gap_variance", "misranking"):
        lazy = known(f"lazy.{part}").subs({T: steps, r: every})
        assert same(lazy, known(f"sequential.{part}").subs(T, updates)), part
    for update in range(1, updates + 1):
        lazy = known("lazy.weight").subs({T: steps, r: every, tau: 1 + (update - 1) * every})
        assert same(lazy, known("sequential.weight").subs({T: updates, tau: update}))


def test_score_free_is_the_first_step() -> None:
    for part in ("weight", "initial_weight", "expected_gap", "gap_variance", "misranking"):
        assert same(known(f"score_free.{part}"), known(f"sequential.{part}").subs({T: 1, tau: 1})), part
    one_step = generic(known("layer_variance").subs(al, a)) * (sigma2 + other2) / delta**2
    assert same(known("score_free.misranking"), one_step) and same(known("score_free.misranking_limit"), one_step)


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
def test_layer_variance_is_the_sum_over_the_covariance_matrix(layers: int) -> None:
    w = sympy.Matrix([generic(known("layer_weight")).subs({K: layers, layer: number + 1}) for number in range(layers)])
    covariance = sympy.Matrix(layers, layers, lambda i, j: 1 if i == j else rho)
    assert sympy.simplify(sum(w)) == 1
    assert same(generic(known("layer_variance")).subs(K, layers), (w.T * covariance * w)[0])


@pytest.mark.parametrize(("process", "base"), [("paper", a), ("sequential", a**K), ("apart", at)])
def test_share_of_the_bound_that_is_reached(process: str, base: Any) -> None:
    parts = ("gap_variance", "gap_variance_limit", "misranking", "misranking_limit")
    variance, bound, misranking, limit = (known(f"{process}.{part}") for part in parts)
    assert same(variance / bound, 1 - base ** (2 * T))
    assert same(misranking / limit, (1 + base**T) / (1 - base**T))


def test_the_share_grows_to_one_and_the_misranking_bound_falls() -> None:
    x = sympy.Symbol("x", positive=True)
    base = 1 / (1 + x)  # anything between 0 and 1
    share = (known("paper.gap_variance") / known("paper.gap_variance_limit")).subs(a, base)
    assert sympy.factor(share.subs(T, T + 1) - share).is_positive and sympy.simplify(1 - share).is_positive
    excess = (known("paper.misranking") / known("paper.misranking_limit")).subs(a, base)
    falls = sympy.factor(
        sympy.simplify(excess - excess.subs(T, T + 1)).subs((1 + x) ** T, 1 + sympy.Symbol("y", positive=True))
    )
    assert falls.is_positive
    assert sympy.limit(share, T, sympy.oo) == sympy.limit(excess, T, sympy.oo) == 1
