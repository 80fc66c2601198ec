"""Fingerprint functions, classes and other objects in words that mean the same in another process.

Two processes run the same code if the fingerprints are equal: names and code objects, through decorators and closures,
and for a class all of its functions and constants, inherited ones included. Where something is kept, or in which order a
set lists its elements, is not part of it.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import sys
import types
from typing import Any

import torch


class NotStorable(Exception):
    """Say why something cannot be recognised in another process, in words for the log."""


def tag_generations() -> None:
    """Do to `nn.Module.__init__` what a process's first torch.compile does, so that it does not look like a patch later."""
    from torch._dynamo import mutation_guard

    mutation_guard.install_generation_tagging_init()


CONSTANTS = (bool, int, float, complex, str, bytes, type(None), type(...))


def fingerprint(value: Any) -> Any:
    """Fingerprint an object that is guarded by identity.

    Returns:
        Nested tuples, lists, strings and numbers, which can be pickled and compared.

    Raises:
        NotStorable: another process could not tell whether it has the same one.
    """
    if type(value) in CONSTANTS:
        return (type(value).__name__, repr(value))
    if isinstance(value, enum.Enum):
        return ("enum", _named(type(value)), value.name)
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__)
    if isinstance(value, types.FunctionType):
        return fingerprint_function(value)
    if isinstance(value, types.CodeType):
        return ("code", fingerprint_code(value))
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.dtype):
        return (type(value).__name__, str(value))
    if isinstance(value, type):
        return ("class", fingerprint_class(value))
    if isinstance(value, types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return ("builtin", _named(value))
    raise NotStorable(f"a guard is about a {type(value).__name__}, which another process cannot recognise")


def _named(value: Any) -> tuple[str | None, str]:
    return getattr(value, "__module__", None), value.__qualname__


def fingerprint_code(code: types.CodeType) -> str:
    """Fingerprint what code does: neither its own name nor its file nor its line."""
    parts = (
        code.co_code,
        getattr(code, "co_exceptiontable", b""),  # of Python 3.11 on
        [_constant(c) for c in code.co_consts],
        (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
        (code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return fingerprint_code(value)
    if isinstance(value, frozenset):  # its order depends on the process
        return repr(sorted(map(_constant, value)))
    if isinstance(value, tuple):
        return repr(tuple(map(_constant, value)))
    return repr(value)


def fingerprint_function(value: Any) -> Any:
    """Fingerprint a function, method or property, with all functions that it wraps or closes over."""
    return _function(value, set())


def _function(value: Any, seen: set[int]) -> Any:
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, types.FunctionType):
        bound = (value.__defaults__, sorted((value.__kwdefaults__ or {}).items()))
        cells = [_function(_contents(cell), seen) for cell in value.__closure__ or ()]
        wrapped = _function(getattr(value, "__wrapped__", None), seen)
        home = value.__globals__.get("__name__")
        module = sys.modules.get(home) if isinstance(home, str) else None
        home = (home, module is not None and vars(module) is value.__globals__)  # a copy of them can hold anything
        return ("function", home, fingerprint_code(value.__code__), _settings(bound, seen), wrapped, cells)
    if isinstance(value, property):
        return ("property", *(_function(part, seen) for part in (value.fget, value.fset)))
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return (type(value).__name__, _function(value.__func__, seen))
    if isinstance(value, functools.cached_property):
        return ("cached_property", _function(value.func, seen))
    if isinstance(value, functools.partial):
        bound = (value.args, sorted(value.keywords.items()))
        return ("partial", _function(value.func, seen), _settings(bound, seen))
    if hasattr(value, "__wrapped__") and not isinstance(value, type):
        return (type(value).__name__, _function(value.__wrapped__, seen))
    return _settings(value, seen)


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return "an empty cell"


def _settings(value: Any, seen: set[int]) -> Any:
    """Fingerprint constants by value, in tuples, lists and dicts too; functions as functions; of anything else the type."""
    if type(value) in CONSTANTS:
        return _constant(value)
    if type(value) in (tuple, list):
        return [_function(item, seen) for item in value]
    if type(value) is dict:
        return [(_constant(key), _function(item, seen)) for key, item in value.items() if type(key) in CONSTANTS]
    if isinstance(value, type | types.BuiltinFunctionType):
        return _named(value)
    if isinstance(value, types.ModuleType):
        return value.__name__
    return _named(type(value))


def fingerprint_class(kind: type) -> Any:
    """Fingerprint a class by its name and a digest of what it and its bases define.

    Raises:
        NotStorable: the class was defined inside a function, where another process does not find it.
    """
    if "<locals>" in kind.__qualname__:
        raise NotStorable(f"the class {kind.__qualname__} was defined inside a function")
    return (_named(kind), [_digest(base) for base in kind.__mro__ if base.__module__ != "builtins"])


def _digest(kind: type) -> str:
    """Digest one class without its bases. Interpreter's and caches' own attributes are not code."""
    parts = [(name, fingerprint_function(value)) for name, value in sorted(vars(kind).items()) if name not in _NOT_CODE]
    return hashlib.sha256(repr((_named(kind), parts)).encode()).hexdigest()


_NOT_CODE = {
    "__abstractmethods__", "__annotations__", "__annotations_cache__", "__dict__", "__doc__", "__firstlineno__",
    "__slotnames__", "__static_attributes__", "__weakref__", "_abc_impl",
}  # fmt: skip


def codes_of(kind: type) -> set[str]:
    """Fingerprint the code of a class's functions, inherited ones included."""
    found = set()
    for base in kind.__mro__:
        for value in vars(base).values():
            function = inspect.unwrap(value) if callable(value) else value
            if isinstance(function, types.FunctionType):
                found.add(fingerprint_code(function.__code__))
    return found


def fingerprint_bound(module: types.ModuleType, path: str) -> Any:
    """Fingerprint what a name like `Class.method` is bound to.

    Raises:
        NotStorable: it does not lead anywhere.
    """
    value: Any = module
    for name in path.split("."):
        try:
            value = inspect.getattr_static(value, name)
        except AttributeError:
            raise NotStorable(f"{module.__name__} has no {path or 'such function'}") from None
    return fingerprint_function(value)
