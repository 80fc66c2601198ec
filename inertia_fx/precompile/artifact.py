"""Write down one compiled version of a function for other processes, and make an entry of it there.

Torch's own ahead-of-time packages trust that another process runs the same code on the same settings. Here that is
checked, in both processes alike, before an artifact is used:

    guards on identities   the object is fingerprinted ("this global is that very function"), and guarded anew where it is read
    other guards           their text is compared, as those on modules' settings are rebuilt from what they find
    classes, functions     all that Dynamo read, and the classes of what it guards, are unpatched: see `fingerprints`
    source files           their digests
    hooks                  there are none on the model, and no modules outside of it: torch does not guard on hooks
    the graph              calls torch's own operators and functions only, which have their versions in the file's name
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import importlib
import pickle
import re
import types
from collections.abc import Callable
from typing import Any

import torch

from .entry import CompiledEntry, make_entry, parameters_of, rename_globals
from .fingerprints import NotStorable, fingerprint, fingerprint_class, tag_generations
from .guards import PortableGuards, builtins_name, text_of
from .identity import BUILTINS, IdentityGuard, evaluate
from .sources import changed_source, record_sources
from .unguarded import find_hook

FUNCTORCH = {"bundled_autograd_cache": True, "bypass_autograd_cache_key": True, "force_autograd_cache": True}
"""AOTAutograd's settings under which what it returns can be serialized."""


@dataclasses.dataclass
class Artifact:
    """A compiled entry as it lies on disk. `compiled` and `guards` are pickles of their own: read when the rest agrees.

    Attributes:
        files: source file -> digest.
        functions: (module, path) -> fingerprint of what is bound there.
        classes: expression -> fingerprint of its value's class.
        modules: name that the bytecode or a guard has for a module -> the module's own.
        identities: expression -> fingerprint of its value.
        bytecode: Dynamo's, which reads the global `backend_id`.
        compiled: what Inductor compiled.
        guards, guard_text: the other guards, and what they say.
    """

    files: dict[str, str]
    functions: dict[tuple[str, str], Any]
    classes: dict[str, Any]
    modules: dict[str, str]
    identities: dict[str, Any]
    bytecode: Any
    backend_id: str
    compiled: bytes
    guards: bytes
    guard_text: list[str]


def make_artifact(
    output: Any,
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    backend_id: str,
    compiled: Any,
    guards: PortableGuards,
    installed: set[str],
) -> Artifact:
    """Write down a captured call.

    Args:
        output: Dynamo's `GraphCaptureOutput`.
        function, arguments: the call.
        backend_id: the global under which the bytecode finds what was compiled.
        compiled: what the backend returned.
        guards: see `build_guards`.
        installed: the globals that tracing has added to the function's.

    Raises:
        NotStorable: another process could not tell whether it may use it.
    """
    from torch._dynamo.package import SerializedCode

    hook = find_hook(arguments)
    if hook is not None:
        raise NotStorable(hook)
    known = {id(part) for root in arguments if isinstance(root, torch.nn.Module) for part in root.modules()}
    if any(id(module) not in known for module in guards.modules):
        raise NotStorable("it uses modules that are not part of a model that is passed in, whose hooks nobody sees")
    inner = compiled.serialize() if hasattr(compiled, "serialize") else None
    if inner is None:
        raise NotStorable("the inner compiler does not say how to store its result")
    for guard in guards.identities.values():
        if getattr(guard.value, "_dynamo_marked_constant", False):
            raise NotStorable(f"{guard.expression} is called while tracing")
    scope = function.__globals__
    identities = {guard.expression: fingerprint(guard.value) for guard in guards.identities.values()}
    guard_text = text_of(guards.manager)
    bytecode, modules = _own_names(output, scope, backend_id, installed)
    # Dynamo's names for modules in guards are made of the modules' own.
    for name in re.findall(r"G\['(__[^']*)'\]", "\n".join([*guard_text, *identities, *guards.values])):
        if isinstance(scope.get(name), types.ModuleType):
            modules[name] = scope[name].__name__
    classes = {expression: fingerprint_class(type(value)) for expression, value in guards.values.items()}
    kinds = [type(value) for value in guards.values.values()]
    kinds += [guard.value for guard in guards.identities.values() if isinstance(guard.value, type)]
    files, functions = record_sources(output.traced_code, kinds)
    return Artifact(
        files=files,
        functions=functions,
        classes=classes,
        modules=modules,
        identities=identities,
        bytecode=SerializedCode.from_code_object(bytecode),
        backend_id=backend_id,
        compiled=pickle.dumps(inner),
        guards=guards.state,
        guard_text=guard_text,
    )


