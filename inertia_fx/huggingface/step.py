"""Trace and compile the decode step of a compiled model, once for each kind of step."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import torch
from torch import Tensor

from ..backend import inertia, own_code
from ..config import CompilerOptions, Config
from ..errors import CompileDisabledError
from ..precompile import PrecompiledStep
from . import precompiling
from .cache import InertiaCache


@dataclasses.dataclass
class Runtime:
    """Hold what a compiled model has besides the original: its settings and its compiled decode steps.

    Attributes:
        config: what is kept, unless a cache brings settings of its own.
        compiler: how steps are compiled.
        cache_name: what the model's forward calls its cache.
        layers: cached layers.
        uid: owner of the caches that the model has filled.
        steps: a compiled step for each set of settings that is compiled in, scored or not.
        compiled: (id of a step, batch size) pairs that have run, and so have been compiled.
    """

    config: Config
    compiler: CompilerOptions
    cache_name: str
    layers: int
    uid: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    steps: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)
    compiled: set[tuple[int, int]] = dataclasses.field(default_factory=set)

    def step(self, config: Config, score: bool) -> Any:
        """Return the compiled decode step for these settings, with or without scores."""
        # Without scores no setting is left in the graph: one step serves them all.
        graph: dict[str, Any] = config.graph_options(score=True) if score else {"score": False}
        key = tuple(graph.items())
        if key not in self.steps:
            options = {**graph, **self.compiler.backend_options()}
            if self.compiler.warm_start:
                self.steps[key] = PrecompiledStep(_decode, options, precompiling.callbacks(_describe))
            else:
                self.steps[key] = torch.compile(own_code(_decode), backend=inertia, fullgraph=True, options=options)
        return self.steps[key]

    def compiles(self, step: Any, batch: int) -> bool:
        """Tell whether this is the first time that a step runs for this batch size, and remember it."""
        known = len(self.compiled)
        self.compiled.add((id(step), batch))
        return len(self.compiled) > known


def _decode(
    model: Any, forward: Any, cache: InertiaCache, cache_name: str, additive: bool, arguments: dict[str, Any]
) -> Any:
    """Run one decode step, as it is traced. Correct by itself; the passes add what moves the momentum."""
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
    """Describe what tells this decode step's compile from others', for its file on disk."""
    given = [
        (name, (value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else repr(value))
        for name, value in sorted(arguments.items())
    ]
    parts = sorted({f"{type(part).__module__}.{type(part).__qualname__}" for part in model.modules()})  # LoRA or not
    kind = (type(model).__module__, type(model).__qualname__, parts, model.config.to_json_string())
    assert cache.config is not None
    return repr((kind, cache.layers[0].keys.dtype, cache.rows, cache.config, cache_name, additive, given))
