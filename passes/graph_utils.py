"""What the passes share: the marker, the rewrite in progress, walking through views, erasing what died."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx

from ..errors import UnsupportedAttentionError
from ..kernels.triton.plan import runs_triton

if TYPE_CHECKING:
    from ..backend import BackendOptions
    from .find_attention import AttentionSite


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass did. `matched` and `skipped` hold one line each; `skipped` says why."""

    name: str
    matched: tuple[str, ...]
    skipped: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.matched)} matched, {len(self.skipped)} skipped"]
        lines += [f"  + {line}" for line in self.matched]
        lines += [f"  - {line}" for line in self.skipped]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Marker:
    """The call of `inertia_fx::retain` in a graph, with its arguments by name (see `inertia_fx.ops.retain`)."""

    node: fx.Node
    momentum: fx.Node
    positions: fx.Node
    free: fx.Node
    length: fx.Node
    new_momentum: fx.Node
    new_positions: fx.Node
    keys: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    protect_first: int | fx.Node
    protect_recent: int | fx.Node

    @property
    def state(self) -> tuple[fx.Node, ...]:
        return (self.momentum, self.positions, self.free, self.length)


class Refusal(Exception):
    """Why a candidate is not an attention we understand."""

    def __init__(self, reason: str, kind: type[UnsupportedAttentionError] = UnsupportedAttentionError) -> None:
        super().__init__(reason)
        self.reason, self.kind = reason, kind


@dataclasses.dataclass
class Rewrite:
    """One graph on its way through the passes."""

    gm: fx.GraphModule
    marker: Marker
    options: BackendOptions
    sites: tuple[AttentionSite, ...] = ()
    scores: tuple[fx.Node, ...] = ()
    live: fx.Node | None = None
    moved: fx.Node | None = None
    momentum: fx.Node | None = None

    @property
    def kernels(self) -> str:
        """What the graph is lowered to: "triton" (CUDA and ROCm devices), "inductor_cpu" or "reference" (plain aten)."""
        device = self.marker.keys[0].meta["example_value"].device.type
        if runs_triton(device):
            return "triton"
        return "inductor_cpu" if device == "cpu" and self.options.backend == "inductor" else "reference"

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def emit(self, before: fx.Node, function: Callable[..., Any], *args: Any) -> Any:
        """Inline `function` into the graph before a node, by calling it on proxies; nodes in, nodes out."""
        tracer = fx.proxy.GraphAppendingTracer(self.graph)
        arguments = fx.node.map_aggregate(args, lambda arg: fx.Proxy(arg, tracer) if isinstance(arg, fx.Node) else arg)
        with self.graph.inserting_before(before):
            result = function(*arguments)
        return fx.node.map_aggregate(result, lambda arg: arg.node if isinstance(arg, fx.Proxy) else arg)


_RETAIN_ARGUMENTS = tuple(field.name for field in dataclasses.fields(Marker))[1:]


def find_marker(graph: fx.Graph) -> Marker | None:
    """The graph's marker, or ``None`` if it is not a decode step.

    Raises:
        UnsupportedAttentionError: the graph holds more than one.
    """
    packet = torch.ops.inertia_fx.retain
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in (packet, packet.default)]
    if not nodes:
        return None
    if len(nodes) > 1:
        raise UnsupportedAttentionError(
            None, nodes[1].name, f"{len(nodes)} decode steps in one graph; compile one step at a time"
        )
    arguments = dict(zip(_RETAIN_ARGUMENTS, nodes[0].args, strict=False)) | dict(nodes[0].kwargs)
    arguments["keys"], arguments["values"] = tuple(arguments["keys"]), tuple(arguments["values"])
    return Marker(nodes[0], **arguments)


