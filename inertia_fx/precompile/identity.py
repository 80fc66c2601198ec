"""Guard a compiled function on the identity of objects, by expressions that another process can evaluate too.

Dynamo's own identity guards hold addresses, which mean nothing elsewhere: it refuses to serialize them. Here the guard
is the expression that leads to the object ("this global is that very function"), and the object is guarded anew in every
process that finds the same one there, see `fingerprints`.
"""

from __future__ import annotations

import builtins
import dataclasses
import types
from collections.abc import Callable
from typing import Any

from .fingerprints import CONSTANTS

BUILTINS = "__inertia_builtins"
"""The builtins in expressions and bytecode. Dynamo's name for them has a number of this process in it."""


@dataclasses.dataclass(frozen=True)
class IdentityGuard:
    """The expression that leads to an object (of the arguments ``L`` and the globals ``G``), and the object."""

    expression: str
    value: Any


def evaluate(expression: str, local: dict[str, Any], scope: dict[str, Any]) -> Any:
    """Evaluate a guard's expression on these arguments and globals.

    Raises:
        LookupError, AttributeError, TypeError: it leads nowhere.
    """
    return eval(expression, _vocabulary(), {"L": local, "G": scope})


def check_all(guards: list[IdentityGuard]) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """Write one function that checks all guards: it runs before every call.

    Constants are compared by value, as one may be made anew.

    Returns:
        Called with (arguments by name, globals), whether every guard holds.
    """
    words = _vocabulary()
    terms = []
    for number, guard in enumerate(map(_on_code, guards)):
        words[f"__identity_{number}"] = guard.value
        terms.append(f"{guard.expression} {'==' if type(guard.value) in CONSTANTS else 'is'} __identity_{number}")
    source = "def holds(L, G):\n    try:\n        return " + (" and ".join(terms) or "True")
    exec(source + "\n    except (LookupError, AttributeError, TypeError):\n        return False", words)
    return words["holds"]


def _on_code(guard: IdentityGuard) -> IdentityGuard:
    """Of a function only the code is guarded, as in Dynamo: one that is made anew for every call is the same."""
    if isinstance(guard.value, types.FunctionType):
        return IdentityGuard(f"{guard.expression}.__code__", guard.value.__code__)
    return guard


def _vocabulary() -> dict[str, Any]:
    """Return what the expressions call."""
    from torch._dynamo import guards

    return {**guards._get_closure_vars(), BUILTINS: builtins.__dict__}