def _own_names(
    output: Any, scope: dict[str, Any], backend_id: str, installed: set[str]
) -> tuple[types.CodeType, dict[str, str]]:
    """Return the bytecode with names of ours for the globals that Dynamo adds, and those that are modules.

    Dynamo's have numbers and addresses of this process in them, which mean something else in another one.
    """
    code, names, modules = output.bytecode, {}, {}
    for name in _globals_of(code) - {backend_id}:
        if not name.startswith("__") and name not in installed:
            continue
        value = scope.get(name)
        if name == builtins_name(output):
            names[name] = BUILTINS
        elif isinstance(value, types.ModuleType):
            names[name] = "__inertia_module_" + value.__name__.replace(".", "_dot_")
            modules[names[name]] = value.__name__
        else:
            raise NotStorable(f"the bytecode reads {name}, which exists in this process only")
    return rename_globals(code, names), modules


def _globals_of(code: types.CodeType) -> set[str]:
    return {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}


def restore(
    artifact: Artifact,
    function: types.FunctionType,
    arguments: tuple[Any, ...],
    complete: Callable[[dict[str, Any]], None],
) -> CompiledEntry | str:
    """Make the entry again, if this call of `function` would compile to it.

    Args:
        complete: see `Callbacks`.

    Returns:
        The entry, or the first thing that is different.

    Raises:
        Exception: what is stored cannot be read.
    """
    from torch._dynamo.package import SerializedCode, load_guard_manager, load_guards_state
    from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry

    tag_generations()
    different = changed_source(artifact.files, artifact.functions) or find_hook(arguments)
    if different is not None:
        return different
    scope = function.__globals__
    scope.setdefault(BUILTINS, builtins.__dict__)
    for name, path in artifact.modules.items():
        module = importlib.import_module(path)
        if scope.setdefault(name, module) is not module:
            return f"{name} is another module"
    local = dict(zip(parameters_of(function), arguments, strict=True))
    identities = []
    for expression, known in artifact.identities.items():
        guard = _guard_if_same(expression, known, fingerprint, local, scope)
        if guard is None:
            return f"{expression} is something else"
        identities.append(guard)
    for expression, known in artifact.classes.items():
        if _guard_if_same(expression, known, lambda value: fingerprint_class(type(value)), local, scope) is None:
            return f"{expression} is something else"
    state = load_guards_state(artifact.guards)
    complete(state.output_graph.local_scope)
    guards = load_guard_manager(state, function.__code__, scope)
    lines = set(artifact.guard_text).symmetric_difference(text_of(guards))
    if lines:
        return f"a guard is different: {sorted(lines)[0]}"
    if not guards.check(local):
        return f"a guard fails:\n{guards.check_verbose(local)}"
    with torch._functorch.config.patch(FUNCTORCH):
        compiled = deserialize_bundled_cache_entry(pickle.loads(artifact.compiled))
    bytecode = SerializedCode.to_code_object(artifact.bytecode)
    return make_entry(function, bytecode, artifact.backend_id, compiled, guards, identities)


def _guard_if_same(
    expression: str,
    known: Any,
    look: Callable[[Any], Any],
    local: dict[str, Any],
    scope: dict[str, Any],
) -> IdentityGuard | None:
    """Return a guard on the expression's value if its fingerprint is the `known` one."""
    try:
        value = evaluate(expression, local, scope)
        return IdentityGuard(expression, value) if look(value) == known else None
    except (NotStorable, LookupError, AttributeError, TypeError):
        return None