def shape_of(node: fx.Node) -> tuple[Any, ...] | None:
    """Shape of a node's tensor as Dynamo saw it, ``None`` if unknown."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, however it was spelled."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's tensor as Dynamo saw it, ``None`` if unknown."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return value.dtype if isinstance(value, torch.Tensor) else None


def calls(node: object, name: str, *functions: Any) -> bool:
    """Whether a node calls the tensor method `name` or one of the functions."""
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method":
        return node.target == name
    return node.op == "call_function" and node.target in functions


def unwrap_cast(node: Any) -> Any:
    """Through casts, copies and layout changes that keep every element in its place."""
    while (
        calls(node, "to")
        or calls(node, "float")
        or calls(node, "contiguous")
        or calls(node, "type_as")
        or calls(node, "type")
        or calls(node, "clone", torch.clone)
    ):
        node = node.args[0]
    return node


def unwrap_transpose(node: Any) -> Any | None:
    """The X of a node that is X with its last two dimensions swapped; ``None`` if it is not one."""
    if calls(node, "transpose", torch.transpose):
        dims = {argument(node, 1, "dim0"), argument(node, 2, "dim1")}
        return node.args[0] if dims in ({2, 3}, {-1, -2}, {2, -1}, {3, -2}) else None
    if calls(node, "", getattr) and node.args[1] == "mT":
        return node.args[0]
    if calls(node, "permute", torch.permute):
        order = node.args[1:] if len(node.args) > 2 else tuple(node.args[1])
        return node.args[0] if tuple(order) == (0, 1, 3, 2) else None
    return None


def unwrap_repeat(node: Any) -> Any:
    """Through the expansion of KV heads to query heads (every KV head repeated side by side), if there is one."""
    node = unwrap_cast(node)
    if calls(node, "repeat_interleave", torch.repeat_interleave):
        return unwrap_cast(node.args[0]) if argument(node, 2, "dim") == 1 else node
    if not calls(node, "reshape", torch.reshape):
        return node
    expanded = node.args[0]
    if not calls(expanded, "expand"):
        return node
    picked = expanded.args[0]
    if not calls(picked, "", operator.getitem):
        return node
    whole = slice(None, None, None)
    index = tuple(picked.args[1]) if isinstance(picked.args[1], (tuple, list)) else ()
    before, after = shape_of(picked.args[0]), shape_of(node)
    wide = shape_of(expanded)
    if index[:3] != (whole, whole, None) or any(part != whole for part in index[3:]):
        return node
    if before is None or after is None or wide is None or len(wide) != 5:
        return node
    # Only the new third dimension may grow, and the reshape may only merge it into the heads before it.
    grows = (*wide[:2], *wide[3:]) == before
    merges = after == (before[0], before[1] * wide[2], *before[2:])
    return unwrap_cast(picked.args[0]) if grows and merges else node


VIEWS = {
    "view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "flatten", "unflatten", "detach",
    "narrow", "select", "split", "chunk", "unbind", "contiguous", "to", "float",
}  # fmt: skip


def mutation_of(node: fx.Node) -> fx.Node | None:
    """A node that writes into `node` or into a view of it, if there is one."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        for user in current.users:
            if writes(user, current):
                return user
            is_view = (user.op == "call_method" and user.target in VIEWS) or calls(user, "", operator.getitem)
            if is_view and user not in seen:
                seen.add(user)
                todo.append(user)
    return None


def writes(user: fx.Node, into: fx.Node) -> bool:
    """Whether `user` writes into its argument `into`."""
    if user.kwargs.get("out") is into or user.kwargs.get("inplace"):
        return True
    name = user.target if isinstance(user.target, str) else getattr(user.target, "__name__", "")
    if getattr(operator, name, None) is user.target:
        in_place = name in _IN_PLACE_OPERATORS  # operator.and_ and its kin write into nothing
    else:
        in_place = name.endswith("_") and not name.endswith("__")
    return in_place and bool(user.args) and user.args[0] is into


_IN_PLACE_OPERATORS = {
    "setitem",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "imatmul",
}


def ancestors(node: fx.Node) -> Iterator[fx.Node]:
    """Every node that `node` is computed from, itself included."""
    seen, todo = set(), [node]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            yield current
            todo.extend(current.all_input_nodes)


def user_line(node: fx.Node | None) -> str | None:
    """The innermost line of the user's source that a node was traced from."""
    trace = (node.stack_trace or "").strip().splitlines() if node is not None else []
    places = [line.strip() for line in trace if line.strip().startswith("File ")]
    return places[-1] if places else None


def replace(graph: fx.Graph, node: fx.Node, result: fx.Node | tuple[fx.Node, ...]) -> None:
    """Put one node, or what a node's parts are, in a node's place."""
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            user.replace_all_uses_with(result[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


_PURE_FUNCTIONS = {
    operator.getitem, operator.add, operator.mul, operator.truediv, operator.ge, operator.gt, operator.eq,
    operator.invert, operator.and_, getattr,
    torch.matmul, torch.softmax, torch.add, torch.mul, torch.where, torch.arange, torch.transpose, torch.reshape,
    torch.repeat_interleave, F.softmax, F.dropout, F.scaled_dot_product_attention,
}  # fmt: skip
_PURE_METHODS = {
    "to", "float", "type_as", "type", "contiguous", "transpose", "permute", "reshape", "view", "expand", "unsqueeze",
    "squeeze", "repeat_interleave", "softmax", "matmul", "mul", "add", "size", "sum", "clamp",
}  # fmt: skip


def erase_dead(graph: fx.Graph, *nodes: fx.Node) -> None:
    """Erase nodes that nobody uses and, going up, what only they used. In-place operations are never erased."""
    todo = list(nodes)
    while todo:
        current = todo.pop()
        pure = (current.op == "call_function" and current.target in _PURE_FUNCTIONS) or (
            current.op == "call_method" and current.target in _PURE_METHODS
        )
        if current.users or not pure:
            continue
        inputs = [node for node in current.all_input_nodes if node not in todo]
        graph.erase_node(current)
        todo.extend(inputs)
