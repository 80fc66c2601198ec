"""Find what torch compiles in but does not guard on: hooks, and calls of code that Dynamo did not read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def find_hook(arguments: Sequence[Any]) -> str | None:
    """Name a hook on the modules among the arguments, or on all modules; None if there is none."""
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


def find_foreign_call(graph_module: torch.fx.GraphModule) -> str | None:
    """Name what the graph calls that is neither torch's nor ours; None if there is nothing.

    Torch's and our operators have their versions in the file's name. Of others nobody knows whether they are the same
    in another process: Dynamo did not read them, and no guard is about them.
    """
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
