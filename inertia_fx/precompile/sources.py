"""Record which source files and functions a trace has read, so that another process sees whether its own are the same."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import types
from collections.abc import Iterable
from typing import Any

from .fingerprints import NotStorable, codes_of, fingerprint_bound, fingerprint_code


def record_sources(
    traced: Iterable[types.CodeType], classes: Iterable[type]
) -> tuple[dict[str, str], dict[tuple[str, str], Any]]:
    """Digest the files of traced code, and fingerprint what is bound to the names of its functions now.

    Args:
        traced: all code that Dynamo read.
        classes: classes that have been fingerprinted: the methods that Python generated for them need no file.

    Returns:
        (source file -> digest, (module, path) -> fingerprint).

    Raises:
        NotStorable: traced code has no file, or belongs to no module.
    """
    codes = [code for code in traced if not code.co_filename.startswith("<frozen ")]  # part of Python
    written = [code for code in codes if not code.co_filename.startswith("<")]
    generated = [code for code in codes if code.co_filename.startswith("<")]
    if generated:  # dataclasses write some of their methods
        defined = {code for kind in classes for code in codes_of(kind)}
        for code in generated:
            if fingerprint_code(code) not in defined:
                raise NotStorable(f"{code.co_name} comes from {code.co_filename}, not from a file")
    files = {file: _digest(file) for file in sorted({code.co_filename for code in written})}
    if "" in files.values():
        raise NotStorable("traced code comes from files that cannot be read")
    functions: dict[tuple[str, str], Any] = {}
    for code in written:
        module = inspect.getmodule(code)
        if module is None:
            raise NotStorable(f"{code.co_filename} belongs to no module")
        path = getattr(code, "co_qualname", "").split(".<locals>")[0]  # Python 3.10 does not tell
        if (module.__name__, path) not in functions:
            functions[module.__name__, path] = fingerprint_bound(module, path)
    return files, functions


def changed_source(files: dict[str, str], functions: dict[tuple[str, str], Any]) -> str | None:
    """Name the first file or function that is not what `record_sources` found; None if all are."""
    for file, digest in files.items():
        if _digest(file) != digest:
            return f"{file} has changed"
    for (module, path), fingerprint in functions.items():
        with contextlib.suppress(NotStorable):
            if fingerprint_bound(importlib.import_module(module), path) == fingerprint:
                continue
        return f"{module}.{path} is another function"
    return None


def _digest(file: str) -> str:
    """Digest a source file; empty if it is not there."""
    with contextlib.suppress(OSError), open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()
    return ""
