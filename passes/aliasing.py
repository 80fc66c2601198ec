"""Who writes into what, and what shares memory, read off operator schemas and storages by running each node once.

A node of a Dynamo graph can be a Python function, a method, an operator, an attribute. What it does to memory is what the
operators beneath it say of themselves: each distinct node is run once on fake tensors, while a dispatch mode notes which
arguments the schemas declare as written, and afterwards the storages of results and arguments are compared. Names are
never looked at. What cannot be run, or has no schema (higher-order operators), is taken to write into all that it is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from .nodes import example


@dataclasses.dataclass(frozen=True)
class Effects:
    """What one node does to memory.

    Attributes:
        writes: arguments that it writes into.
        shares: arguments that its result shares memory with.
        known: False if it could not be run or has no schema: `writes` and `shares` are then all of its arguments.
        random: whether it draws random numbers.
    """

    writes: tuple[fx.Node, ...] = ()
    shares: tuple[fx.Node, ...] = ()
    known: bool = True
    random: bool = False


_OBSERVED = "inertia_fx.effects"


class Memory:
    """The memory of a graph's tensors: groups of nodes that may share some, and who writes into each group."""

    def __init__(self, graph: fx.Graph) -> None:
        self._parent: dict[fx.Node, fx.Node] = {}
        self._writers: dict[fx.Node, list[fx.Node]] = {}
        self.effects: dict[fx.Node, Effects] = {}
        known = _observed(graph)
        storages: dict[int, fx.Node] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                for storage in _storages(example(node)):
                    self._join(storages.setdefault(storage, node), node)
                continue
            self.effects[node] = effects = _effects(node, known)
            for other in effects.shares:
                self._join(other, node)
        for node, effects in self.effects.items():
            for other in effects.writes:
                self._writers.setdefault(self.root(other), []).append(node)

    def root(self, node: fx.Node) -> fx.Node:
        """Find the node that stands for all that may share memory with this one."""
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def _join(self, one: fx.Node, other: fx.Node) -> None:
        one, other = self.root(one), self.root(other)
        if one is not other:
            self._parent[other] = one

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """List the nodes that write into memory which `node` may share, in graph order."""
        return self._writers.get(self.root(node), [])


def _observed(graph: fx.Graph) -> dict[Any, tuple[Any, ...]]:
    """What was seen of each distinct node so far: several passes ask about the same ones."""
    owner = graph.owning_module
    return {} if owner is None else owner.meta.setdefault(_OBSERVED, {})


def is_pure(node: fx.Node) -> bool:
    """Tell whether a node can be erased once nobody uses it: it runs, writes nothing, draws nothing, returns something."""
    if node.op == "get_attr":
        return True
    if node.op not in ("call_function", "call_method"):
        return False
    effects = _effects(node, _observed(node.graph))
    return effects.known and not effects.writes and not effects.random and example(node) is not None


def erase_dead(graph: fx.Graph, roots: Iterable[fx.Node]) -> None:
    """Erase nodes that nobody uses and, going up, pure ones that only they used."""
    todo = list(roots)
    erased = set()
    while todo:
        current = todo.pop()
        if current in erased or current.users or not is_pure(current):
            continue
        inputs = current.all_input_nodes
        graph.erase_node(current)
        erased.add(current)
        todo.extend(inputs)


def _effects(node: fx.Node, known: dict[Any, tuple[Any, ...]]) -> Effects:
    if node.op not in ("call_function", "call_method", "call_module"):
        return Effects()
    inputs = [other for other in node.all_input_nodes if _holds_tensors(example(other))]
    if any(example(other) is None for other in node.all_input_nodes):
        # Sizes are no memory: taken for it, they would join all that is shaped with them.
        inputs = [other for other in node.all_input_nodes if not isinstance(example(other), torch.SymInt)]
        return Effects(tuple(inputs), tuple(inputs), known=False)
    if not inputs:
        return Effects(known=node.op != "call_module")
    try:
        key = (node.op, node.target, described(node.args), described(tuple(node.kwargs.items())), *_pattern(node))
        if key not in known:
            known[key] = _observe(node)
        written, shared, random = known[key]
    except Exception:  # whatever a user's operator raises where it cannot run on fakes
        return Effects(tuple(inputs), tuple(inputs), known=False)
    every = node.all_input_nodes
    return Effects(tuple(every[i] for i in written), tuple(every[i] for i in shared), random=random)


