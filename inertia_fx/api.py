"""Compile a model: validate the settings, and return the model with its decode step compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from .config import CompilerOptions, Config
from .errors import ConfigError
from .huggingface.model import wrap
from .settings import refuse_unknown, settings_of, takes

Model = TypeVar("Model")
P = ParamSpec("P")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Arguments(CompilerOptions, Config):
    """Join what `compile` takes besides the model. Never made: its constructor types the function."""

    config: Config | None = dataclasses.field(default=None, kw_only=False)


class _SameModel(Protocol[P]):
    def __call__(self, model: Model, /, *args: P.args, **kwargs: P.kwargs) -> Model: ...


def _same_model(function: Callable[P, Any]) -> _SameModel[P]:
    """Say to static checkers that the function takes a model first and returns one of the same class."""
    return cast(Any, function)


@_same_model
@takes(_Arguments)
def compile(model: Model, config: Config | None = None, **settings: Any) -> Model:
    """Compile a model's decode step into one that evicts the cached tokens of least use.

    The prompt runs as in the original model. From the first decode step on, `ratio` of the prompt's cached tokens are
    gone, and the step is one compiled graph whose attention also says how useful each cached token is. `generate`,
    pipelines and hand-written loops work as before; forwards that are not decoding (labels, training,
    ``use_cache=False``) are those of the original.

    Args:
        model: a Hugging Face causal language model whose layers all use full attention, with
            ``attn_implementation`` "sdpa" or "eager".
        config: what to keep, as a :class:`inertia_fx.Config`, instead of its settings one by one.
        **settings: the fields of `Config` and `CompilerOptions`, listed below.

    Returns:
        A model of the same class that shares the weights: ``.to(...)`` on either moves both. The model passed in is
        left as it was.

    Raises:
        ConfigError: a setting is out of range or contradicts another, or is given beside a `config`.
        UnknownSettingError: there is no setting of this name.
        UnsupportedModelError: the model cannot be compiled correctly; the message says why and what to do.
        UnsupportedAttentionError: raised by the first decode step, before anything changed, if an attention of the
            traced graph is not understood.
    """
    chosen, compiler = _sorted(config, settings)
    return wrap(model, chosen, compiler)


def _sorted(config: Config | None, settings: Mapping[str, Any]) -> tuple[Config, CompilerOptions]:
    """Sort settings into what is kept and how it is compiled."""
    kept, compiled = settings_of(Config), settings_of(CompilerOptions)
    refuse_unknown("inertia_fx.compile", settings, ("config", *kept, *compiled))
    given = {name: value for name, value in settings.items() if name in kept}
    if config is None:
        config = Config(**given)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"config={config!r} is not an inertia_fx.Config: pass inertia_fx.Config(ratio=...), or its settings by name."
        )
    elif given:
        name, value = next(iter(given.items()))
        raise ConfigError(
            f"config={config!r} and {name}={value!r} both say what to keep: pass one of them. To change a setting of a"
            f" Config, pass config=dataclasses.replace(config, {name}={value!r})."
        )
    return config, CompilerOptions(**{name: value for name, value in settings.items() if name in compiled})
