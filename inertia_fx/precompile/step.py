"""A decode step that remembers between processes: the second start of a program does not trace and compile again.

Tracing a model's Python is most of a warm compile, and torch's caches begin after it. So the whole compiled step, guards
included, is kept in Inductor's cache directory (``TORCHINDUCTOR_CACHE_DIR``), one file for each combination of what
:meth:`Step._key` lists; `inertia_fx.traces` sees to it that one is only used where tracing would have made it again.

For CPUs and Inductor's default settings: weights compiled in (freezing) and CUDA graphs do not belong into a file. Needs
Python 3.11, as 3.10 does not tell where code comes from.
"""

from __future__ import annotations

import functools
import hashlib
import os
import pathlib
import pickle
import platform
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers

from .. import debug, kernels, passes
from ..backend import inertia, own_code
from ..errors import RecompileError
from . import capture as traces


class Step:
    """A function, compiled with our backend, whose compiled versions are looked for on disk first.

    Args:
        function: takes positional arguments only and is one graph.
        options: of the backend `inertia_fx`, whose inner compiler has to be Inductor.
        describe: (arguments) -> what else tells one compile from another, as text.
    """

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any], describe: Callable[..., str]) -> None:
        self.function = own_code(function)
        self.options = dict(options)
        self.describe = describe
        self.compiled = torch.compile(self.function, backend=inertia, fullgraph=True, options=self.options)
        self.traces: list[traces.Trace] = []

    def __call__(self, *arguments: Any) -> Any:
        if not _is_plain():
            return self.compiled(*arguments)
        trace = self._known(arguments)
        if trace is None:
            with torch._dynamo.convert_frame.compile_lock:
                trace = self._known(arguments)  # another thread may have compiled it meanwhile
                if trace is None:
                    trace = self._new(arguments)
        return trace.run(*arguments)

    def _known(self, arguments: tuple[Any, ...]) -> traces.Trace | None:
        for trace in self.traces:
            if not trace.forgotten and trace.accepts(arguments):
                return trace
        return None

    def _new(self, arguments: tuple[Any, ...]) -> traces.Trace:
        self.traces = [trace for trace in self.traces if not trace.forgotten]
        if len(self.traces) >= torch._dynamo.config.recompile_limit:
            raise RecompileError
        trace = self._find(arguments)
        self.traces.insert(0, trace)
        return trace

    def _find(self, arguments: tuple[Any, ...]) -> traces.Trace:
        file = _folder() / f"{self._key(arguments)}.step"
        # Whoever records explanations wants to see the passes at work.
        if file.exists() and not debug.is_recorded():
            debug.stage("looking at the step that an earlier run has compiled")
            found = _read(file, self.function, arguments)
            if found is not None:
                return found
            debug.stage("tracing the decode step, which is compiled once")
        trace, stored = traces.capture(self.function, arguments, self._backend)
        if isinstance(stored, str):
            debug.log.warning("no warm start, the compiled step stays in this process: %s", stored)
        else:
            _write(file, stored)
        return trace

    def _backend(self, gm: Any, inputs: list[Any]) -> Any:
        return inertia(gm, inputs, options=self.options)

    def _key(self, arguments: tuple[Any, ...]) -> str:
        """Names the file. Guards decide whether a trace fits; what they do not see of its making has to be in here."""
        parts = (
            _software(),
            platform.machine(),
            torch.backends.cpu.get_cpu_capability(),
            [_settings(config) for config in _configurations()],
            (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()),
            (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
            self.function.__code__.co_code,
            sorted((name, repr(value)) for name, value in self.options.items()),
            self.describe(*arguments),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()


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
        not torch._inductor.config.force_disable_caches
        and torch._inductor.config.fx_graph_cache
        and not torch._inductor.config.freezing
        and all(getattr(torch._inductor.config, name, None) is None for name in _PASSES)
        and not torch._dynamo.config.disable
        and torch._dynamo.eval_frame._stance.stance == "default"
        and torch._C._len_torch_function_stack() == 0
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch.compiler.is_compiling()
    )


def _configurations() -> tuple[Any, ...]:
    from torch.fx.experimental import _config as symbols

    return (torch._dynamo.config, torch._functorch.config, torch._inductor.config, symbols)


def _settings(config: Any) -> list[tuple[str, str]]:
    """Sets are sorted, as their order depends on the process."""
    values = config.save_config_portable().items()
    return sorted((name, repr(sorted(map(str, value)) if isinstance(value, set) else value)) for name, value in values)


@functools.cache
def _software() -> tuple[Any, ...]:
    """Versions, and our own sources, which come without one while they are worked on."""
    folders = {pathlib.Path(module.__file__ or "").parent for module in (debug, kernels, passes)}
    sources = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        sources.update(file.read_bytes())
    torch_version = (torch.__version__, torch.version.git_version)
    return (sources.hexdigest(), torch_version, transformers.__version__, sys.version)


def _folder() -> pathlib.Path:
    from torch._inductor.runtime.runtime_utils import cache_dir

    return pathlib.Path(cache_dir()) / "inertia_fx"


def _read(file: pathlib.Path, function: types.FunctionType, arguments: tuple[Any, ...]) -> traces.Trace | None:
    try:
        stored = pickle.loads(file.read_bytes())
        found = traces.restore(stored, function, arguments)
    except Exception as failure:  # a broken pickle can raise anything; it will be written anew
        debug.log.warning("%s cannot be read (%s: %s): compiling anew", file, type(failure).__name__, failure)
        return None
    if isinstance(found, str):
        debug.log.info("the step on disk was compiled for something else (%s): compiling anew", found)
        return None
    return found


def _write(file: pathlib.Path, stored: traces.Stored) -> None:
    """Whole or not at all: other processes may be reading."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as target:
            try:
                target.write(pickle.dumps(stored))
                target.flush()
                os.replace(target.name, file)
            except BaseException:
                os.unlink(target.name)
                raise
    except OSError as failure:
        debug.log.warning("the compiled step could not be kept in %s: %s", file.parent, failure)
