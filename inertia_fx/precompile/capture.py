"""One compiled version of a function that outlives its process: as a value here, as bytes on disk.

Dynamo's bytecode, its guards and what Inductor compiled go into the bytes, through the same doors as torch's own
ahead-of-time packages (`torch._dynamo.aot_compile`). Those packages trust that another process runs the same code on the
same settings. Here that is checked, in both processes alike, before a trace is used:

    guards on identities   the object is described ("this global is that very function"), and guarded anew where it is read
    other guards           their text is compared, as those on modules' settings are rebuilt from what they find
    classes, functions     all that Dynamo read, and the classes of what it guards, are unpatched: see `fingerprints`
    source files           their digests
    hooks                  there are none on the model, and no modules outside of it: torch does not guard on hooks
    the graph              calls torch's own operators and functions only, which have their versions in the file's name
"""

from __future__ import annotations

import builtins
import contextlib
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

from .fingerprints import NotStorable, codes_of, describe, describe_bound, describe_class, describe_code
from .guards import Found, Pin, all_hold, evaluate, foreign_call, hook_in, mark_again, portable_guards, text_of

_FUNCTORCH = {"bundled_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""AOTAutograd's settings under which what it returns can be serialized."""


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
        classes: expression -> what its value's class is.
        modules: Dynamo's names for modules -> theirs.
        builtins: Dynamo's name for the builtins.
        pins: expression -> what its value is.
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
            foreign = foreign_call(inputs.graph_module)
            with tracing(context), torch._functorch.config.patch(_FUNCTORCH):
                compiled = backend(inputs.graph_module, inputs.example_inputs)
            try:
                if foreign is not None:
                    raise NotStorable(f"the graph calls {foreign}, which is not torch's")
                guards, found = portable_guards(output, function)
                stored = _store(output, function, arguments, inputs.backend_id, compiled, guards, found)
            except Exception as failure:  # what users' objects raise when they are pickled can be anything
                guards, found = output.build_guards(function.__code__).guard_manager, Found()
                stored = str(failure) if isinstance(failure, NotStorable) else f"{type(failure).__name__}: {failure}"
        pins = list(found.pins.values())
        return _trace(function, output.bytecode, inputs.backend_id, compiled, guards, pins), stored
    except BaseException:
        for name in set(scope) - before:
            if name.startswith(("__compiled_fn", "__builtins_dict")):
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
    hooked = hook_in(arguments)
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
                pin = Pin(expression, evaluate(expression, local, scope))
                same = look(pin.value) == description
            except (NotStorable, LookupError, AttributeError, TypeError):
                same = False
            if not same:
                return f"{expression} is something else"
            if expressions is stored.pins:
                pins.append(pin)
    state = load_guards_state(stored.guards)
    mark_again(state.output_graph.local_scope)
    guards = load_guard_manager(state, function.__code__, scope)
    different = set(stored.text).symmetric_difference(text_of(guards))
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
    trace = Trace(
        types.FunctionType(bytecode, scope, function.__name__), _names(function), guards, all_hold(pins), scope
    )
    weakref.finalize(trace, scope.pop, name, None)
    convert_frame.output_codes.add(bytecode)  # torch._dynamo.reset() empties it
    return trace


_numbers = itertools.count()


def _names(function: types.FunctionType) -> tuple[str, ...]:
    code = function.__code__
    assert function.__closure__ is None and function.__defaults__ is None and not code.co_kwonlyargcount
    return code.co_varnames[: code.co_argcount]


def _store(
    output: Any,
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    backend_id: str,
    compiled: Any,
    guards: Any,
    found: Found,
) -> Stored:
    from torch._dynamo.package import SerializedCode

    hooked = hook_in(arguments)
    if hooked is not None:
        raise NotStorable(hooked)
    known = {id(part) for root in arguments if isinstance(root, torch.nn.Module) for part in root.modules()}
    if any(id(module) not in known for module in found.modules):
        raise NotStorable("it uses modules that are not part of a model that is passed in, whose hooks nobody sees")
    entry = compiled.serialize() if hasattr(compiled, "serialize") else None
    if entry is None:
        raise NotStorable("the inner compiler does not say how to store its result")
    for pin in found.pins.values():
        if getattr(pin.value, "_dynamo_marked_constant", False):
            raise NotStorable(f"{pin.expression} is called while tracing")
    scope = function.__globals__
    pins = {pin.expression: describe(pin.value) for pin in found.pins.values()}
    text = text_of(guards)
    # Dynamo's own names for modules: the guards and the bytecode use them.
    used = set(re.findall(r"G\['(__[^']*)'\]", "\n".join([*text, *pins, *found.values])))
    modules = {
        name: scope[name].__name__
        for name in sorted(used | _globals_of(output.bytecode))
        if name.startswith("__") and isinstance(scope.get(name), types.ModuleType)
    }
    builtin = output.output_graph.name_of_builtins_dict_key_in_fglobals or ""
    for name in _globals_of(output.bytecode) - {backend_id}:
        if name.startswith("__") and name not in modules | {builtin: ""}:
            raise NotStorable(f"the bytecode reads {name}, which exists in this process only")
    values = {expression: describe_class(type(value)) for expression, value in found.values.items()}
    kinds = [type(value) for value in found.values.values()]
    kinds += [pin.value for pin in found.pins.values() if isinstance(pin.value, type)]
    codes = [code for code in output.traced_code if not code.co_filename.startswith("<frozen ")]  # part of Python
    written = [code for code in codes if not code.co_filename.startswith("<")]
    generated = [code for code in codes if code.co_filename.startswith("<")]
    if generated:  # dataclasses write some of their methods
        defined = {code for kind in kinds for code in codes_of(kind)}
        for code in generated:
            if describe_code(code) not in defined:
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
        text=text,
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
