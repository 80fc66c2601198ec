"""Read and write fx graphs: shapes, arguments, views to look through, functions to inline."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.operator_schemas import normalize_function

from .contract import LAYER


def example(node: fx.Node) -> Any:
    """Look up a node's example value as Dynamo or export traced it; ``None`` if it has none."""
    return node.meta.get("example_value", node.meta.get("val"))


def attribute(node: fx.Node) -> Any:
    """Look up what a `get_attr` node gets."""
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Look up the shape of a node's tensor; ``None`` if unknown."""
    value = example(node)
    return tuple(value.shape) if isinstance(value, Tensor) else None


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Look up the dtype of a node's tensor; ``None`` if unknown."""
    value = example(node)
    return value.dtype if isinstance(value, Tensor) else None


_SYNONYMS = {"a": "input", "b": "other", "self": "input", "tensor2": "other", "mat2": "other", "train": "training"}


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """Look up an argument of a call, by its place or its name, however it was spelled."""
    if len(node.args) > position:
        return node.args[position]
    for spelled, value in node.kwargs.items():
        if spelled == name or _SYNONYMS.get(spelled) == name:
            return value
    return default


def operands(node: fx.Node) -> tuple[Any, Any]:
    """Look up the two operands of a binary operation."""
    return argument(node, 0, "input"), argument(node, 1, "other")


def named_arguments(node: fx.Node) -> dict[str, Any] | None:
    """Bind every argument of a function to its name, defaults included; ``None`` if they do not fit its signature."""
    assert callable(node.target)
    bound = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    return None if bound is None else dict(bound.kwargs)


def calls(node: object, name: str, *functions: Any) -> bool:
    """Tell whether a node calls the tensor method `name` or one of the functions."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return bool(name) and node.target == name
    return node.op == "call_function" and node.target in functions


def multiplies_matrices(node: object) -> bool:
    """Tell whether a node is a matrix product over the last two dimensions."""
    return calls(node, "matmul", torch.matmul, operator.matmul)


def adds(node: object) -> bool:
    """Tell whether a node is a sum of two."""
    return calls(node, "add", operator.add, torch.add)


def unwrap_cast(node: Any) -> Any:
    """Look through casts, copies and layout changes that keep every element in its place."""
    while calls(node, "to") or calls(node, "float") or calls(node, "contiguous") or calls(node, "type_as") or calls(
        node, "type"
    ) or calls(node, "clone", torch.clone):  # fmt: skip
        node = argument(node, 0, "input")
    return node


def unwrap_transpose(node: Any) -> Any | None:
    """Find the X of a node that is X with its last two dimensions swapped; ``None`` if it is not one."""
    if calls(node, "transpose", torch.transpose, torch.swapaxes) or calls(node, "swapaxes"):
        dims = {argument(node, 1, "dim0"), argument(node, 2, "dim1")}
        return argument(node, 0, "input") if dims in ({2, 3}, {-1, -2}, {2, -1}, {3, -2}) else None
    if calls(node, "", getattr) and node.args[1] == "mT":
        return node.args[0]
    if calls(node, "permute", torch.permute):
        order = node.args[1:] if len(node.args) > 2 else tuple(argument(node, 1, "dims"))
        return argument(node, 0, "input") if tuple(order) in ((0, 1, 3, 2), (0, 1, -1, -2)) else None
    return None


def unwrap_repeat(node: Any) -> Any:
    """Look through the expansion of KV heads to query heads, if there is one.

    Which query head reads which KV head is not read off the graph here: the rewrite's proof runs it.
    """
    node = unwrap_cast(node)
    if calls(node, "repeat_interleave", torch.repeat_interleave):
        dim = argument(node, 2, "dim")
        return unwrap_cast(argument(node, 0, "input")) if dim in (1, -3) else node
    if not calls(node, "reshape", torch.reshape) and not calls(node, "flatten", torch.flatten):
        return node
    expanded = argument(node, 0, "input")
    if not calls(expanded, "expand"):
        return node
    picked = argument(expanded, 0, "input")
    if calls(picked, "", operator.getitem):
        whole = slice(None, None, None)
        index = tuple(picked.args[1]) if isinstance(picked.args[1], (tuple, list)) else ()
        if index[:3] != (whole, whole, None) or any(part != whole for part in index[3:]):
            return node
    elif not calls(picked, "unsqueeze", torch.unsqueeze) or argument(picked, 1, "dim") not in (2, -3):
        return node
    source = argument(picked, 0, "input")
    before, wide, after = shape_of(source), shape_of(expanded), shape_of(node)
    if before is None or after is None or wide is None or len(wide) != 5 or len(before) != 4:
        return node
    # Only the new third dimension may grow, and the reshape may only merge it into the heads before it.
    grows = (*wide[:2], *wide[3:]) == before
    merges = after == (before[0], before[1] * wide[2], *before[2:])
    return unwrap_cast(source) if grows and merges else node


def is_softmax(node: object) -> bool:
    """Tell whether a node is a softmax."""
    return calls(node, "softmax", F.softmax, torch.softmax)


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Yield every node that `node` is computed from, itself included."""
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            yield current
            todo.extend(current.all_input_nodes)


def user_line(node: fx.Node | None) -> str | None:
    """Find the innermost line of the user's source that a node was traced from."""
    trace = (node.stack_trace or "").strip().splitlines() if node is not None else []
    places = [line.strip() for line in trace if line.strip().startswith("File ")]
    return places[-1] if places else None


def describe(node: Any) -> str:
    """Name a node for a message: what it calls, and its name."""
    if not isinstance(node, fx.Node):
        return repr(node)
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name} ('{node.name}')"


def emit(graph: fx.Graph, before: fx.Node, function: Callable[..., Any], *args: Any, layer: int | None = None) -> Any:
    """Inline `function` into the graph before a node, by calling it on proxies; nodes in, nodes out.

    Args:
        layer: the cache layer that the new nodes belong to, if they belong to one.
    """
    if isinstance(function, torch._ops.OpOverload):
        with graph.inserting_before(before):
            node = graph.call_function(function, args)
        if layer is not None:
            node.meta[LAYER] = layer
        return node
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies: dict[fx.Node, fx.Proxy] = {}  # one for each node, so that `is` means the same to `function`

    def proxy(value: Any) -> Any:
        return proxies.setdefault(value, fx.Proxy(value, tracer)) if isinstance(value, fx.Node) else value

    before_ours = before.prev
    arguments = fx.node.map_aggregate(args, proxy)
    with graph.inserting_before(before):
        result = function(*arguments)  # type: ignore[misc]
    while layer is not None and before_ours.next is not before:
        before_ours = before_ours.next
        before_ours.meta[LAYER] = layer
    return fx.node.map_aggregate(result, lambda value: value.node if isinstance(value, fx.Proxy) else value)  # type: ignore[return-value]


def replace(graph: fx.Graph, node: fx.Node, result: fx.Node | tuple[fx.Node, ...]) -> None:
    """Put one node, or what a node's parts are, in a node's place."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            place = user.args[1]
            assert isinstance(place, int)
            user.replace_all_uses_with(result[place])
            graph.erase_node(user)
    graph.erase_node(node)
