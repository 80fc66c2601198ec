"""Compile one call of a function to an entry, for this process, and to an artifact, for the next one.

Dynamo's bytecode, its guards and what Inductor compiled go into the artifact, by the functions that torch's own
ahead-of-time objects are made of (`torch._dynamo.aot_compile`). Those objects themselves
(``torch.compile(...).aot_compile``, `torch.compiler.load_compiled_function`) can carry a decode step, but not the warm
start's guarantees; tried on 2.13.0, and read in 2.11.0 and 2.12.1:

- a loaded function runs, and checks its guards, on a *copy* of the globals: a global that changes afterwards is not
  noticed (guard_check stays True, the result is wrong). All three versions copy.
- identity guards are dropped and sources are not compared on load: replaced functions, patched methods, hooks and edited
  files passed guard_check with wrong results. `SourceInfo` keeps lines, not the code that was traced, so that the
  comparison cannot be made from outside either.
- guards are built in the moment they are read, so that nothing can put the marks of dynamic dimensions back before
  (`_has_dynamo_dim_marking is present on runtime tensor but was absent at compile time`).
- modules that the bytecode reads by address (`___module_collections_<id>_c0`) have to be supplied by the caller.
- a step that cannot be stored raises after it was compiled, and would be compiled a second time.
- 2.11 takes the result of its own Inductor backend only, not of one that runs passes first, and has the whole of it
  switched off (`torch._dynamo.config.enable_aot_compile`).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from .artifact import FUNCTORCH, Artifact, make_artifact
from .callbacks import Callbacks
from .entry import CompiledEntry, make_entry
from .fingerprints import NotStorable, tag_generations
from .guards import build_guards
from .unguarded import find_foreign_call


def capture(
    function: types.FunctionType, arguments: tuple[Any, ...], backend: Callable[..., Any], callbacks: Callbacks
) -> tuple[CompiledEntry, Artifact | str]:
    """Compile this call of `function`, as ``torch.compile(function, fullgraph=True, backend=backend)`` would.

    Returns:
        The entry, and its artifact or why there is none (the entry is then guarded by Dynamo alone, as usual).

    Raises:
        torch._dynamo.exc.Unsupported: the call is not one graph.
        Exception: whatever `backend` raises.
    """
    from torch._dynamo import convert_frame
    from torch._dynamo.utils import dynamo_timed, get_metrics_context
    from torch._guards import TracingContext, tracing

    tag_generations()
    scope, before = function.__globals__, set(function.__globals__)
    try:
        with convert_frame.compile_lock, get_metrics_context(), dynamo_timed("fullgraph_capture"):
            captured = convert_frame.fullgraph_capture(function, arguments)
            output, inputs = captured.graph_capture_output, captured.backend_input
            assert inputs is not None
            installed = set(scope) - before
            inputs.graph_module._backend_id = inputs.backend_id  # type: ignore[assignment]
            context = TracingContext(inputs.fake_mode)
            context.tensor_to_context = inputs.tensor_to_context
            artifact: Artifact | str
            foreign = find_foreign_call(inputs.graph_module)
            with tracing(context), torch._functorch.config.patch(FUNCTORCH):
                compiled = backend(inputs.graph_module, inputs.example_inputs)
            try:
                if foreign is not None:
                    raise NotStorable(f"the graph calls {foreign}, which is not torch's")
                portable = build_guards(output, function, callbacks.pickling)
                artifact = make_artifact(output, function, arguments, inputs.backend_id, compiled, portable, installed)
                guards, identities = portable.manager, list(portable.identities.values())
            except Exception as failure:  # what users' objects raise when they are pickled can be anything
                guards, identities = output.build_guards(function.__code__).guard_manager, []
                artifact = str(failure) if isinstance(failure, NotStorable) else f"{type(failure).__name__}: {failure}"
        return make_entry(function, output.bytecode, inputs.backend_id, compiled, guards, identities), artifact
    except BaseException:
        for name in set(scope) - before:
            if name.startswith(("__compiled_fn", "__builtins_dict")):
                del scope[name]
        raise
