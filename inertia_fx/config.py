"""Define every setting, once, with its type, default, text and limits.

`Config` says what is kept, `CompilerOptions` how the decode step is compiled. `inertia_fx.compile`, `verify.check` and
the command line take their parameters from here (`inertia_fx.settings`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

from typing_extensions import Doc

from .errors import ConfigError
from .limits import check_bool, check_int, check_name, check_weight
from .settings import documented

Aggregator = Literal["ema", "cumulative", "single_step"]
Scorer = Literal["attention", "vnorm", "entropy"]


class _DefaultRatio(float):
    """Mark 0.9 as the default of `ratio`, apart from a 0.9 that the user wrote (which excludes `budget`)."""


DEFAULT_RATIO = _DefaultRatio(0.9)


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Choose how many cached tokens are kept, and how their usefulness is measured.

    InertiaKV, arXiv 2609.03515, sections 3 and 4; D- and E-numbers are decisions of docs/SPEC.md.

    Raises:
        ConfigError: a value is out of range, of the wrong type or contradicts another one, or a setting is unknown.
    """

    ratio: Annotated[
        float | Fraction | Decimal | str,
        Doc(
            "Fraction of the prompt's cached tokens that is evicted. At least 0 and below 1: 0.9 keeps a tenth. Read as"
            " the decimal you wrote, so 0.9 of 1000 tokens keeps exactly 100; a Fraction or Decimal is taken as it is"
            " (D5)."
        ),
    ] = DEFAULT_RATIO
    alpha: Annotated[
        float,
        Doc(
            "Weight of the old momentum, per layer: near 1 all layers vote, 0 is the last layer alone."
            " m = alpha * m + (1 - alpha) * s, at least 0 and below 1."
        ),
    ] = 0.8
    refresh_every: Annotated[
        int | None,
        Doc(
            "Read scores every r-th decode step (4 is Lazy4); None: at the first one only (Score-Free). That is at"
            " steps 1, 1 + r, 1 + 2r, ...; 1 is full refresh."
        ),
    ] = 1
    evict_after: Annotated[
        int,
        Doc(
            "Decode step of the first eviction; the steps before it only watch. Storage is P + evict_after slots until"
            " then, for a prompt of P tokens (D18)."
        ),
    ] = 1
    pool_width: Annotated[
        int,
        Doc(
            "Neighbours within this width are kept or lost together at the first eviction; odd. Each momentum becomes"
            " the largest one within (pool_width - 1) / 2 neighbouring positions (D19)."
        ),
    ] = 1
    budget: Annotated[
        int | None,
        Doc("Tokens to keep, instead of a ratio. Memory is taken as it fills."),
    ] = None
    min_budget: Annotated[
        int,
        Doc("Smallest budget that a ratio may ask for. 1 is the literal paper; ignored with budget (D6, E2)."),
    ] = 64
    aggregator: Annotated[
        Aggregator,
        Doc(
            "How scores become momentum: ema, cumulative or single_step. m = alpha * m + (1 - alpha) * s; m = m + s in"
            " every layer; m = s of the last layer (D20)."
        ),
    ] = "ema"
    scorer: Annotated[
        Scorer,
        Doc(
            "What a token's score is: attention, vnorm or entropy. The attention it gets, averaged over the heads; the"
            " same weighted by the norms of its values, or by each layer's entropy (D21)."
        ),
    ] = "attention"
    alpha_time: Annotated[
        float | None,
        Doc(
            "Weight of the previous step's momentum, where it differs from what alpha makes it. At least 0 and below 1;"
            " alpha ** K for K layers if None."
        ),
    ] = None
    alpha_layer: Annotated[
        float | None,
        Doc(
            "Weight of a layer relative to the next later one, where it differs from alpha. From 0 (the last layer"
            " alone) to 1 (all equal); alpha if None."
        ),
    ] = None
    protect_first: Annotated[int, Doc("First tokens of the text that are never evicted. See D3.")] = 0
    protect_recent: Annotated[int, Doc("Newest tokens of the text that are never evicted. See D3.")] = 0

    def __post_init__(self) -> None:
        _check_ratio(self.ratio)
        if self.budget is not None:
            check_int("budget", self.budget, 1)
            if not isinstance(self.ratio, _DefaultRatio):  # by type: a copy of a Config has a copy of the default
                raise ConfigError(
                    f"ratio={self.ratio} and budget={self.budget} both say how many tokens to keep: pass one of them."
                )
        if self.refresh_every is not None:
            check_int("refresh_every", self.refresh_every, 1, hint="None scores at the first decode step only")
        check_int("evict_after", self.evict_after, 1, hint="1 evicts at the first decode step")
        check_int("pool_width", self.pool_width, 1, hint="1 is no pooling")
        if self.pool_width % 2 == 0:
            raise ConfigError(
                f"pool_width={self.pool_width} is even: it spans a token and as many neighbours on either side, so it"
                f" must be odd. Use {self.pool_width - 1} or {self.pool_width + 1}."
            )
        check_int("min_budget", self.min_budget, 1, hint="1 is the literal paper")
        check_name("aggregator", self.aggregator, get_args(Aggregator))
        check_name("scorer", self.scorer, get_args(Scorer))
        check_weight("alpha", self.alpha, one_allowed=False)
        for name, one_allowed in (("alpha_time", False), ("alpha_layer", True)):
            if getattr(self, name) is not None:
                check_weight(name, getattr(self, name), one_allowed=one_allowed)
                if self.aggregator != "ema":
                    raise ConfigError(
                        f"{name} belongs to aggregator='ema'; with aggregator={self.aggregator!r} leave it out."
                    )
        check_int("protect_first", self.protect_first, 0)
        check_int("protect_recent", self.protect_recent, 0)
        protected = self.protect_first + self.protect_recent
        name = "min_budget" if self.budget is None else "budget"
        smallest = self.min_budget if self.budget is None else self.budget
        if protected > smallest:
            raise ConfigError(
                f"protect_first + protect_recent = {protected} tokens do not fit into {name}={smallest}:"
                f" raise {name} to at least {protected}, or protect fewer."
            )

    def budget_of(self, prompt: int) -> int:
        """Compute how many tokens survive each step in a row of `prompt` tokens.

        floor((1 - ratio) * prompt) in exact arithmetic, at least `min_budget` (SPEC D5, D6).
        """
        if self.budget is not None:
            return self.budget
        return max(self.min_budget, _kept(self.ratio, prompt))

    def refreshes_at(self, step: int) -> bool:
        """Tell whether decode step `step` (1, 2, ...) reads scores."""
        if self.refresh_every is None:
            return step == 1
        return (step - 1) % self.refresh_every == 0

    def graph_options(self, *, score: bool) -> dict[str, Any]:
        """Select the settings that are compiled into a decode graph, as options of the backend `inertia_fx`.

        Args:
            score: whether the graph reads scores and moves the momentum.
        """
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


