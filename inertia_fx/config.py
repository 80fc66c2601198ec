"""The settings of one compiled model or one cache, validated once, at the boundary."""

from __future__ import annotations

import dataclasses
import functools
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any, Literal, get_args

from .errors import ConfigError

Aggregator = Literal["ema", "cumulative", "single_step"]
Scorer = Literal["attention", "vnorm", "entropy"]


class _DefaultRatio(float):
    """0.9 as the default of `ratio`, told apart from a 0.9 that the user wrote (which excludes `budget`)."""


DEFAULT_RATIO = _DefaultRatio(0.9)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What to keep, and how usefulness is measured (SPEC: InertiaKV, arXiv 2609.03515, sections 3 and 4).

    Args:
        ratio: fraction of the prompt's cached tokens that is **evicted**, 0 <= ratio < 1. 0.9 keeps a tenth. Read as
            the decimal you wrote, so 0.9 of 1000 tokens keeps exactly 100. A ``Fraction`` or ``Decimal`` is taken as is.
        alpha: weight of the *old* momentum in ``m = alpha * m + (1 - alpha) * s``, applied once per layer,
            0 <= alpha < 1. 0 is the last layer's newest scores alone.
        refresh_every: read scores at decode steps 1, 1 + r, 1 + 2r, ...; 1 is full refresh, 4 is InertiaKV-Lazy4,
            ``None`` scores at step 1 only (Score-Free).
        evict_after: let the first eviction wait until this decode step; storage is P + evict_after slots until then.
        pool_width: odd; before the first eviction each momentum becomes the largest one within (pool_width - 1) / 2
            neighbouring positions, so that a span is kept or lost whole.
        budget: absolute number of tokens to keep, instead of `ratio`.
        min_budget: smallest budget that `ratio` may ask for (1 is the literal paper); ignored with `budget`.
        aggregator: "ema", "cumulative" (m = m + s in every layer) or "single_step" (m = s of the last layer).
        scorer: "attention", "vnorm" (weighted by value norms) or "entropy" (weighted by each layer's entropy).
        alpha_time: weight of the previous step's momentum; default alpha**K for K layers.
        alpha_layer: weight ratio from a layer to the next later one, 0 (last layer alone) to 1 (all equal); default alpha.
        protect_first: never evict the first n tokens of the text.
        protect_recent: never evict the n newest tokens.

    Raises:
        ConfigError: a value is out of range, of the wrong type, unknown or contradicts another one.
    """

    ratio: float | Fraction | Decimal | str = DEFAULT_RATIO
    alpha: float = 0.8
    refresh_every: int | None = 1
    evict_after: int = 1
    pool_width: int = 1
    budget: int | None = None
    min_budget: int = 64
    aggregator: Aggregator = "ema"
    scorer: Scorer = "attention"
    alpha_time: float | None = None
    alpha_layer: float | None = None
    protect_first: int = 0
    protect_recent: int = 0

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)
        if self.budget is not None:
            _check_int("budget", self.budget, 1)
            if self.ratio is not DEFAULT_RATIO:
                raise ConfigError(
                    f"ratio={self.ratio} and budget={self.budget} both say how many tokens to keep: pass one of them."
                )
        if self.refresh_every is not None:
            _check_int("refresh_every", self.refresh_every, 1, hint="None scores at the first decode step only")
        _check_int("evict_after", self.evict_after, 1, hint="1 evicts at the first decode step")
        _check_int("pool_width", self.pool_width, 1, hint="1 is no pooling")
        if self.pool_width % 2 == 0:
            raise ConfigError(
                f"pool_width={self.pool_width} is even: it spans a token and as many neighbours on either side, so it"
                f" must be odd. Use {self.pool_width - 1} or {self.pool_width + 1}."
            )
        _check_int("min_budget", self.min_budget, 1, hint="1 is the literal paper")
        _check_name("aggregator", self.aggregator, get_args(Aggregator))
        _check_name("scorer", self.scorer, get_args(Scorer))
        _check_weight("alpha", self.alpha, one_allowed=False)
        for name, one_allowed in (("alpha_time", False), ("alpha_layer", True)):
            if getattr(self, name) is not None:
                _check_weight(name, getattr(self, name), one_allowed=one_allowed)
                if self.aggregator != "ema":
                    raise ConfigError(
                        f"{name} belongs to aggregator='ema'; with aggregator={self.aggregator!r} leave it out."
                    )
        _check_int("protect_first", self.protect_first, 0)
        _check_int("protect_recent", self.protect_recent, 0)
        protected = self.protect_first + self.protect_recent
        name = "min_budget" if self.budget is None else "budget"
        smallest = self.min_budget if self.budget is None else self.budget
        if protected > smallest:
            raise ConfigError(
                f"protect_first + protect_recent = {protected} tokens do not fit into {name}={smallest}:"
                f" raise {name} to at least {protected}, or protect fewer."
            )

    def budget_of(self, prompt: int) -> int:
        """Tokens that survive each step for a row of `prompt` tokens: floor((1 - ratio) * prompt), exactly (SPEC D5, D6)."""
        if self.budget is not None:
            return self.budget
        return max(self.min_budget, _kept(self.ratio, prompt))

    def refreshes_at(self, step: int) -> bool:
        """Whether decode step `step` (1, 2, ...) reads scores."""
        if self.refresh_every is None:
            return step == 1
        return (step - 1) % self.refresh_every == 0

    def graph_options(self, *, score: bool) -> dict[str, Any]:
        """The part of the settings that is compiled into a decode graph, as options of the backend `inertia_fx`."""
        return {
            "alpha": float(self.alpha),
            "alpha_time": self.alpha_time,
            "alpha_layer": self.alpha_layer,
            "aggregator": self.aggregator,
            "scorer": self.scorer,
            "score": score,
        }

    def __repr__(self) -> str:
        shown = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in dataclasses.fields(self)
            if field.name != "ratio" and getattr(self, field.name) != field.default
        ]
        if self.budget is None:
            shown.insert(0, f"ratio={self.ratio} (evicted)")
        return f"Config({', '.join(shown)})"


@functools.lru_cache(maxsize=4096)
def _kept(ratio: float | Fraction | Decimal | str, prompt: int) -> int:
    """Asked for every row on every step, so remembered."""
    return math.floor((1 - exact(ratio)) * prompt)


def exact(ratio: float | Fraction | Decimal | str) -> Fraction:
    """The ratio as the decimal that was written: ``Fraction(str(ratio))`` (SPEC D5)."""
    return ratio if isinstance(ratio, Fraction) else Fraction(str(ratio))


def _check_ratio(ratio: object) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float, Fraction, Decimal, str)):
        raise ConfigError(f"ratio={ratio!r} is not a number: pass the fraction to evict, such as 0.9.")
    try:
        value = exact(ratio)
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"ratio={ratio!r} is not a finite number: pass the fraction to evict, such as 0.9.") from None
    if not 0 <= value < 1:
        raise ConfigError(
            f"ratio={ratio} is outside [0, 1): it is the fraction of the prompt's tokens that is evicted"
            " (0.9 keeps a tenth; 0 keeps as many as the prompt had)."
        )


def _check_int(name: str, value: object, least: int, hint: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}={value!r} is not a whole number.")
    if value < least:
        raise ConfigError(f"{name}={value} is below {least}" + (f" ({hint})." if hint else "."))


def _check_weight(name: str, value: object, *, one_allowed: bool) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{name}={value!r} is not a number.")
    if not (0 <= value < 1 or (one_allowed and value == 1)):
        interval = "[0, 1]" if one_allowed else "[0, 1)"
        raise ConfigError(f"{name}={value} is outside {interval}: it is the weight given to what is older.")


def _check_name(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{name}={value!r} is unknown: choose one of {', '.join(map(repr, known))}.")
