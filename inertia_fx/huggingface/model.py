"""All that knows transformers models: `generate`, argument names (its cache, and what is refused: next door).

The compiled model is a shallow copy of the original whose class is a dynamic subclass with the same name: `generate`
and pipelines look methods up on the class and go by its name, so wrappers and patched instances would be bypassed.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import uuid
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..backend import inertia, own_code
from ..config import Config
from ..errors import (
    CacheError,
    CompileDisabledError,
    ConfigError,
    InertiaError,
    OutputError,
    RecompileError,
    TrainingError,
    UndoError,
    UnsupportedModelError,
)
from ..precompile import guards as portable_guards
from ..precompile import step as warm_start
from . import progress
from .cache import InertiaCache
from .checks import (
    CACHE_NAMES,
    check_mask,
    inspect_model,
    padding_of,
    parameters_of,
    require_ours,
    require_readable_attention,
)


@dataclasses.dataclass
class Runtime:
    """What a compiled model carries besides the original: settings and its compiled steps (one per kind of step).

    `compiled` holds which of them (by id) have run for which batch size, and so have been compiled.
    """

    config: Config
    compiler: Mapping[str, Any]
    cache_name: str
    layers: int
    warm_start: bool = False
    uid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    steps: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)
    compiled: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    def step(self, config: Config, score: bool) -> Any:
        """The compiled decode step for these settings, with or without scores."""
        # Without scores no setting is left in the graph: one step serves them all.
        options = config.graph_options(score=True) if score else {"score": False}
        key = tuple(options.items())
        if key not in self.steps:
            options = {**options, **self.compiler}
            if self.warm_start:
                self.steps[key] = warm_start.Step(_decode, options, _describe)
            else:
                self.steps[key] = torch.compile(own_code(_decode), backend=inertia, fullgraph=True, options=options)
        return self.steps[key]

    def compiles(self, step: Any, rows: int) -> bool:
        """Whether this is the first time that a step runs for a batch of this size."""
        known = len(self.compiled)
        self.compiled.add((id(step), rows))
        return len(self.compiled) > known


def _decode(
    model: Any, forward: Any, cache: InertiaCache, cache_name: str, additive: bool, arguments: dict[str, Any]
) -> Any:
    """One decode step, as traced. Correct by itself; the passes add what moves the momentum."""
    if not torch.compiler.is_compiling():
        raise CompileDisabledError(
            "torch.compile is switched off (TORCHDYNAMO_DISABLE, TORCH_COMPILE_DISABLE or torch.compiler.set_stance), but"
            " it is what makes the step score and evict. Switch it on, compile with backend='eager' to go without a"
            " compiler, or use the uncompiled model."
        )
    entry = cache.enter()
    mask = entry.live[:, None, None, :]
    if additive:  # eager attention adds its mask, in the model's dtype
        dtype = cache.layers[0].keys.dtype
        mask = torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), torch.finfo(dtype).min)
    output = forward(model, **arguments, attention_mask=mask, **{cache_name: cache})
    cache.leave(entry)
    return output


def _describe(
    model: Any, forward: Any, cache: InertiaCache, cache_name: str, additive: bool, arguments: dict[str, Any]
) -> str:
    """What tells this decode step's compile from others', for its file on disk."""
    given = [
        (name, (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(arguments.items())
    ]
    parts = sorted({f"{type(part).__module__}.{type(part).__qualname__}" for part in model.modules()})  # LoRA or not
    kind = (type(model).__module__, type(model).__qualname__, parts, model.config.to_json_string())
    assert cache.config is not None
    return repr((kind, cache.layers[0].keys.dtype, cache.rows, cache.config, cache_name, additive, given))


class _Compiled:
    """Mixed in before the original class: `forward` dispatches, `generate`'s hooks hand it our cache."""

    _inertia: Runtime
    _inertia_base: Any

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], generation_mode: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if str(getattr(generation_mode, "value", generation_mode)) == "assisted_generation":
            raise UndoError(
                "Assisted and prompt-lookup decoding take rejected tokens back, but an eviction cannot be undone:"
                " generate without assistant_model / prompt_lookup_num_tokens, or with the uncompiled model."
            )
        name = next((name for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
        if name is None and generation_config.use_cache is False:
            return super()._prepare_cache_for_generation(  # type: ignore[misc]
                generation_config, model_kwargs, generation_mode, *args, **kwargs
            )
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ConfigError(
                f"cache_implementation={generation_config.cache_implementation!r} asks for another cache than"
                " InertiaCache: leave it out (or set model.generation_config.cache_implementation = None)."
            )
        if name is None:
            model_kwargs[self._inertia.cache_name] = InertiaCache(self._inertia.config)
        else:
            cache = require_ours(model_kwargs[name])
            cache._is_user_defined = True
        return None

    def _prefill(
        self, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        cache = next((model_kwargs[name] for name in CACHE_NAMES if model_kwargs.get(name) is not None), None)
        parent = super()._prefill  # type: ignore[misc]
        if not isinstance(cache, InertiaCache):
            return parent(input_ids, generation_config, model_kwargs, *args, **kwargs)
        with cache._whole_prompt():
            return parent(input_ids, generation_config, model_kwargs, *args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if portable_guards.pickling_guards.get():
            return _shell, (self._inertia_base,), self.__dict__
        return _rebuild, (
            uncompiled(self),
            self._inertia.config,
            dict(self._inertia.compiler),
            self._inertia.warm_start,
        )

    def _inertia_forward(self, *args: Any, **kwargs: Any) -> Any:
        runtime, base = self._inertia, self._inertia_base
        arguments = dict(zip(parameters_of(base), args, strict=False)) | kwargs
        given = [arguments.pop(name) for name in CACHE_NAMES if name in arguments]
        cache = next((cache for cache in given if cache is not None), None)
        learning = self.training and torch.is_grad_enabled()  # type: ignore[attr-defined]
        if cache is None:
            use_cache = arguments.get("use_cache")
            if use_cache is None:
                use_cache = getattr(self.config.get_text_config(decoder=True), "use_cache", True)  # type: ignore[attr-defined]
            if not use_cache or learning or arguments.get("labels") is not None:
                return base.forward(self, **arguments)
            cache = InertiaCache(runtime.config)
        elif learning and not isinstance(cache, InertiaCache):
            return base.forward(self, **arguments, **{runtime.cache_name: cache})
        elif learning:
            raise TrainingError(
                "An InertiaCache was passed to a model in training mode: what it evicts cannot be trained through."
                " Call model.eval(), or pass no cache."
            )
        cache = require_ours(cache)
        tokens = arguments.get("input_ids")
        tokens = arguments.get("inputs_embeds") if tokens is None else tokens
        if tokens is None:
            raise CacheError("Neither input_ids nor inputs_embeds was passed.")
        rows, width = tokens.shape[:2]
        cache._bind(runtime.uid, runtime.config, runtime.layers, self.dtype)  # type: ignore[attr-defined]
        arguments["use_cache"] = True
        if cache._decodes(width) and arguments.get("labels") is None:
            return self._inertia_step(cache, rows, tokens.device, arguments)
        return self._inertia_prompt(cache, rows, width, arguments)

    def _inertia_prompt(self, cache: InertiaCache, rows: int, width: int, arguments: dict[str, Any]) -> Any:
        mask = arguments.get("attention_mask")
        padding = padding_of(mask, cache.seen, rows, width)
        with cache.prompt(rows, width, padding):
            if cache.seen:
                arguments["attention_mask"] = cache.columns_mask(width, padding)
            return self._inertia_base.forward(self, **arguments, **{self._inertia.cache_name: cache})

    def _inertia_step(self, cache: InertiaCache, rows: int, device: torch.device, arguments: dict[str, Any]) -> Any:
        config = self.config  # type: ignore[attr-defined]
        if self._inertia.warm_start and device.type != "cpu":
            raise ConfigError(f"warm_start=True works on CPUs only so far, and the model is on {device}: leave it out.")
        for name in ("output_attentions", "output_hidden_states"):
            asked = arguments.pop(name, None)
            if asked or (asked is None and getattr(config, name, False)):
                raise OutputError(
                    f"{name}=True on a decode step: the compiled step returns logits only. Ask for it on prompts"
                    " (several tokens), or use the uncompiled model."
                )
        require_readable_attention(self)
        # Its new column is not read: a decode step's token is real, and looking would make every step wait for the device.
        check_mask(arguments.pop("attention_mask", None), cache.seen, rows, 1)
        if arguments.get("position_ids") is None and "position_ids" in parameters_of(self._inertia_base):
            arguments["position_ids"] = torch.full((1, 1), cache.seen, device=device)
        assert cache.config is not None
        additive = config._attn_implementation == "eager"
        step = self._inertia.step(cache.config, cache.refreshing)
        try:
            with cache.step(rows), torch.no_grad(), progress.compiling(self._inertia.compiles(step, rows)):
                return step(self, self._inertia_base.forward, cache, self._inertia.cache_name, additive, arguments)
        except torch._dynamo.exc.BackendCompilerFailed as failure:
            if isinstance(failure.inner_exception, InertiaError):
                raise failure.inner_exception from None
            raise
        except torch._dynamo.exc.FailOnRecompileLimitHit as failure:
            raise RecompileError from failure
        except torch._dynamo.exc.Unsupported as failure:
            raise UnsupportedModelError(
                f"The decode step of {type(self).__name__} cannot be traced as one graph, so it cannot be rewritten:"
                f" use the uncompiled model. torch.compile says:\n{failure}"
            ) from failure


@functools.cache
def _compiled_class(base: Any) -> Any:
    """A subclass of `base` that passes for it: same name, same module, same signature of `forward`."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._inertia_forward(*args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Compiled, base), names | {"forward": forward, "_inertia_base": base})


def wrap(model: Any, config: Config, compiler: Mapping[str, Any], warm_start: bool = False) -> Any:
    """The model as :func:`inertia_fx.compile` returns it.

    Raises:
        UnsupportedModelError: it cannot be compiled correctly.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, _Compiled):
        model = uncompiled(model)
    name, layers = inspect_model(model)
    base: Any = type(model)
    result = _twin(model, _compiled_class(base))
    result.__dict__["_inertia"] = Runtime(config, compiler, name, layers, warm_start)
    return result


def uncompiled(model: Any) -> Any:
    """The original class again, over the same weights."""
    result = _twin(model, model._inertia_base)
    del result.__dict__["_inertia"]
    return result


def _rebuild(model: Any, config: Config, compiler: dict[str, Any], warm_start: bool = False) -> Any:
    return wrap(model, config, compiler, warm_start)


def _shell(base: Any) -> Any:
    """A compiled model of this class with nothing in it, for the guards that are read from disk."""
    kind = _compiled_class(base)
    return kind.__new__(kind)


def _twin(model: Any, kind: Any) -> Any:
    """A shallow copy of another class: shared weights, but registries and generation settings of its own."""
    result = kind.__new__(kind)
    for name, value in model.__dict__.items():
        result.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    if getattr(model, "generation_config", None) is not None:
        result.__dict__["generation_config"] = copy.deepcopy(model.generation_config)
    return result
