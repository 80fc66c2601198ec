"""Split the guards of a compiled function into those that another process can check and those on identities."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .fingerprints import NotStorable
from .identity import BUILTINS, IdentityGuard


@dataclasses.dataclass
class PortableGuards:
    """The guards of one compile, apart.

    Attributes:
        manager: Dynamo's guard manager without the guards on identities.
        state: the same, serialized by Dynamo.
        identities: the guards on identities, by expression.
        values: a value of each class that is guarded on, by the expression that leads to it.
        modules: every module that a guard is about.
    """

    manager: Any = None
    state: bytes = b""
    identities: dict[str, IdentityGuard] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: list[torch.nn.Module] = dataclasses.field(default_factory=list)


def build_guards(
    output: Any, function: types.FunctionType, pickling: Callable[[], contextlib.AbstractContextManager[Any]]
) -> PortableGuards:
    """Build and serialize the guards of a captured function.

    Args:
        output: Dynamo's `GraphCaptureOutput`.
        function: the function that was captured.
        pickling: a context manager, see `Callbacks`.

    Raises:
        NotStorable: a guard is about something that another process cannot check.
        Exception: whatever users' objects raise when they are pickled.
    """
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.hooks import Hooks
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    unsupported = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
    of_builtins = f"G[{builtins_name(output)!r}]"
    found, classes = PortableGuards(), set()

    def keep(entries: Sequence[Any]) -> list[bool]:
        kept = []
        for entry in entries:
            name = entry.orig_guard.name
            expression = name.replace(of_builtins, BUILTINS)
            if isinstance(entry.value, torch.nn.Module):
                found.modules.append(entry.value)
            if isinstance(entry.value, torch.Tensor) and is_traceable_wrapper_subclass(entry.value):
                raise NotStorable(f"{entry.name} is a {type(entry.value).__name__}")
            # Other processes have another name for the builtins.
            portable = unsupported.isdisjoint((entry.guard_type, *entry.derived_guard_types)) and name == expression
            if not portable:
                if not entry.has_value:
                    raise NotStorable(f"the guard {entry.guard_type} on {entry.name} is about nothing")
                found.identities[expression] = IdentityGuard(expression, entry.value)
            elif entry.guard_type == "TYPE_MATCH" and entry.has_value and type(entry.value) not in classes:
                classes.add(type(entry.value))
                found.values[expression] = entry.value
            kept.append(portable)
        return kept

    with pickling():
        checks = output.build_guards(function.__code__, hooks=Hooks(guard_filter_fn=keep), save=True, strict_error=True)
    assert checks.guards_state is not None
    found.manager, found.state = checks.guard_manager, checks.guards_state
    return found


def builtins_name(output: Any) -> str:
    """Return the global under which the builtins were found while tracing; empty if there is none."""
    return output.output_graph.name_of_builtins_dict_key_in_fglobals or ""


def text_of(guards: Any) -> list[str]:
    """Print guards without addresses, and without the types of tensors, which are not real when they are read."""
    lines = []
    for line in str(guards).splitlines():
        line = line.split("  # ")[0].rstrip()
        if "NO_TENSOR_ALIASING" in line:  # read from disk it is about parameters too, which are no parameters then
            continue
        if "GuardManager: source=" in line:
            line = re.sub(r", type=<class '[^']*'>", "", line)
        lines.append(re.sub(r"(___check_(?:type|obj)_id\(.*), \d+\)", r"\1)", line))
    return lines
