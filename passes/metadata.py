"""Describe and complete what is known of a graph's values without running it: Dynamo's example values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


def metadata(node: fx.Node) -> Any:
    """Describe what a compiler may specialise on, hashable; ``None`` if the value is not one that can be handed to a subgraph."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.SymInt):
        return str(value)
    if not isinstance(value, Tensor) or node.op == "get_attr":
        return None
    # Symbols that are known to be equal print alike.
    return (value.dtype, value.device, value.layout, str(tuple(value.shape)), str(value.stride()), value.requires_grad)


def frozen(value: Any, nodes: dict[fx.Node, Any]) -> Any:
    """Freeze a node's arguments into something hashable, with every node replaced; 1, 1.0 and True stay apart."""
    if isinstance(value, fx.Node):
        return nodes[value]
    if isinstance(value, (tuple, list)):
        return (type(value), tuple(frozen(part, nodes) for part in value))
    if isinstance(value, dict):
        return (dict, tuple((key, frozen(part, nodes)) for key, part in value.items()))
    if isinstance(value, slice):
        return (slice, frozen((value.start, value.stop, value.step), nodes))
    return (type(value), str(value) if isinstance(value, float) else value)


def fake_mode(graph: fx.Graph) -> FakeTensorMode | None:
    """Find the mode that Dynamo traced the graph in."""
    values = (node.meta.get("example_value") for node in graph.nodes)
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)


@contextlib.contextmanager
def running_on(mode: FakeTensorMode) -> Iterator[None]:
    """Run operators on example values, as Dynamo does: without its dispatcher, matmul in torch 2.11 fixes symbolic sizes."""
    with mode, enable_python_dispatcher(), torch.no_grad():
        yield


def fill_metadata(graph: fx.Graph) -> None:
    """Give the nodes that passes made what Dynamo gives its own: an example value.

    AOTAutograd's cache refuses graphs with method calls on values that it knows nothing about, and comparing layers
    needs to know what flows between them. Layers repeat each other, and running on fakes takes 10 ms a node: what has
    been run on such inputs before is not run again. So example values tell metadata, not which nodes share memory.
    """
    mode = fake_mode(graph)
    if mode is None:
        return
    known: dict[Any, Any] = {}
    with running_on(mode):
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method") or "example_value" in node.meta:
                continue
            inputs = {other: metadata(other) for other in node.all_input_nodes}
            if not all("example_value" in other.meta for other in inputs):
                continue
            key = None
            if None not in inputs.values():
                key = (node.target, frozen(node.args, inputs), frozen(node.kwargs, inputs))
            if key is None or key not in known:
                known[key] = _run(node)
            node.meta["example_value"] = known[key]


def _run(node: fx.Node) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda other: other.meta["example_value"])
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)
