"""Call a compiled decode step that is kept between processes: the second start of a program neither traces nor compiles.

Tracing a model's Python is most of a warm compile, and torch's caches begin after it. So the whole compiled step, guards
included, is kept in a file, see `files`; `artifact` sees to it that one is only used where tracing would have made it
again.

For CPUs and Inductor's default settings: weights compiled in (freezing) and CUDA graphs do not belong into a file. Needs
Python 3.11, as 3.10 does not tell where code comes from.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .. import debug
from ..backend import inertia, own_code
from ..errors import RecompileError
from . import artifact as artifacts
from . import capture, files
from .callbacks import Callbacks
from .entry import CompiledEntry


class PrecompiledStep:
    """Compile a function with our backend, after looking for its compiled versions on disk.

    Args:
        function: takes positional arguments only and is one graph.
        options: of the backend `inertia_fx`, whose inner compiler has to be Inductor.
        callbacks: what is special about the arguments.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], callbacks: Callbacks) -> None:
        self.function = own_code(function)
        self.options = dict(options)
        self.callbacks = callbacks
        self.compiled = torch.compile(self.function, backend=inertia, fullgraph=True, options=self.options)
        self.entries: list[CompiledEntry] = []

    def __call__(self, *arguments: Any) -> Any:
        if not _is_plain():
            return self.compiled(*arguments)
        entry = self._known(arguments)
        if entry is None:
            with torch._dynamo.convert_frame.compile_lock:
                entry = self._known(arguments)  # another thread may have compiled it meanwhile
                if entry is None:
                    entry = self._new(arguments)
        return entry.compiled(*arguments)

    def _known(self, arguments: tuple[Any, ...]) -> CompiledEntry | None:
        for entry in self.entries:
            if not entry.forgotten and entry.accepts(arguments):
                return entry
        return None

    def _new(self, arguments: tuple[Any, ...]) -> CompiledEntry:
        self.entries = [entry for entry in self.entries if not entry.forgotten]
        if len(self.entries) >= torch.compiler.config.recompile_limit:
            raise RecompileError
        entry = self._find(arguments)
        self.entries.insert(0, entry)
        return entry

    def _find(self, arguments: tuple[Any, ...]) -> CompiledEntry:
        file = files.file_of(self.function, self.options, self.callbacks.describe(*arguments))
        # Whoever records explanations wants to see the passes at work.
        if file.exists() and not debug.is_recorded():
            debug.stage("looking at the step that an earlier run has compiled")
            found = self._restored(file, arguments)
            if found is not None:
                return found
            debug.stage("tracing the decode step, which is compiled once")
        entry, artifact = capture.capture(self.function, arguments, self._backend, self.callbacks)
        if isinstance(artifact, str):
            debug.log.warning("no warm start, the compiled step stays in this process: %s", artifact)
        else:
            files.write(file, artifact)
        return entry

    def _restored(self, file: pathlib.Path, arguments: tuple[Any, ...]) -> CompiledEntry | None:
        try:
            found = artifacts.restore(files.read(file), self.function, arguments, self.callbacks.complete)
        except Exception as failure:  # a broken pickle can raise anything; it will be written anew
            debug.log.warning("%s cannot be read (%s: %s): compiling anew", file, type(failure).__name__, failure)
            return None
        if isinstance(found, str):
            debug.log.info("the step on disk was compiled for something else (%s): compiling anew", found)
            return None
        return found

    def _backend(self, gm: Any, inputs: list[Any]) -> Any:
        return inertia(gm, inputs, options=self.options)


_PASSES = (
    "pre_grad_custom_pass",
    "joint_custom_pre_pass",
    "joint_custom_post_pass",
    "post_grad_custom_pre_pass",
    "post_grad_custom_post_pass",
    "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass",
)
"""Inductor's settings that are users' functions: what they do to a graph cannot be told from outside."""


def _is_plain() -> bool:
    """Whether calls go the usual way: caches on, no mode that intercepts, torch.compile neither off nor tracing us."""
    return (
        not torch.compiler.config.force_disable_caches
        and torch._inductor.config.fx_graph_cache
        and not torch._inductor.config.freezing
        and all(getattr(torch._inductor.config, name, None) is None for name in _PASSES)
        and not torch._dynamo.config.disable
        and torch._dynamo.eval_frame._stance.stance == "default"
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.compiler.is_compiling()
    )
