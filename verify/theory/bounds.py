"""Evaluate Proposition 1 of the paper, as :mod:`.recurrence` derives it, for the rule of a Config."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

from ...config import Config
from ...errors import ConfigError
from .recurrence import derivation

# sympy and mpmath take half a second to import, so the functions that need them do it.

DIGITS = 50  # a float would cancel in 1 - alpha**n near alpha = 1; mpmath's exponents do not underflow either

NUMBER, LARGEST, SMALLEST = (int, float), sys.float_info.max, math.ulp(0.0)
RANGES: dict[str, tuple[Any, float, float, str]] = {
    "layers": (int, 1, math.inf, "a number of eligible layers: pass a whole number, 1 or more"),
    "steps": (int, 1, math.inf, "a number of decode steps: pass a whole number, 1 or more"),
    "gap": (NUMBER, SMALLEST, LARGEST, "the larger expected score minus the smaller: pass a finite number above 0"),
    "variance": (NUMBER, 0, LARGEST, "the variance of a token's score: pass a finite number, 0 or more"),
    "other_variance": (NUMBER, 0, LARGEST, "the variance of the other token's score: pass a finite number, 0 or more"),
    "layer_correlation": (NUMBER, 0, 1, "a correlation: pass 0 (independent layers) to 1 (every layer says the same)"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule by which scores become momentum, and Proposition 1's numbers for it.

    Scores are in any unit; gaps are in that unit, variances in its square. Numbers are computed with 50 digits, so they
    are right for every `alpha`, `layers` and `steps`.

    Args:
        alpha: weight of the old momentum in each layer's update, 0 <= alpha < 1.
        layers: K, the eligible layers. 1 is the paper's idealised process with one update per step.
        alpha_time: weight of the previous step's momentum, 0 <= alpha_time < 1; default alpha**layers.
        alpha_layer: weight ratio from a layer to the next later one, 0 <= alpha_layer <= 1; default alpha.
        refresh_every: r, update at steps 1, 1 + r, 1 + 2r, ... only; ``None`` at step 1 only (Score-Free).

    Raises:
        ConfigError: here and in every method, an argument is out of range or of the wrong type.
    """

    alpha: float = 0.8
    layers: int = 1
    alpha_time: float | None = None
    alpha_layer: float | None = None
    refresh_every: int | None = 1

    def __post_init__(self) -> None:
        settings = {name: value for name, value in dataclasses.asdict(self).items() if name != "layers"}
        Config(**settings)
        _checked(layers=self.layers)

    @classmethod
    def of(cls, config: Config, layers: int) -> Rule:
        """Return the rule of `config` on a model with `layers` eligible layers.

        ``aggregator="single_step"`` is alpha_time = alpha_layer = 0 (SPEC D11). Any `scorer` will do: its scores have a
        mean and a variance. `pool_width` is left out: the momentum is that before pooling.

        Raises:
            ConfigError: ``aggregator="cumulative"``, or `layers` below 1.
        """
        if config.aggregator == "cumulative":
            raise ConfigError(
                "aggregator='cumulative' has no stability bound: a sum forgets nothing, so the variance of its gap grows"
                " without limit. Use aggregator='ema' or 'single_step'."
            )
        time, layer = (0.0, 0.0) if config.aggregator == "single_step" else (config.alpha_time, config.alpha_layer)
        every = config.refresh_every
        return cls(alpha=config.alpha, layers=layers, alpha_time=time, alpha_layer=layer, refresh_every=every)

    @property
    def time_weight(self) -> float:
        """Return A, what one refresh leaves of the momentum before it: alpha**layers unless `alpha_time` says otherwise."""
        return float(self._settings["alpha_time"])

    @property
    def effective_layers(self) -> float:
        """Return (sum w)**2 / sum w**2 over the layers' weights: 1 (the last layer alone) to `layers` (all equal)."""
        return float(self._number("effective_layers"))

    @property
    def half_life(self) -> float:
        """Return the decode steps in which a weight halves: 0.0 where A = 0, below 1 where A < 1/2, infinity for Score-Free."""
        return math.inf if self.refresh_every is None else float(self._number("half_life"))

    def layer_weights(self) -> list[float]:
        """Return the layers' weights within one step, in model order; they sum to 1."""
        return [float(self._number("layer_weight", layer=layer)) for layer in range(1, self.layers + 1)]

    def updates(self, steps: int) -> int:
        """Count the refreshes in `steps` decode steps: ceil(steps / refresh_every), or 1 for Score-Free (SPEC, invariant 5)."""
        _checked(steps=steps)
        return 1 if self.refresh_every is None else int(self._number("updates", steps=steps))

    def weights(self, steps: int) -> list[list[float]]:
        """Return the weight of every past score in the momentum after `steps` steps: [steps][layers]; 0 without a refresh."""
        updates, layers = self.updates(steps), self.layer_weights()
        weights = [[0.0] * self.layers for _ in range(steps)]
        for update in range(1, updates + 1):
            share = float(self._number("apart.step_weight", steps=updates, step=update))
            weights[(update - 1) * (self.refresh_every or 1)] = [share * weight for weight in layers]
        return weights

    def initial_weight(self, steps: int) -> float:
        """Return the weight of m_0 in the momentum after `steps` steps; with the sum of :meth:`weights` it makes 1."""
        return float(self._after(steps, "apart.initial_weight"))

    def expected_gap(self, steps: int, gap: float) -> float:
        """Return E[m(i) - m(j)] after `steps` steps for E[s(i) - s(j)] = `gap` > 0, to which it tends (paper, Proposition 1a)."""
        return float(self._after(steps, "apart.expected_gap", **_checked(gap=gap)))

    def gap_variance(
        self, steps: int, variance: float, other_variance: float | None = None, layer_correlation: float = 0.0
    ) -> float:
        """Return Var[m(i) - m(j)] after `steps` steps, exactly. It grows with `steps`, up to :meth:`variance_bound`.

        Args:
            steps: decode steps, at least 1.
            variance: that of one token's score in one layer, 0 or more.
            other_variance: that of the other token's score; default the same.
            layer_correlation: between a token's scores in two layers of the same step, 0 (independent) to 1 (every
                layer says the same).
        """
        return float(self._after(steps, "apart.gap_variance", **_noise(variance, other_variance, layer_correlation)))

    def variance_bound(
        self, variance: float, other_variance: float | None = None, layer_correlation: float = 0.0
    ) -> float:
        """Return the limit of :meth:`gap_variance`, never exceeded (paper, Proposition 1b). Arguments as there.

        With independent layers and `alpha` alone it is the paper's 2 (1 - alpha) / (1 + alpha) variance for any number
        of layers. Score-Free stays at its first step.
        """
        return float(self._after(None, "apart.gap_variance", **_noise(variance, other_variance, layer_correlation)))

    def misranking_bound(
        self,
        gap: float,
        variance: float,
        steps: int | None = None,
        other_variance: float | None = None,
        layer_correlation: float = 0.0,
    ) -> float:
        """Return Chebyshev's bound on Pr[m(i) < m(j)] for a token i that has the larger expected score; at most 1.

        Args:
            gap: E[s(i) - s(j)], above 0.
            variance, other_variance, layer_correlation: as in :meth:`gap_variance`.
            steps: decode steps; ``None`` is the limit (paper, Proposition 1c). The bound falls towards it, because the
                variance fills up sooner than the squared gap: at finite `steps` the limit is not a bound.
        """
        noise = _noise(variance, other_variance, layer_correlation)
        return min(1.0, float(self._after(steps, "apart.misranking", **_checked(gap=gap), **noise)))

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        coupled = _evaluate("sequential.initial_weight", alpha=self.alpha, layers=self.layers, steps=1)
        return {
            "alpha_time": coupled if self.alpha_time is None else self.alpha_time,
            "alpha_layer": self.alpha if self.alpha_layer is None else self.alpha_layer,
            "layers": self.layers,
            "refresh_every": self.refresh_every,
        }

    def _number(self, name: str, **values: float) -> Any:
        return _evaluate(name, **self._settings, **values)

    def _after(self, steps: int | None, name: str, **values: float) -> Any:
        """Evaluate an expression of one update per step after as many steps as there are updates; None is its limit."""
        if steps is None and self.refresh_every is not None:
            return self._number(f"{name}_limit", **values)
        return self._number(name, steps=self.updates(1 if steps is None else steps), **values)


@functools.cache
def _compiled(name: str) -> tuple[list[str], Callable[..., Any]]:
    """Compile an expression of :func:`derivation` to a function, and the names of its arguments."""
    import sympy

    arguments = sorted(derivation()[name].free_symbols, key=str)
    return [str(symbol) for symbol in arguments], sympy.lambdify(arguments, derivation()[name], modules="mpmath")


def _evaluate(name: str, **values: Any) -> Any:
    import mpmath

    arguments, function = _compiled(name)
    with mpmath.workdps(DIGITS):
        return function(*(mpmath.mpf(values[argument]) for argument in arguments))


def _checked(**values: Any) -> dict[str, Any]:
    for name, value in values.items():
        kind, least, largest, meaning = RANGES[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value <= largest:
            raise ConfigError(f"{name}={value!r} is not {meaning}.")
    return values


def _noise(variance: float, other_variance: float | None, layer_correlation: float) -> dict[str, float]:
    other = variance if other_variance is None else other_variance
    return _checked(variance=variance, other_variance=other, layer_correlation=layer_correlation)
