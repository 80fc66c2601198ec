"""One compiled version of a function that outlives its process: as a value here, as bytes on disk.

Dynamo's bytecode, its guards and what Inductor compiled go into the bytes, through the same doors as torch's own
ahead-of-time packages (`torch._dynamo.aot_compile`). Those packages trust that another process runs the same code on the
same settings. Here that is checked, in both processes alike, before a trace is used:

    guards on identities   the object is described ("this global is that very function"), and guarded anew where it is read
    other guards           their text is compared, as those on modules' settings are rebuilt from what they find
    classes, functions     all that Dynamo read, and the classes of what it guards, are unpatched: see `fingerprints`
    source files           their digests
    hooks                  there are none: torch does not guard on them
    the graph              calls torch's own operators and functions only, which have their versions in the file's name
"""

from __future__ import annotations

import builtins
import contextlib
import contextvars
import dataclasses
import dis
import functools
import hashlib
import importlib
import inspect
import itertools
import pickle
import re
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from .fingerprints import (
    CONSTANTS,
    NotStorable,
    codes_of,
    describe,
    describe_bound,
    describe_class,
    describe_code,
)
from .slots import mark_for_compile

_FUNCTORCH = {"bundled_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""AOTAutograd's settings under which what it returns can be serialized."""


pickling_guards: contextvars.ContextVar[bool] = contextvars.ContextVar("inertia_fx_pickling_guards", default=False)
"""Set while guards are stored: a compiled model is then pickled as what it is, not as what it is made of."""


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

    run: types.FunctionType
    names: tuple[str, ...]
    guards: Any
    pinned: Callable[[dict[str, Any], dict[str, Any]], bool]
    scope: dict[str, Any]

    @property
    def forgotten(self) -> bool:
        """Whether `torch._dynamo.reset()` was called since."""
        from torch._dynamo import convert_frame

        return self.run.__code__ not in convert_frame.output_codes

    def accepts(self, arguments: Sequence[Any]) -> bool:
        """Whether a call with these arguments would compile to this trace."""
        local = dict(zip(self.names, arguments, strict=True))
        return bool(self.guards.check(local)) and self.pinned(local, self.scope)


@dataclasses.dataclass
class Stored:
    """A trace as it lies on disk. `compiled` and `guards` are pickles of their own: read when the rest agrees.

    Attributes:
        files: source file -> digest.
        functions: (module, path) -> what is bound there.
        classes: (expression, what its value's class is).
        modules: Dynamo's names for modules -> theirs.
        builtins: Dynamo's name for the builtins.
        pins: (expression, what its value is).
        guards, text: the other guards, and what they say.
    """

    files: dict[str, str]
    functions: dict[tuple[str, str], Any]
    classes: dict[str, Any]
    modules: dict[str, str]
    builtins: str
    pins: dict[str, Any]
    bytecode: Any
    backend_id: str
    compiled: bytes
    guards: bytes
    text: list[str]


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
    from torch._dynamo import convert_frame, output_graph
    from torch._dynamo.bytecode_transformation import unique_id
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._guards import TracingContext, tracing

    _tag_generations()
    scope, before = function.__globals__, set(function.__globals__)
    # Names that Dynamo puts into our globals must not mean something else in another process.
    own_names = mock.patch.object(output_graph, "unique_id", functools.partial(unique_id, with_uuid=True))
    try:
        with convert_frame.compile_lock, get_metrics_context(), dynamo_timed("fullgraph_capture"):
            with own_names:
                captured = convert_frame.fullgraph_capture(function, arguments)
            output, inputs = captured.graph_capture_output, captured.backend_input
            assert inputs is not None
            inputs.graph_module._backend_id = inputs.backend_id
            context = TracingContext(inputs.fake_mode)
            context.tensor_to_context = inputs.tensor_to_context
            stored: Stored | str
            foreign = _foreign(inputs.graph_module)
            with tracing(context), torch._functorch.config.patch(_FUNCTORCH):
                compiled = backend(inputs.graph_module, inputs.example_inputs)
            try:
                if foreign is not None:
                    raise NotStorable(f"the graph calls {foreign}, which is not torch's")
                guards, found = _portable_guards(output, function)
                stored = _store(output, function, arguments, inputs.backend_id, compiled, guards, found)
            except Exception as failure:  # what users' objects raise when they are pickled can be anything
                guards, found = output.build_guards(function.__code__).guard_manager, _Found()
                stored = str(failure) if isinstance(failure, NotStorable) else f"{type(failure).__name__}: {failure}"
        return _trace(
            function, output.bytecode, inputs.backend_id, compiled, guards, [_pin(pin) for pin in found.pins.values()]
        ), stored
    except BaseException:
        for name in set(scope) - before:
            if name.startswith("__compiled_fn"):
                del scope[name]
        raise


def _tag_generations() -> None:
    """What the first torch.compile of a process does to `nn.Module.__init__`: it must not look like a patch."""
    from torch._dynamo import mutation_guard

    mutation_guard.install_generation_tagging_init()


def restore(stored: Stored, function: types.FunctionType, arguments: tuple[Any, ...]) -> Trace | str:
    """The trace again, if this call of `function` would compile to it; otherwise the first thing that is different.

    Raises:
        Exception: what is stored cannot be read.
    """
    from torch._dynamo.package import SerializedCode, load_guard_manager, load_guards_state
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    _tag_generations()
    for file, digest in stored.files.items():
        if _digest(file) != digest:
            return f"{file} has changed"
    for (module, path), description in stored.functions.items():
        with contextlib.suppress(NotStorable):
            if describe_bound(importlib.import_module(module), path) == description:
                continue
        return f"{module}.{path} is another function"
    hooked = _hooked(arguments)
    if hooked is not None:
        return hooked
    scope = function.__globals__
    for name, module in stored.modules.items():
        scope.setdefault(name, importlib.import_module(module))
    scope.setdefault(stored.builtins, builtins.__dict__)
    local = dict(zip(_names(function), arguments, strict=True))
    pins = []
    for expressions, look in ((stored.pins, describe), (stored.classes, lambda value: describe_class(type(value)))):
        for expression, description in expressions.items():
            try:
                pin = Pin(expression, _evaluate(expression, local, scope))
                same = look(pin.value) == description
            except (NotStorable, LookupError, AttributeError, TypeError):
                same = False
            if not same:
                return f"{expression} is something else"
            if expressions is stored.pins:
                pins.append(_pin(pin))
    state = load_guards_state(stored.guards)
    _mark_again(state.output_graph.local_scope)
    guards = load_guard_manager(state, function.__code__, scope)
    different = set(stored.text).symmetric_difference(_text(guards))
    if different:
        return f"a guard is different: {sorted(different)[0]}"
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
    from torch._dynamo import convert_frame

    scope = function.__globals__
    # A name of its own: one file may be read several times.
    name = f"__inertia_compiled_{next(_numbers)}"
    scope.pop(backend_id, None)
    scope[name] = compiled
    bytecode = bytecode.replace(co_names=tuple(name if word == backend_id else word for word in bytecode.co_names))
    trace = Trace(types.FunctionType(bytecode, scope, function.__name__), _names(function), guards, _holds(pins), scope)
    weakref.finalize(trace, scope.pop, name, None)
    convert_frame.output_codes.add(bytecode)  # torch._dynamo.reset() empties it
    return trace


_numbers = itertools.count()


def _names(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    assert function.__closure__ is None and function.__defaults__ is None and not code.co_kwonlyargcount
    return code.co_varnames[: code.co_argcount]


# -------------------------------------------------------------------------------------------------------------- guards


@dataclasses.dataclass
class _Found:
    """What the guards were about: pins by expression, and a value of each class by the expression that leads to it."""

    pins: dict[str, Pin] = dataclasses.field(default_factory=dict)
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: bytes = b""


def _portable_guards(output: Any, function: types.FunctionType) -> tuple[Any, _Found]:
    """(guard manager without the guards that mean nothing elsewhere, what they and it are about)."""
    from torch._dynamo.guards import CheckFunctionManager
    from torch._dynamo.hooks import Hooks

    identities = frozenset(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES)
    found, classes = _Found(), set()

    def keep(entries: Sequence[Any]) -> list[bool]:
        kept = []
        for entry in entries:
            expression = entry.orig_guard.name
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


def _text(guards: Any) -> list[str]:
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


def _pin(pin: Pin) -> Pin:
    """Of a function only the code is pinned, as in Dynamo: one that is made anew for every call is the same."""
    if isinstance(pin.value, types.FunctionType):
        return Pin(f"{pin.expression}.__code__", pin.value.__code__)
    return pin


def _hooked(arguments: Sequence[Any]) -> str | None:
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


def _foreign(graph_module: torch.fx.GraphModule) -> str | None:
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
        terms.append(f"{pin.expression} {'==' if type(pin.value) in CONSTANTS else 'is'} __pin_{number}")
    source = "def holds(L, G):\n    try:\n        return " + (" and ".join(terms) or "True")
    exec(source + "\n    except (LookupError, AttributeError, TypeError):\n        return False", words)
    return words["holds"]


# --------------------------------------------------------------------------------------------------------------- bytes


def _store(
    output: Any,
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    backend_id: str,
    compiled: Any,
    guards: Any,
    found: _Found,
) -> Stored:
    from torch._dynamo.package import SerializedCode

    hooked = _hooked(arguments)
    if hooked is not None:
        raise NotStorable(hooked)
    entry = compiled.serialize() if hasattr(compiled, "serialize") else None
    if entry is None:
        raise NotStorable("the inner compiler does not say how to store its result")
    for pin in found.pins.values():
        if getattr(pin.value, "_dynamo_marked_constant", False):
            raise NotStorable(f"{pin.expression} is called while tracing")
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
    pins = {pin.expression: describe(pin.value) for pin in found.pins.values()}
    values = {expression: describe_class(type(value)) for expression, value in found.values.items()}
    kinds = [type(value) for value in found.values.values()]
    kinds += [pin.value for pin in found.pins.values() if isinstance(pin.value, type)]
    written, generated = [], []
    for code in output.traced_code:
        if not code.co_filename.startswith("<frozen "):  # Python's own, whose version is in the file's name
            (generated if code.co_filename.startswith("<") else written).append(code)
    if generated:  # dataclasses write some of their methods
        known = set().union(*map(codes_of, kinds))
        for code in generated:
            if describe_code(code) not in known:
                raise NotStorable(f"{code.co_name} comes from {code.co_filename}, not from a file")
    files = {file: _digest(file) for file in sorted({code.co_filename for code in written})}
    if "" in files.values():
        raise NotStorable("traced code comes from files that cannot be read")
    return Stored(
        files=files,
        functions=_functions(written),
        classes=values,
        modules=modules,
        builtins=builtin,
        pins=pins,
        bytecode=SerializedCode.from_code_object(output.bytecode),
        backend_id=backend_id,
        compiled=pickle.dumps(entry),
        guards=found.state,
        text=_text(guards),
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
            functions[module.__name__, path] = describe_bound(module, path)
    return functions


def _globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def _digest(file: str) -> str:
    """Of a source file; empty if it is not there."""
    with contextlib.suppress(OSError), open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()
    return ""