@documented
@dataclasses.dataclass(frozen=True, kw_only=True)
class CompilerOptions:
    """Choose how the decode step is compiled.

    Raises:
        ConfigError: a value is unknown, of the wrong type or contradicts another one, or an option is unknown.
    """

    backend: Annotated[
        str | Callable[..., Any],
        Doc(
            "Inner compiler of the decode step: inductor, aot_eager or eager. Or another name that torch.compile knows,"
            " or a callable."
        ),
    ] = "inductor"
    mode: Annotated[str | None, Doc("Inductor's mode, as in torch.compile.")] = None
    options: Annotated[
        Mapping[str, Any] | None,
        Doc(
            "Inductor's settings, as in torch.compile. For example {'freezing': True}, which compiles the weights in:"
            " they must not change afterwards."
        ),
    ] = None
    regions: Annotated[
        bool,
        Doc(
            "Compile equal layers once; False: every layer by itself (slower, for bisecting). Layers that differ are"
            " compiled one by one either way."
        ),
    ] = True
    disable_passes: Annotated[
        Sequence[str],
        Doc(
            "Names of graph passes to leave out, for bisecting. Only those that the step is right without:"
            " inertia_fx.passes.OPTIONAL lists them."
        ),
    ] = ()
    warm_start: Annotated[
        bool,
        Doc(
            "Keep the compiled step on disk: the next process starts in seconds. It is kept in Inductor's cache"
            " directory, and used where model and settings are the same. CPUs only, with Inductor's default settings."
            " Like Inductor's own cache it is a pickle: whoever can write it can run code."
        ),
    ] = False

    def __post_init__(self) -> None:
        from .backend import validate_inner_backend  # which imports Config
        from .passes import PASSES, check_passes

        validate_inner_backend(self.backend, self.mode, self.options)
        check_passes(PASSES, self.disable_passes)
        check_bool("regions", self.regions)
        check_bool("warm_start", self.warm_start)
        if self.warm_start and (self.backend != "inductor" or self.mode not in (None, "default") or self.options):
            raise ConfigError(
                "warm_start=True keeps what Inductor compiles with its default settings: leave backend, mode and options"
                " out."
            )

    def backend_options(self) -> dict[str, Any]:
        """Select what the backend `inertia_fx` takes as options (all but `warm_start`)."""
        names = ("backend", "mode", "options", "regions", "disable_passes")
        return {name: getattr(self, name) for name in names}


@functools.lru_cache(maxsize=4096)
def _kept(ratio: float | Fraction | Decimal | str, prompt: int) -> int:
    # Asked for every row on every step, so remembered.
    return math.floor((1 - exact(ratio)) * prompt)


def exact(ratio: float | Fraction | Decimal | str) -> Fraction:
    """Read the ratio as the decimal that was written: ``Fraction(str(ratio))`` (SPEC D5)."""
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
