"""Hold what one call of a function was compiled to, for the calls that follow."""

from __future__ import annotations

import dataclasses
import itertools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from .identity import IdentityGuard, check_all


@dataclasses.dataclass
class CompiledEntry:
    """One compiled version of a function.

    Attributes:
        compiled: called like the function.
        names: the function's parameters.
        guards: Dynamo's guard manager; `check` takes a dict of the arguments.
        identities: called with (arguments, globals), whether every identity guard holds.
        scope: the function's globals.
    """

    compiled: types.FunctionType
    names: tuple[str, ...]
    guards: Any
    identities: Callable[[dict[str, Any], dict[str, Any]], bool]
    scope: dict[str, Any]

    @property
    def forgotten(self) -> bool:
        """Whether `torch._dynamo.reset()` was called since."""
        from torch._dynamo import convert_frame

        return self.compiled.__code__ not in convert_frame.output_codes

    def accepts(self, arguments: Sequence[Any]) -> bool:
        """Return whether a call with these arguments would compile to this entry."""
        local = dict(zip(self.names, arguments, strict=True))
        return bool(self.guards.check(local)) and self.identities(local, self.scope)


def make_entry(
    function: types.FunctionType,
    bytecode: types.CodeType,
    backend_id: str,
    compiled: Callable[..., Any],
    guards: Any,
    identities: list[IdentityGuard],
) -> CompiledEntry:
    """Bind Dynamo's bytecode to what the backend has compiled.

    The bytecode finds it among the function's globals, where it stays as long as the entry lives.

    Args:
        function: the function that was compiled.
        bytecode: Dynamo's, which reads the global `backend_id`.
        compiled: what the backend returned.
        guards: Dynamo's guard manager.
        identities: the guards that the manager does not check.
    """
    from torch._dynamo import convert_frame

    scope = function.__globals__
    # A name of its own: one file may be read several times.
    name = f"__inertia_compiled_{next(_numbers)}"
    scope.pop(backend_id, None)
    scope[name] = compiled
    bytecode = rename_globals(bytecode, {backend_id: name})
    bound = types.FunctionType(bytecode, scope, function.__name__)
    entry = CompiledEntry(bound, parameters_of(function), guards, check_all(identities), scope)
    weakref.finalize(entry, scope.pop, name, None)
    convert_frame.output_codes.add(bytecode)  # torch._dynamo.reset() empties it
    return entry


_numbers = itertools.count()


def rename_globals(code: types.CodeType, names: dict[str, str]) -> types.CodeType:
    """Return the code with other names for these globals."""
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names))


def parameters_of(function: types.FunctionType) -> tuple[str, ...]:
    """Name the parameters of a function that takes positional arguments only."""
    code = function.__code__
    assert function.__closure__ is None and function.__defaults__ is None and not code.co_kwonlyargcount
    return code.co_varnames[: code.co_argcount]
