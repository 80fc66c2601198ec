"""The guards of a compiled function, in a form that another process can check. See `traces`, which keeps them."""

from __future__ import annotations

import contextvars
import dataclasses
import re
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..cache.storage import mark_for_compile
from .fingerprints import CONSTANTS, NotStorable

pickling_guards: contextvars.ContextVar[bool] = contextvars.ContextVar("inertia_fx_pickling_guards", default=False)
"""Set while guards are stored: a compiled model is then pickled as what it is, not as what it is made of."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """A guard on an identity: the expression that leads to the object, and the object."""

    expression: str
    value: Any


@dataclasses.dataclass
class Found:
    """What the guards were about: pins by expression, a value of each class by the expression that leads to it, modules."""

    pins: dict[str, Pin] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: list[torch.nn.Module] = dataclasses.field(default_factory=list)
    state: bytes = b""


def portable_guards(output: Any, function: types.FunctionType) -> tuple[Any, Found]:
    """(guard manager without the guards that mean nothing elsewhere, what they and it are about)."""
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.hooks import Hooks
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    identities = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
    found, classes = Found(), set()

    def keep(entries: Sequence[Any]) -> list[bool]:
        kept = []
        for entry in entries:
            expression = entry.orig_guard.name
            if isinstance(entry.value, torch.nn.Module):
                found.modules.append(entry.value)
            if isinstance(entry.value, torch.Tensor) and is_traceable_wrapper_subclass(entry.value):
                raise NotStorable(f"{entry.name} is a {type(entry.value).__name__}")
            portable = identities.isdisjoint((entry.guard_type, *entry.derived_guard_types))
            if not portable:
                if not entry.has_value:
                    raise NotStorable(f"the guard {entry.guard_type} on {entry.name} is about nothing")
                found.pins[expression] = Pin(expression, entry.value)
            elif entry.guard_type == "TYPE_MATCH" and entry.has_value and type(entry.value) not in classes:
                classes.add(type(entry.value))
                found.values[expression] = entry.value
            kept.append(portable)
        return kept

    token = pickling_guards.set(True)
    try:
        checks = output.build_guards(function.__code__, hooks=Hooks(guard_filter_fn=keep), save=True, strict_error=True)
    finally:
        pickling_guards.reset(token)
    assert checks.guards_state is not None
    found.state = checks.guards_state
    return checks.guard_manager, found


def text_of(guards: Any) -> list[str]:
    """What guards say, without addresses, and without the types of tensors, which are not real when they are read."""
    lines = []
    for line in str(guards).splitlines():
        line = line.split("  # ")[0].rstrip()
        if "NO_TENSOR_ALIASING" in line:  # read from disk it is about parameters too, which are no parameters then
            continue
        if "GuardManager: source=" in line:
            line = re.sub(r", type=<class '[^']*'>", "", line)
        lines.append(re.sub(r"(___check_(?:type|obj)_id\(.*), \d+\)", r"\1)", line))
    return lines


def _pinned(pin: Pin) -> Pin:
    """Of a function only the code is pinned, as in Dynamo: one that is made anew for every call is the same."""
    if isinstance(pin.value, types.FunctionType):
        return Pin(f"{pin.expression}.__code__", pin.value.__code__)
    return pin


def hook_in(arguments: Sequence[Any]) -> str | None:
    """Which hook there is, if any: torch compiles them in but does not guard on them."""
    from torch.nn.modules import module as of_all

    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        if getattr(of_all, name):
            return f"torch has {name}"
    for argument in arguments:
        if isinstance(argument, torch.nn.Module):
            for path, part in argument.named_modules():
                for name in names:
                    if getattr(part, name):
                        return f"the module {path or 'itself'} has {name}"
    return None


def foreign_call(graph_module: torch.fx.GraphModule) -> str | None:
    """What the graph calls that is neither torch's nor ours: code that Dynamo did not read, and that no guard is about."""
    for part in graph_module.modules():
        if not isinstance(part, torch.fx.GraphModule):
            continue
        for node in part.graph.nodes:
            target = node.target
            if node.op == "call_module" and not isinstance(part.get_submodule(target), torch.fx.GraphModule):
                return f"the module {target}"
            if node.op != "call_function":
                continue
            if isinstance(target, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
                name = str(target)
                if name.split(".")[0].split("::")[0] not in ("aten", "prims", "inertia_fx"):
                    return name
            elif not isinstance(target, torch._ops.HigherOrderOperator):
                home = (getattr(target, "__module__", None) or "torch").split(".")[0]
                if home not in ("torch", "_operator", "operator", "builtins", "math"):
                    return f"{home}.{getattr(target, '__qualname__', target)}"
    return None


def mark_again(local: dict[str, Any]) -> None:
    """Dynamic dimensions are marks on tensors, which do not survive pickling; guards on them are made from these."""
    for value in local.values():
        if hasattr(value, "layers") and hasattr(value, "_state"):
            mark_for_compile(value.layers, value._state)


def evaluate(expression: str, local: dict[str, Any], scope: dict[str, Any]) -> Any:
    return eval(expression, _vocabulary(), {"L": local, "G": scope})


def _vocabulary() -> dict[str, Any]:
    """What Dynamo's expressions call."""
    from torch._dynamo import guards

    return dict(guards._get_closure_vars())


def all_hold(pins: list[Pin]) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """One function for all pins: it runs before every call. Constants are compared by value, as one may be made anew."""
    words = _vocabulary()
    terms = []
    for number, pin in enumerate(map(_pinned, pins)):
        words[f"__pin_{number}"] = pin.value
        terms.append(f"{pin.expression} {'==' if type(pin.value) in CONSTANTS else 'is'} __pin_{number}")
    source = "def holds(L, G):\n    try:\n        return " + (" and ".join(terms) or "True")
    exec(source + "\n    except (LookupError, AttributeError, TypeError):\n        return False", words)
    return words["holds"]
