"""Derive Proposition 1 of the paper from the recurrence, for the rule that really runs as well as for the ideal one.

The paper shows that smoothing keeps two tokens in order for an idealised process with one update per decode step. The
library updates the momentum once per layer (SPEC, "The recurrence, unrolled"), with Lazy on some steps only, or with
`alpha_time` and `alpha_layer` set apart. :func:`derivation` derives the gap, its variance and the misranking bound of all
of these with sympy: the recurrence is solved, weights are summed, limits taken, no closed form is typed in. As in the
paper the tokens are fixed (none enters, none is evicted), m_0 = 0, and scores are i.i.d. over time and independent across
tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

# sympy takes half a second to import, so the functions that need it do it.


@functools.cache
def symbols() -> Mapping[str, Any]:
    """Return the sympy symbols of :func:`derivation` by name, which are those of :class:`.bounds.Rule`'s arguments.

    `layer` (1..layers) and `step` (1..steps) say which score a weight belongs to.
    """
    import sympy

    real = ("alpha", "alpha_time", "alpha_layer", "gap", "variance", "other_variance", "layer_correlation")
    whole = ("layers", "layer", "steps", "step", "refresh_every")
    table = {name: sympy.Symbol(name, positive=True) for name in real}
    return MappingProxyType(table | {name: sympy.Symbol(name, positive=True, integer=True) for name in whole})


@functools.cache
def derivation() -> Mapping[str, Any]:
    """Derive the bounds as sympy expressions in :func:`symbols`, from the recurrence alone.

    Source: paper, section 5.3 and appendix A (Proposition 1); SPEC, "The recurrence, unrolled".

    Returns:
        A read-only mapping from name to expression. There are five processes:

        - ``paper``: m = alpha * m + (1 - alpha) * s once per step, the idealised one;
        - ``sequential``: the same once per layer, `layers` times per step, what the default settings compute;
        - ``lazy``: ``sequential`` on steps 1, 1 + r, 1 + 2r, ... only, r = `refresh_every`;
        - ``score_free``: ``sequential`` on step 1 only;
        - ``apart``: m = alpha_time * m + (1 - alpha_time) * (weighted mean of the layers' scores) once per step.

        Of each of them, of ``paper`` say, these are known:

        - ``paper.weight``: that of the score of `layer` at `step` (a refresh step) in the momentum after `steps` steps;
        - ``paper.step_weight``: the sum of it over the layers;
        - ``paper.initial_weight``: that of m_0;
        - ``paper.expected_gap`` and its limit ``paper.expected_gap_limit``, for mean scores that differ by `gap`;
        - ``paper.gap_variance`` and its limit ``paper.gap_variance_limit``: the limit times one minus a square that
          shrinks with every update, so the variance grows and the limit bounds it;
        - ``paper.misranking`` and its limit ``paper.misranking_limit``: Chebyshev's bound on the probability that the
          token with the smaller mean is ahead: variance / expected gap squared, not capped at 1.

        Besides: ``layer_weight`` (of `layer` within a step; they sum to 1), ``layer_variance`` (of a step's weighted
        mean of layers' scores of variance 1), ``effective_layers``, ``updates`` (refreshes in `steps` steps) and
        ``half_life`` (in steps).
    """
    import sympy

    s = symbols()
    n, every, layers, ratio = s["steps"], s["refresh_every"], s["layers"], s["alpha_layer"]
    old, new, rate = sympy.symbols("old new rate", positive=True)
    age = sympy.Symbol("age", integer=True, nonnegative=True)
    f = sympy.Function("f")

    # One filter, f = old * f + new: what n updates leave of f(0) = 1, and what n inputs make of f(0) = 0.
    left, filled = (
        sympy.rsolve(f(n) - old * f(n - 1) - added, f(n), {f(0): start}) for added, start in ((0, 1), (new, 0))
    )
    end = sympy.limit(filled.subs(old, sympy.exp(-rate)), n, sympy.oo).subs(rate, -sympy.log(old))  # 0 < old < 1
    missing = sympy.simplify(1 - filled / end)

    # Within a step the layers are such a filter too: a score is layers - layer updates old when the step ends.
    aged = left.subs({old: ratio, n: age})
    total, squares = (sympy.summation(term, (age, 0, layers - 1)) for term in (aged, aged**2))
    squares = squares.subs(sympy.Eq(ratio**2, 1), sympy.Eq(ratio, 1))  # ratio is not negative
    effective = sympy.factor(sympy.piecewise_fold(total**2 / squares), deep=True)
    layer_weight = aged.subs(age, layers - s["layer"]) / total

    # Per process: what an update leaves of the old and adds, effective layers, each layer's share of what is added,
    # updates so far, updates since the score in question. Refresh number `age` comes at step 1 + (age - 1) * every.
    alpha, one = s["alpha"], sympy.Integer(1)
    totals = [term.subs(ratio, alpha).subs(sympy.Eq(alpha, 1), False) for term in (total, effective, layer_weight)]
    sequential = (left.subs({old: alpha, n: layers}), (1 - alpha) * totals[0], totals[1], totals[2])
    updates = sympy.floor(sympy.solve(1 + (age - 1) * every - n, age)[0])
    processes = {
        "paper": (alpha, 1 - alpha, one, one, n, n - s["step"]),
        "sequential": (*sequential, n, n - s["step"]),
        "lazy": (*sequential, updates, updates - updates.subs(n, s["step"])),
        "score_free": (*sequential, one, one - one),
        "apart": (s["alpha_time"], 1 - s["alpha_time"], effective, layer_weight, n, n - s["step"]),
    }
    tokens = s["variance"] + s["other_variance"]  # independent, with weights 1 and -1 in the gap
    rho = s["layer_correlation"]
    results = {
        "layer_weight": layer_weight,
        # sum w = 1, so of the products w_i * w_j all pairs make 1 and the pairs of one layer with itself 1 / effective
        "layer_variance": 1 / effective + rho * (1 - 1 / effective),
        "effective_layers": effective,
        "updates": updates,
        "half_life": sympy.solve(left.subs({old: s["alpha_time"], n: n / every}) - sympy.Rational(1, 2), n)[0],
    }
    for name, (kept, added, voters, weight, done, since) in processes.items():
        gap_limit = sympy.cancel(end.subs({new: added * s["gap"], old: kept}))
        # Variances follow the same filter with squared coefficients.
        shared = sympy.cancel(end.subs({new: added**2, old: kept**2}, simultaneous=True))
        alone = sympy.powsimp(shared / voters)
        bound = (alone + rho * (shared - alone)) * tokens
        gap = gap_limit * (1 - missing.subs(n, done).subs(old, kept))
        variance = bound * (1 - missing.subs(n, done).subs(old, kept**2))
        if not done.has(n):
            gap_limit, bound = gap, variance
        results |= {
            f"{name}.weight": added * weight * left.subs(n, since).subs(old, kept),
            f"{name}.step_weight": added * left.subs(n, since).subs(old, kept),
            f"{name}.initial_weight": left.subs(n, done).subs(old, kept),
            f"{name}.expected_gap": gap,
            f"{name}.expected_gap_limit": gap_limit,
            f"{name}.gap_variance": variance,
            f"{name}.gap_variance_limit": bound,
            f"{name}.misranking": variance / gap**2,
            f"{name}.misranking_limit": bound / gap_limit**2,
        }
    return MappingProxyType(results)
