"""Dispatch a compiled Hugging Face model's forwards: prompts to the original, decode steps to the compiled step.

The compiled model is a shallow copy of the original whose class is a dynamic subclass with the same name: `generate`
and pipelines look methods up on the class and go by its name, so wrappers and patched instances would be bypassed.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor

from ..config import CompilerOptions, Config
from ..errors import (
    CacheError,
    ConfigError,
    InertiaError,
    OutputError,
    RecompileError,
    TrainingError,
    UndoError,
    UnsupportedModelError,
)
from . import precompiling, progress
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
from .step import Runtime


class _Compiled:
    """Dispatch `forward`, and hand our cache to `generate`'s hooks. Mixed in before the original class."""

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
            cache: Any = require_ours(model_kwargs[name])
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
        if precompiling.pickles_as_shell():
            return _shell, (self._inertia_base,), self.__dict__
        return wrap, (uncompiled(self), self._inertia.config, self._inertia.compiler)

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
        batch, width = tokens.shape[:2]
        cache._bind(runtime.uid, runtime.config, runtime.layers, self.dtype)  # type: ignore[attr-defined]
        arguments["use_cache"] = True
        if cache._decodes(width) and arguments.get("labels") is None:
            return self._inertia_step(cache, batch, tokens.device, arguments)
        return self._inertia_prompt(cache, batch, width, arguments)

    def _inertia_prompt(self, cache: InertiaCache, batch: int, width: int, arguments: dict[str, Any]) -> Any:
        mask = arguments.get("attention_mask")
        padding = padding_of(mask, cache.seen, batch, width)
        with cache.prompt(batch, width, padding):
            if cache.seen:
                arguments["attention_mask"] = cache.columns_mask(width, padding)
            return self._inertia_base.forward(self, **arguments, **{self._inertia.cache_name: cache})

    def _inertia_step(self, cache: InertiaCache, batch: int, device: torch.device, arguments: dict[str, Any]) -> Any:
        config = self.config  # type: ignore[attr-defined]
        if self._inertia.compiler.warm_start and device.type != "cpu":
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
        check_mask(arguments.pop("attention_mask", None), cache.seen, batch, 1)
        if arguments.get("position_ids") is None and "position_ids" in parameters_of(self._inertia_base):
            arguments["position_ids"] = torch.full((1, 1), cache.seen, device=device)
        assert cache.config is not None
        additive = config._attn_implementation == "eager"
        step = self._inertia.step(cache.config, cache.refreshing)
        try:
            with cache.step(batch), torch.no_grad(), progress.compiling(self._inertia.compiles(step, batch)):
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
    """Derive a class from `base` that passes for it: same name, same module, same signature of `forward`."""

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self._inertia_forward(*args, **kwargs)

    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (_Compiled, base), names | {"forward": forward, "_inertia_base": base})


def wrap(model: Any, config: Config, compiler: CompilerOptions) -> Any:
    """Make the model that :func:`inertia_fx.compile` returns.

    Raises:
        UnsupportedModelError: it cannot be compiled correctly.
    """
    model = getattr(model, "_orig_mod", model)
    if isinstance(model, _Compiled):
        model = uncompiled(model)
    name, layers = inspect_model(model)
    base: Any = type(model)
    result = _twin(model, _compiled_class(base))
    result.__dict__["_inertia"] = Runtime(config, compiler, name, layers)
    return result


def uncompiled(model: Any) -> Any:
    """Return a compiled model as the original class again, over the same weights."""
    result = _twin(model, model._inertia_base)
    del result.__dict__["_inertia"]
    return result


def _shell(base: Any) -> Any:
    """Make a compiled model of this class with nothing in it, for guards that are read from disk."""
    kind = _compiled_class(base)
    return kind.__new__(kind)


def _twin(model: Any, kind: Any) -> Any:
    """Copy a model, shallowly, to another class: shared weights, registries and generation settings of its own."""
    result = kind.__new__(kind)
    for name, value in model.__dict__.items():
        result.__dict__[name] = copy.copy(value) if isinstance(value, dict) else value
    if getattr(model, "generation_config", None) is not None:
        result.__dict__["generation_config"] = copy.deepcopy(model.generation_config)
    return result
