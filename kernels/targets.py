"""What the maths of a step becomes on which device: the one place that knows targets.

    reference   plain torch as `reference.py` has it: any device, any inner compiler
    cpu         the same maths as Inductor compiles it best on CPUs (`cpu.py`)
    triton      operators that launch our kernels on CUDA and ROCm devices (`triton/`)

A new target is one more :class:`Target` and one more line in :func:`target_for`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import cpu, reference
from .triton import plan


@dataclasses.dataclass(frozen=True)
class Target:
    """How each piece of a decode step is computed. Arguments and results are those of `reference.py`.

    Attributes:
        name: for reports.
        attention: (scored, query, key) -> what computes :func:`reference.scored_attention` or
            :func:`reference.slot_attention` for tensors like these; a function is inlined into the graph, an operator called.
        blended_attention: the operator that also updates the momentum, or ``None``.
        enter: what computes :func:`reference.enter` in one piece; ``None`` leaves the traced arithmetic.
        commit: chooses the next free slot and writes the state back in place; takes (momentum, positions, free, length,
            moved momentum, momentum with the marks of slots without a token, positions, protect_first, protect_recent).
        gather: (buffer [B, N, S, D], index [B, n], capacity) -> [B, N, capacity, D], outside of graphs.
        refusal: (query, key, value) -> why `attention` does not take such tensors, which are left to `reference`.
        masks_in_memory: whether mask and validity are written to memory once for all layers ("mask", "valid").
        regions: whether equal layers can be compiled as one region.
    """

    name: str
    attention: Callable[[bool, Tensor, Tensor], Any]
    commit: Callable[..., Any]
    gather: Callable[[Tensor, Tensor, int], Tensor]
    blended_attention: Any = None
    enter: Any = None
    refusal: Callable[[Tensor, Tensor, Tensor], str | None] = lambda query, key, value: None
    masks_in_memory: tuple[str, ...] = ()
    regions: bool = True


def target_for(device_type: str, inner_compiler: Any = None) -> Target:
    """Choose the target for a device ("cuda" is ROCm's name as well) and an inner compiler."""
    if plan.runs_triton(device_type):
        return _triton()
    return CPU if device_type == "cpu" and inner_compiler == "inductor" else REFERENCE


# ---------------------------------------------------------------------- reference


def _reference_attention(scored: bool, query: Tensor, key: Tensor) -> Any:
    return reference.scored_attention if scored else reference.slot_attention


def _commit(
    momentum: Tensor,
    positions: Tensor,
    free: Tensor,
    length: Tensor,
    moved: Tensor,
    entered: Tensor,
    new_positions: Tensor,
    protect_first: int,
    protect_recent: int,
) -> Tensor:
    if moved is not entered:  # slots without a token keep their marks
        moved = torch.where(new_positions >= 0, moved, entered)
    free.copy_(reference.next_free(moved, new_positions, length, protect_first, protect_recent))
    momentum.copy_(moved)
    positions.copy_(new_positions)
    return length.add_(1)


def _gather(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
    rows, heads, _, width = buffer.shape
    result = buffer.new_zeros(rows, heads, capacity, width)
    taken = index.shape[1]
    result[:, :, :taken] = buffer.gather(2, index[:, None, :, None].expand(rows, heads, taken, width))
    return result


REFERENCE = Target("reference", _reference_attention, _commit, _gather)


# ---------------------------------------------------------------------- CPUs, with Inductor


def _cpu_attention(scored: bool, query: Tensor, key: Tensor) -> Any:
    function = cpu.scored_attention if scored else cpu.slot_attention
    return functools.partial(function, group=query.shape[1] // key.shape[1], half=key.dtype.itemsize == 2)


CPU = Target("cpu", _cpu_attention, _commit, _gather, masks_in_memory=("mask",))


# ---------------------------------------------------------------------- Triton


@functools.cache
def _triton() -> Target:
    """Needs triton, and defines the operators when it is first asked for."""
    from .triton import ops, state  # noqa: F401

    operators = torch.ops.inertia_fx

    def attention(scored: bool, query: Tensor, key: Tensor) -> Any:
        return (operators.triton_scored_attention if scored else operators.triton_slot_attention).default

    return Target(
        "triton",
        attention,
        operators.triton_evict.default,
        state.gather,
        blended_attention=operators.triton_blended_attention.default,
        enter=operators.triton_enter.default,
        refusal=plan.refusal,
        masks_in_memory=("mask", "valid"),
        # In a region torch would call the operators one by one instead of compiling what they launch into the step.
        regions=False,
    )