def _pattern(node: fx.Node) -> tuple[int, ...]:
    """Which of the arguments are the same node: ``x.copy_(x)`` is not ``x.copy_(y)``."""
    order = {other: index for index, other in enumerate(node.all_input_nodes)}
    found: list[int] = []
    fx.node.map_arg((node.args, node.kwargs), lambda other: found.append(order[other]))
    return tuple(found)


def _observe(node: fx.Node) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Run a node on fakes: (places of written inputs, places of inputs that the result shares memory with, random)."""
    if node.op == "call_module" or isinstance(node.target, torch._ops.HigherOrderOperator):
        raise NotImplementedError("it has no schema")
    try:  # without data, and without the price of fake tensors
        values, result, observer = _run_on(node, "meta")
    except Exception:  # some operators want to know of a device
        with FakeTensorMode():
            values, result, observer = _run_on(node, "cpu")
    made = set(_storages(result))
    written, shared = [], []
    for place, value in enumerate(values.values()):
        storages = set(_storages(value))
        if not storages.isdisjoint(observer.written):
            written.append(place)
        if not storages.isdisjoint(made):
            shared.append(place)
    return tuple(written), tuple(shared), observer.random


def _run_on(node: fx.Node, device: str) -> tuple[dict[fx.Node, Any], Any, _Observer]:
    values = {other: _stand_in(example(other), device) for other in node.all_input_nodes}
    args, kwargs = on_device(fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__), device)
    with torch.no_grad(), default_device(device), _Observer() as observer:
        return values, call(node, args, kwargs), observer


def default_device(device: str) -> contextlib.AbstractContextManager[Any]:
    """Make factories use a device, whatever default the user has set; free where it is the default anyway."""
    return contextlib.nullcontext() if torch.get_default_device().type == device else torch.device(device)


class _Observer(TorchDispatchMode):
    """Notes the storages that operators declare to write into, and whether one draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        if schema.is_mutable:
            given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
            for argument in schema.arguments:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    self.written.update(_storages(given.get(argument.name)))
        return func(*args, **kwargs)


def call(node: fx.Node, args: Any, kwargs: Any) -> Any:
    """Call what a node calls."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def on_device(arguments: Any, device: str) -> Any:
    """Replace the devices among a node's arguments."""

    def mapped(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(device)
        if isinstance(value, (tuple, list)):
            parts = [mapped(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, dict):
            return {
                name: device if name == "device" and isinstance(part, str) else mapped(part)
                for name, part in value.items()
            }
        return value

    return mapped(arguments)


def hint(size: Any) -> int:
    """Look up the value that a size had when it was traced, without fixing it for the compile.

    Raises:
        ValueError: it has none, as it depends on data.
    """
    if isinstance(size, torch.SymInt):
        if not size.node.has_hint():
            raise ValueError(f"the size {size} depends on data")
        return int(size.node.hint)
    return int(size)


def _stand_in(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        sizes, strides = [hint(size) for size in value.shape], [hint(stride) for stride in value.stride()]
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=device)
    if isinstance(value, torch.SymInt):
        return hint(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if isinstance(value, (tuple, list)):
        return type(value)(_stand_in(part, device) for part in value) if not hasattr(value, "_fields") else value
    return value


def described(value: Any) -> Any:
    """Describe a node's arguments, hashable: nodes by what is known of their values."""
    if isinstance(value, fx.Node):
        return described(example(value))
    if isinstance(value, Tensor):
        sizes = (*map(hint, value.shape), "by", *map(hint, value.stride()))
        return ("tensor", sizes, value.dtype, *_shared_parts([value]))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value), value.node.hint)
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(described(part) for part in value), *_shared_parts(value))
    if isinstance(value, dict):
        return (dict, tuple((name, described(part)) for name, part in value.items()))
    if isinstance(value, slice):
        return (slice, described((value.start, value.stop, value.step)))
    return (type(value), str(value) if isinstance(value, float) else value)


def _shared_parts(values: Any) -> tuple[int, ...]:
    """Which of several tensors share memory, as the number of the first one that each shares with."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(storage, index) for index, storage in enumerate(_storages(values)))


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)


def _storages(value: Any) -> list[int]:
    if isinstance(value, Tensor):
        return [value.untyped_storage()._cdata]
    if isinstance(value, (tuple, list)):
        return [storage for part in value for storage in _storages(part)]
    return []
