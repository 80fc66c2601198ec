"""`inertia_fx.compile`: validate, and return the model with its decode step compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any, TypeVar

from .backend import check_inner
from .config import DEFAULT_RATIO, Aggregator, Config, Scorer
from .errors import ConfigError
from .huggingface.model import wrap

Model = TypeVar("Model")


def compile(
    model: Model,
    *,
    ratio: float | Fraction | Decimal | str = DEFAULT_RATIO,
    alpha: float = 0.8,
    refresh_every: int | None = 1,
    evict_after: int = 1,
    pool_width: int = 1,
    budget: int | None = None,
    min_budget: int = 64,
    aggregator: Aggregator = "ema",
    scorer: Scorer = "attention",
    alpha_time: float | None = None,
    alpha_layer: float | None = None,
    protect_first: int = 0,
    protect_recent: int = 0,
    backend: str | Callable[..., Any] = "inductor",
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    regions: bool = True,
    warm_start: bool = False,
) -> Model:
    """A model of the same class, sharing the weights, whose decode steps evict the cached tokens of least use.

    The prompt runs as in the original model. From the first decode step on, `ratio` of the prompt's cached tokens are
    gone, and the step is one compiled graph whose attention also says how useful each cached token is. `generate`,
    pipelines and hand-written loops work as before; forwards that are not decoding (labels, training,
    ``use_cache=False``) are those of the original. The model passed in is left as it was. Because the weights are
    shared, ``.to(...)`` on either moves both.

    Args:
        model: a Hugging Face causal language model whose layers all use full attention, with
            ``attn_implementation`` "sdpa" or "eager".
        ratio, alpha, refresh_every, evict_after, pool_width, budget, min_budget, aggregator, scorer, alpha_time,
            alpha_layer, protect_first, protect_recent: see :class:`inertia_fx.Config`.
        backend: the inner compiler of the decode step: "inductor", "aot_eager", "eager" or a callable.
        mode, options: Inductor's, as in `torch.compile`, for example ``options={"freezing": True}`` (which compiles the
            weights in: they must not change afterwards).
        regions: False compiles every layer by itself instead of equal layers once: slower to compile, for bisecting.
        warm_start: keep the compiled step on disk, in Inductor's cache directory, and look for it there: a second
            process that runs the same model with the same settings neither traces nor compiles. CPUs only, with
            Inductor's default settings. Like Inductor's own cache it is a pickle: whoever can write it can run code.

    Raises:
        ConfigError: an argument is out of range, unknown or contradicts another.
        UnsupportedModelError: the model cannot be compiled correctly; the message says why and what to do.
        UnsupportedAttentionError: raised by the first decode step, before anything changed, if an attention of the
            traced graph is not understood.
    """
    config = Config(
        ratio=ratio,
        alpha=alpha,
        refresh_every=refresh_every,
        evict_after=evict_after,
        pool_width=pool_width,
        budget=budget,
        min_budget=min_budget,
        aggregator=aggregator,
        scorer=scorer,
        alpha_time=alpha_time,
        alpha_layer=alpha_layer,
        protect_first=protect_first,
        protect_recent=protect_recent,
    )
    check_inner(backend, mode, options)
    if warm_start and (backend != "inductor" or mode not in (None, "default") or options):
        raise ConfigError(
            "warm_start=True keeps what Inductor compiles with its default settings: leave backend, mode and options out."
        )
    compiler = {"backend": backend, "mode": mode, "options": options, "regions": regions}
    return wrap(model, config, compiler, warm_start)
