"""The Dynamo backend `inertia_fx`: run the passes on a decode graph, hand the result to an inner compiler.

    torch.compile(step, backend="inertia_fx", options={"alpha": 0.8, "backend": "inductor"})

One module-level function, parameters through `options`: Dynamo compares them to decide whether to recompile. Nothing
is kept here between calls; a sequence's state reaches the graph as inputs (see `inertia_fx.cache`).
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from . import debug
from .config import Config
from .errors import ConfigError
from .passes import PASSES, Pass, PassOptions, check_passes, marker_in, run_passes

_GRAPH = ("alpha", "alpha_time", "alpha_layer", "aggregator", "scorer")
_HOST_ONLY = tuple(field.name for field in dataclasses.fields(Config) if field.name not in _GRAPH)


@dataclasses.dataclass(frozen=True)
class BackendOptions(PassOptions):
    """Hold the backend's options: what is compiled into a decode graph, and with what.

    Args:
        mode, options: Inductor's, as in torch.compile.
        passes: False leaves the graph as traced: the step decodes, with a momentum that never moves (for bisecting). A
            sequence of passes runs those: :data:`inertia_fx.passes.PASSES` with some of your own among them.
    """

    mode: str | None = None
    options: Mapping[str, Any] | None = None
    passes: bool | Sequence[Pass] = True

    @classmethod
    def of(cls, options: Mapping[str, Any] | None) -> BackendOptions:
        """Check options.

        Raises:
            ConfigError: an option is unknown, belongs to the cache, or is out of range.
        """
        options = dict(options or {})
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name in _HOST_ONLY:
                raise ConfigError(
                    f"The option {name!r} is decided by the cache, not by the graph:"
                    f" pass InertiaCache(Config({name}=...)) to the step."
                )
            if name not in known:
                raise ConfigError(
                    f"The backend 'inertia_fx' has no option {name!r}: it knows {', '.join(sorted(known))}."
                )
        checked = cls(**options)
        Config(
            alpha=checked.alpha,
            alpha_time=checked.alpha_time,
            alpha_layer=checked.alpha_layer,
            aggregator=checked.aggregator,  # type: ignore[arg-type]
            scorer=checked.scorer,  # type: ignore[arg-type]
        )
        validate_inner_backend(checked.backend, checked.mode, checked.options)
        check_passes(checked.pass_list, checked.disable_passes)
        return checked

    @property
    def pass_list(self) -> Sequence[Pass]:
        """The passes to run."""
        return PASSES if isinstance(self.passes, bool) else tuple(self.passes)


def validate_inner_backend(
    backend: str | Callable[..., Any], mode: str | None, options: Mapping[str, Any] | None
) -> None:
    """Raise :class:`ConfigError` unless the inner compiler exists and takes what is passed to it."""
    if not callable(backend) and not isinstance(backend, str):
        raise ConfigError(f"backend={backend!r} is neither a name nor a callable.")
    if backend == "inertia_fx":
        raise ConfigError(
            "backend='inertia_fx' would run the passes inside themselves: pass the inner compiler's name."
        )
    if isinstance(backend, str) and backend not in ("inductor", "eager", "aot_eager"):  # listing them takes seconds
        known = torch.compiler.list_backends(exclude_tags=())
        if backend not in known:
            raise ConfigError(f"backend={backend!r} is unknown: torch knows {', '.join(sorted(known))}.")
    if (mode is not None or options) and backend != "inductor":
        raise ConfigError(f"mode and options are Inductor's; with backend={backend!r} leave them out.")
    if mode is not None and options:
        raise ConfigError("mode and options exclude each other, as in torch.compile: pass one of them.")
    if mode is not None:
        known_modes = set(torch._inductor.list_mode_options()) | {"default"}
        if mode not in known_modes:
            raise ConfigError(f"mode={mode!r} is unknown: Inductor knows {', '.join(sorted(known_modes))}.")
    if options:
        known_options = set(torch._inductor.list_options())
        for name in options:
            if name.replace("-", "_") not in known_options:
                raise ConfigError(f"options[{name!r}] is not an Inductor setting.")


_numbers = itertools.count()


def own_code(function: Any) -> types.FunctionType:
    """Copy a function with a code object of its own: Dynamo keeps graphs and its recompile limit per code object."""
    name = f"inertia_{function.__name__.strip('_')}_{next(_numbers)}"
    code = function.__code__.replace(co_name=name)
    return types.FunctionType(code, function.__globals__, name, function.__defaults__, function.__closure__)


def inertia(
    gm: fx.GraphModule, example_inputs: list[Tensor], *, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Compile one Dynamo graph. A graph without our marker is not a decode step and passes through unchanged.

    Raises:
        ConfigError: bad options.
        UnsupportedAttentionError: a layer's attention is not understood; nothing has been compiled or changed.
    """
    settings = BackendOptions.of(options)
    marker = None if settings.passes is False else marker_in(gm)
    if marker is None:
        return _compile_inner(gm, example_inputs, settings)
    debug.stage("rewriting its graph")
    example_inputs = list(example_inputs)
    gm = run_passes(gm, example_inputs, options=settings, passes=settings.pass_list)
    inner = settings.backend if isinstance(settings.backend, str) else "its inner compiler"
    debug.stage(f"compiling its {len(marker.keys)} layers with {inner}")
    began = time.perf_counter()
    compiled = _compile_inner(gm, example_inputs, settings)
    debug.log.info("compiled in %.1f s", time.perf_counter() - began)
    return compiled


def _compile_inner(gm: fx.GraphModule, example_inputs: list[Tensor], settings: BackendOptions) -> Callable[..., Any]:
    if settings.backend == "inductor":
        from torch._inductor.compile_fx import compile_fx

        patches = dict(settings.options or {})
        if settings.mode is not None and settings.mode != "default":
            patches = torch._inductor.list_mode_options(settings.mode)
        patches = {name.replace("-", "_"): value for name, value in patches.items()}
        compiled: Any = compile_fx(gm, example_inputs, config_patches=patches or None)
        return compiled
    compiler = settings.backend
    if isinstance(compiler, str):
        compiler = torch._dynamo.lookup_backend(compiler)
    return compiler(gm, example_inputs)
