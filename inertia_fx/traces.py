"""One compiled version of a function that outlives its process: as a value here, as bytes on disk.

Dynamo's bytecode, its guards and what Inductor compiled go into the bytes, through the same doors as torch's own
ahead-of-time packages (`torch._dynamo.aot_compile`). What those packages leave out of their guards is not left out here:
a guard on an *identity* ("this global is that very function") means nothing in another process, so the bytes hold what the
object was (its name, its code), and whoever reads them checks that and guards on the identity anew. What Dynamo takes for
granted within a process, that code does not change, is checked as well: the files that it read, and that the functions
it read are still bound to their names, unwrapped and unpatched. So a trace runs where Dynamo would have made the same
one, and nowhere else.
"""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import dis
import enum
import hashlib
import importlib
import inspect
import itertools
import pickle
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .slots import mark_for_compile

_FUNCTORCH = {"bundled_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""AOTAutograd's settings under which what it returns can be serialized."""


class NotStorable(Exception):
    """Why a trace cannot be kept, in words for the log."""


@dataclasses.dataclass(frozen=True)
class Pin:
    """A guard on an identity: the expression that leads to the object, and the object."""

    expression: str
    value: Any


@dataclasses.dataclass
class Trace:
    """What one call of a function was compiled to.

    Attributes:
        run: called like the function.
        names: the function's parameters.
        guards: Dynamo's guard manager; `check` takes a dict of the arguments.
        pinned: called with (arguments, globals), whether every pinned object is still where it was.
        scope: the function's globals.
    """

    run: Callable[..., Any]
    names: tuple[str, ...]
    guards: Any
    pinned: Callable[[dict[str, Any], dict[str, Any]], bool]
    scope: dict[str, Any]

    def accepts(self, arguments: Sequence[Any]) -> bool:
        """Whether a call with these arguments would compile to this trace."""
        local = dict(zip(self.names, arguments, strict=True))
        return bool(self.guards.check(local)) and self.pinned(local, self.scope)


@dataclasses.dataclass
class Stored:
    """A trace as it lies on disk. `compiled` and `guards` are pickles: only read when everything else agrees."""

    files: dict[str, str]
    functions: dict[tuple[str, str], Any]
    modules: dict[str, str]
    builtins: str
    pins: list[tuple[str, Any]]
    bytecode: Any
    backend_id: str
    compiled: bytes
    guards: bytes


def capture(
    function: types.FunctionType, arguments: tuple[Any, ...], backend: Callable[..., Any]
) -> tuple[Trace, Stored | str]:
    """Compile this call of `function`, as ``torch.compile(function, fullgraph=True, backend=backend)`` would.

    Returns:
        The trace, and its stored form or why there is none (the trace is then guarded by Dynamo alone, as usual).

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
        Exception: whatever `backend` raises.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._guards import TracingContext, tracing

    with convert_frame.compile_lock, get_metrics_context(), dynamo_timed("fullgraph_capture"):
        captured = convert_frame.fullgraph_capture(function, arguments)
        output, inputs = captured.graph_capture_output, captured.backend_input
        assert inputs is not None
        inputs.graph_module._backend_id = inputs.backend_id
        context = TracingContext(inputs.fake_mode)
        context.tensor_to_context = inputs.tensor_to_context
        with tracing(context), torch._functorch.config.patch(_FUNCTORCH):
            compiled = backend(inputs.graph_module, inputs.example_inputs)
        stored: Stored | str
        try:
            guards, pins, state = _portable_guards(output, function)
            stored = _store(output, function, inputs.backend_id, compiled, pins, state)
        except Exception as failure:  # what users' objects raise when they are pickled can be anything
            guards, pins = output.build_guards(function.__code__).guard_manager, []
            stored = str(failure) if isinstance(failure, NotStorable) else f"{type(failure).__name__}: {failure}"
    return _trace(function, output.bytecode, inputs.backend_id, compiled, guards, pins), stored


def restore(stored: Stored, function: types.FunctionType, arguments: tuple[Any, ...]) -> Trace | str:
    """The trace again, if this call of `function` would compile to it; otherwise the first thing that is different.

    Raises:
        Exception: what is stored cannot be read.
    """
    from torch._dynamo.package import SerializedCode, load_guard_manager, load_guards_state
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    for file, digest in stored.files.items():
        if _digest(file) != digest or not digest:
            return f"{file} has changed"
    for (module, path), description in stored.functions.items():
        with contextlib.suppress(NotStorable):
            if _describe_bound(importlib.import_module(module), path) == description:
                continue
        return f"{module}.{path} is another function"
    scope = function.__globals__
    for name, module in stored.modules.items():
        scope.setdefault(name, importlib.import_module(module))
    scope.setdefault(stored.builtins, builtins.__dict__)
    local = dict(zip(_names(function), arguments, strict=True))
    pins = []
    for expression, description in stored.pins:
        try:
            pin = Pin(expression, _evaluate(expression, local, scope))
            same = _describe(pin.value) == description
        except (NotStorable, LookupError, AttributeError, TypeError):
            same = False
        if not same:
            return f"{expression} is something else"
        pins.append(pin)
    state = load_guards_state(stored.guards)
    _mark_again(state.output_graph.local_scope)
    guards = load_guard_manager(state, function.__code__, scope)
    if not guards.check(local):
        return f"a guard fails:\n{guards.check_verbose(local)}"
    with torch._functorch.config.patch(_FUNCTORCH):
        compiled = deserialize_bundled_cache_entry(pickle.loads(stored.compiled))
    bytecode = SerializedCode.to_code_object(stored.bytecode)
    return _trace(function, bytecode, stored.backend_id, compiled, guards, pins)


def _trace(
    function: types.FunctionType,
    bytecode: types.CodeType,
    backend_id: str,
    compiled: Callable[..., Any],
    guards: Any,
    pins: list[Pin],
) -> Trace:
    """The bytecode finds what was compiled among the function's globals, as long as the trace lives."""
    scope = function.__globals__
    # A name of its own: one file may be read several times.
    name = f"__inertia_compiled_{next(_numbers)}"
    scope.pop(backend_id, None)
    scope[name] = compiled
    bytecode = bytecode.replace(co_names=tuple(name if word == backend_id else word for word in bytecode.co_names))
    trace = Trace(types.FunctionType(bytecode, scope, function.__name__), _names(function), guards, _holds(pins), scope)
    weakref.finalize(trace, scope.pop, name, None)
    return trace


_numbers = itertools.count()


def _names(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    assert function.__closure__ is None and function.__defaults__ is None and not code.co_kwonlyargcount
    return code.co_varnames[: code.co_argcount]


# -------------------------------------------------------------------------------------------------------------- guards


def _portable_guards(output: Any, function: types.FunctionType) -> tuple[Any, list[Pin], bytes]:
    """(guard manager, pins for what it leaves out, the guards as bytes)."""
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.hooks import Hooks

    identities = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
    pins: dict[str, Pin] = {}

    def keep(entries: Sequence[Any]) -> list[bool]:
        kept = []
        for entry in entries:
            portable = identities.isdisjoint((entry.guard_type, *entry.derived_guard_types))
            if not portable:
                if not entry.has_value:
                    raise NotStorable(f"the guard {entry.guard_type} on {entry.name} is about nothing")
                pins[entry.orig_guard.name] = Pin(entry.orig_guard.name, entry.value)
            kept.append(portable)
        return kept

    checks = output.build_guards(function.__code__, hooks=Hooks(guard_filter_fn=keep), save=True, strict_error=True)
    assert checks.guards_state is not None
    return checks.guard_manager, list(pins.values()), checks.guards_state


def _mark_again(local: dict[str, Any]) -> None:
    """Dynamic dimensions are marks on tensors, which do not survive pickling; guards on them are made from these."""
    for value in local.values():
        if hasattr(value, "layers") and hasattr(value, "_state"):
            mark_for_compile(value.layers, value._state)


def _evaluate(expression: str, local: dict[str, Any], scope: dict[str, Any]) -> Any:
    return eval(expression, _vocabulary(), {"L": local, "G": scope})


def _vocabulary() -> dict[str, Any]:
    """What Dynamo's expressions call."""
    from torch._dynamo import guards

    return dict(guards._get_closure_vars())


def _holds(pins: list[Pin]) -> Callable[[dict[str, Any], dict[str, Any]], bool]:
    """One function for all pins: it runs before every call. Constants are compared by value, as one may be made anew."""
    words = _vocabulary()
    terms = []
    for number, pin in enumerate(pins):
        words[f"__pin_{number}"] = pin.value
        terms.append(f"{pin.expression} {'==' if type(pin.value) in _CONSTANTS else 'is'} __pin_{number}")
    source = "def holds(L, G):\n    try:\n        return " + (" and ".join(terms) or "True")
    exec(source + "\n    except (LookupError, AttributeError, TypeError):\n        return False", words)
    return words["holds"]


_CONSTANTS = (bool, int, float, str, type(None))


def _describe(value: Any) -> Any:
    """What an object is, so that another process can tell whether it has the same one.

    Raises:
        NotStorable: it cannot.
    """
    if type(value) in _CONSTANTS:
        return (type(value).__name__, value)
    if isinstance(value, enum.Enum):
        return ("enum", _named(type(value)), value.name)
    if isinstance(value, types.ModuleType):
        return ("module", value.__name__)
    if isinstance(value, types.FunctionType):
        return ("function", _named(value), _describe_code(value.__code__))
    if isinstance(value, types.CodeType):
        return ("code", _describe_code(value))
    if isinstance(value, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch.dtype):
        return (type(value).__name__, str(value))
    if isinstance(value, type | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType):
        return ("named", _named(value))
    raise NotStorable(f"a guard is about a {type(value).__name__} that another process cannot recognise")


def _named(value: Any) -> tuple[str | None, str]:
    if "<locals>" in value.__qualname__ and not isinstance(value, types.FunctionType):
        raise NotStorable(f"{value.__qualname__} was defined inside a function")
    return getattr(value, "__module__", None), value.__qualname__


def _describe_code(code: types.CodeType) -> str:
    parts = (code.co_code.hex(), [_constant(c) for c in code.co_consts], code.co_names, code.co_varnames)
    return hashlib.sha256(repr((parts, code.co_freevars, code.co_cellvars)).encode()).hexdigest()


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return _describe_code(value)
    if isinstance(value, frozenset):  # the order of its elements depends on the process
        return repr(sorted(map(repr, value)))
    return repr(value)


def _describe_bound(module: types.ModuleType, path: str) -> Any:
    """What a name like `Class.method` is bound to, through every decorator.

    Raises:
        NotStorable: it does not lead to a function.
    """
    value: Any = module
    for name in path.split("."):  # an empty path leads nowhere
        try:
            value = inspect.getattr_static(value, name)
        except AttributeError:
            raise NotStorable(f"{module.__name__}.{path} does not exist") from None
    return _describe_deeply(value, set())


def _describe_deeply(value: Any, seen: set[int]) -> Any:
    """A function with all functions that it wraps or closes over; of anything else in a closure, only the type."""
    if id(value) in seen:
        return "seen"
    seen.add(id(value))
    if isinstance(value, property):
        return ("property", _describe_deeply(value.fget, seen))
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return (type(value).__name__, _describe_deeply(value.__func__, seen))
    if isinstance(value, types.FunctionType):
        cells = [_describe_deeply(cell.cell_contents, seen) for cell in value.__closure__ or ()]
        wrapped = _describe_deeply(getattr(value, "__wrapped__", None), seen)
        return ("function", _describe_code(value.__code__), wrapped, cells)
    if hasattr(value, "__wrapped__"):
        return (type(value).__name__, _describe_deeply(value.__wrapped__, seen))
    return (type(value).__name__, value if type(value) in _CONSTANTS else None)


# --------------------------------------------------------------------------------------------------------------- bytes


def _store(
    output: Any,
    function: types.FunctionType,
    backend_id: str,
    compiled: Any,
    pins: list[Pin],
    guards: bytes,
) -> Stored:
    from torch._dynamo.package import SerializedCode

    entry = compiled.serialize() if hasattr(compiled, "serialize") else None
    if entry is None:
        raise NotStorable("the inner compiler does not say how to store its result")
    scope = function.__globals__
    # Dynamo's own names for modules: the guards and the bytecode use them.
    modules = {
        name: value.__name__
        for name, value in scope.items()
        if name.startswith("__") and isinstance(value, types.ModuleType)
    }
    builtin = output.output_graph.name_of_builtins_dict_key_in_fglobals or ""
    for name in _globals_of(output.bytecode) - {backend_id}:
        if name.startswith("__") and name not in modules | {builtin: ""}:
            raise NotStorable(f"the bytecode reads {name}, which exists in this process only")
    codes = [code for code in output.traced_code if not code.co_filename.startswith("<")]  # those are made from these
    return Stored(
        files={file: _digest(file) for file in sorted({code.co_filename for code in codes})},
        functions=_functions(codes),
        modules=modules,
        builtins=builtin,
        pins=[(pin.expression, _describe(pin.value)) for pin in pins],
        bytecode=SerializedCode.from_code_object(output.bytecode),
        backend_id=backend_id,
        compiled=pickle.dumps(entry),
        guards=guards,
    )


def _functions(codes: list[types.CodeType]) -> dict[tuple[str, str], Any]:
    """What is bound to the names of these functions now: (module, path) -> description."""
    functions: dict[tuple[str, str], Any] = {}
    for code in codes:
        module = inspect.getmodule(code)
        if module is None:
            raise NotStorable(f"{code.co_filename} belongs to no module")
        path = getattr(code, "co_qualname", "").split(".<locals>")[0]  # Python 3.10 does not tell
        if (module.__name__, path) not in functions:
            functions[module.__name__, path] = _describe_bound(module, path)
    return functions


def _globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _digest(file: str) -> str:
    """Of a source file; empty if it is not there."""
    with contextlib.suppress(OSError), open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()
    return ""
