"""Spell sizes that are known to be equal alike in the example inputs, so that equal layers are compiled once."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from .contract import PassOptions, record_match, record_skip


def share_symbols_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Replace example inputs of dynamic shape by fakes whose equal sizes have one symbol; the graph stays as it is.

    Dynamo gives every dynamic dimension a symbol of its own and learns later that they are equal; the caches of fake
    tensors compare spelling. With one symbol for the slots of all layers, a layer is traced once instead of 30 times.
    """
    if options.backend != "inductor":
        record_skip(gm, "only Inductor traces the graph again with the example inputs")
        return gm
    values = [node.meta.get("example_value") for node in gm.graph.find_nodes(op="placeholder")]
    changed = 0
    for place, value in enumerate(values):
        if isinstance(value, FakeTensor) and _is_symbolic(value):
            example_inputs[place] = _respelled(value)
            changed += 1
    record_match(gm, f"{changed} of {len(values)} inputs")
    return gm


def _is_symbolic(value: FakeTensor) -> bool:
    return not all(isinstance(size, int) for size in (*value.shape, *value.stride())) and not value.requires_grad


def _respelled(value: FakeTensor) -> Tensor:
    sizes, strides = ([_simplified(size) for size in sizes] for sizes in (value.shape, value.stride()))
    with value.fake_mode:
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)


def _simplified(size: int | torch.SymInt) -> int | torch.SymInt:
    if isinstance(size, int):
        return size
    node = size.node
    return node.shape_env.create_symintnode(node.expr, hint=node.hint)
