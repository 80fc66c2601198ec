"""Name, read and write the files of compiled steps, in Inductor's cache directory (``TORCHINDUCTOR_CACHE_DIR``)."""

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
from collections.abc import Mapping
from typing import Any

import torch

from .. import debug, kernels, passes
from .artifact import Artifact


def file_of(function: types.FunctionType, options: Mapping[str, Any], description: str) -> pathlib.Path:
    """Name the file of a compiled step.

    Guards decide whether an entry fits a call; what they do not see of its making has to be in the name.

    Args:
        function: the function that is compiled.
        options: the backend's.
        description: what else tells one compile from another.
    """
    parts = (
        _software(),
        platform.machine(),
        torch.backends.cpu.get_cpu_capability(),
        [_settings(config) for config in _configurations()],
        (torch.get_num_threads(), torch.backends.mkldnn.enabled, torch.get_float32_matmul_precision()),
        (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        function.__code__.co_code,
        sorted((name, repr(value)) for name, value in options.items()),
        description,
    )
    return folder() / f"{hashlib.sha256(repr(parts).encode()).hexdigest()}.step"


def folder() -> pathlib.Path:
    """Return the folder of the files."""
    from torch._inductor.runtime.runtime_utils import cache_dir

    return pathlib.Path(cache_dir()) / "inertia_fx"


def read(file: pathlib.Path) -> Artifact:
    """Read an artifact.

    Raises:
        Exception: the file is not one of ours, or broken: a broken pickle can raise anything.
    """
    artifact = pickle.loads(file.read_bytes())
    if not isinstance(artifact, Artifact):
        raise TypeError(f"it holds a {type(artifact).__name__}")
    return artifact


def write(file: pathlib.Path, artifact: Artifact) -> None:
    """Write an artifact, whole or not at all: other processes may be reading. A failure is logged."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as target:
            try:
                target.write(pickle.dumps(artifact))
                target.flush()
                os.replace(target.name, file)
            except BaseException:
                os.unlink(target.name)
                raise
    except OSError as failure:
        debug.log.warning("the compiled step could not be kept in %s: %s", file.parent, failure)


def _configurations() -> tuple[Any, ...]:
    from torch.fx.experimental import _config as symbols

    return (torch._dynamo.config, torch._functorch.config, torch._inductor.config, symbols)


def _settings(config: Any) -> list[tuple[str, str]]:
    """List torch's settings. Sets are sorted, as their order depends on the process."""
    values = config.save_config_portable().items()
    return sorted((name, repr(sorted(map(str, value)) if isinstance(value, set) else value)) for name, value in values)


@functools.cache
def _software() -> tuple[Any, ...]:
    """List versions, and digest our own sources, which come without one while they are worked on."""
    folders = {pathlib.Path(module.__file__ or "").parent for module in (debug, kernels, passes)}
    sources = hashlib.sha256()
    for file in sorted(file for folder in folders for file in folder.rglob("*.py")):
        sources.update(file.read_bytes())
    return (sources.hexdigest(), (torch.__version__, torch.version.git_version), sys.version)
