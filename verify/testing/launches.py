"""Record the kernel launches of an attention layer and of the state's bookkeeping, without running them.

    launches_of(Case(torch.bfloat16, groups=4, width=128), GPUS["sm_90"])

The host functions in `kernels/` run on meta tensors with their kernels replaced by a recorder, so what is recorded has
the arguments, constants and strides of a real launch. Needs triton, no driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from ...kernels.triton import attention, state
from ...kernels.triton.plan import Plan, plan_for

SLOTS = 6401
"""Odd, so that nothing is taken for a multiple of 16 that in a graph with symbolic sizes is not known to be one."""


@dataclasses.dataclass(frozen=True)
class GPU:
    """A processor (SM, compute unit) and what runs on it at the same time.

    Attributes:
        registers: 32-bit registers per lane that the warps of one scheduler share, times lanes: per processor.
        shared: bytes of shared memory per processor; a program may take `shared_per_program` of them.
        reserved: bytes that every program takes beside what it asks for.
        granule: registers are handed to a warp in multiples of so many per lane.
        schedulers: warps stay on one, and each has its part of the registers.
        warps: that may be resident.
    """

    target: GPUTarget
    registers: int
    shared: int
    shared_per_program: int
    reserved: int
    granule: int
    schedulers: int
    warps: int

    @property
    def name(self) -> str:
        return str(self.target.arch) if self.target.backend == "hip" else f"sm_{self.target.arch}"

    @property
    def is_hip(self) -> bool:
        return self.target.backend == "hip"


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" (sm_80, sm_90), and the "occupancy"
# sections of the Ampere and Hopper tuning guides: 65,536 registers, 64 warps, 1 KiB of shared memory reserved per block.
# CDNA 3 ISA reference: 512 vector registers per lane and SIMD, 64 KiB of LDS; AMD's GPU hardware specifications: 8 waves
# per SIMD, 4 SIMDs per compute unit.
GPUS = {
    gpu.name: gpu
    for gpu in (
        GPU(GPUTarget("cuda", 80, 32), 65536, 164 << 10, 163 << 10, 1024, 8, 4, 64),
        GPU(GPUTarget("cuda", 90, 32), 65536, 228 << 10, 227 << 10, 1024, 8, 4, 64),
        GPU(GPUTarget("hip", "gfx942", 64), 4 * 512 * 64, 64 << 10, 64 << 10, 0, 8, 4, 32),
    )
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One configuration of the kernels. `scorer` None is attention without scores; `value_width` None is `width`."""

    dtype: torch.dtype
    groups: int
    width: int
    value_width: int | None = None
    scorer: str | None = "attention"
    softcap: bool = False
    sink: bool = False
    blend: bool = True
    kv_heads: int = 8
    plan: Plan | None = None

    @property
    def widths(self) -> tuple[int, int]:
        return self.width, self.width if self.value_width is None else self.value_width

    def plan_on(self, gpu: GPU) -> Plan:
        if self.plan is not None:
            return self.plan
        return plan_for(self.groups, *self.widths, self.dtype.itemsize, gpu.is_hip)

    def __str__(self) -> str:
        width, value_width = self.widths
        parts = [str(self.dtype).removeprefix("torch."), f"G {self.groups}", f"D {width}"]
        parts += [f"Dv {value_width}"] * (width != value_width) + [self.scorer or "unscored"]
        return " ".join(parts + ["softcap"] * self.softcap + ["sink"] * self.sink)


@dataclasses.dataclass(frozen=True)
class Launch:
    """A kernel and the arguments of one launch, by name; `options` are num_warps and the like."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, int]


# ---------------------------------------------------------------------- recording launches


class _Recorder:
    """Stand-in for a kernel: `recorder[grid](*arguments, **constants)` notes the launch."""

    def __init__(self, kernel: JITFunction, launches: list[Launch]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def note(*arguments: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            options = {name: given.pop(name) for name in tuple(given) if name not in self.kernel.arg_names}
            self.launches.append(Launch(self.kernel, tuple(grid), given, options))

        return note


@contextlib.contextmanager
def recording(*modules: ModuleType) -> Iterator[list[Launch]]:
    """Record every kernel that the host functions of these modules launch inside, instead of running it."""
    launches: list[Launch] = []
    replaced: list[tuple[ModuleType, str, Any]] = []
    for module in modules:
        for name, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                replaced.append((module, name, value))
                setattr(module, name, _Recorder(value, launches))
            elif name == "wrap_triton":
                replaced.append((module, name, value))
                setattr(module, name, lambda kernel: kernel)
    try:
        yield launches
    finally:
        for module, name, value in replaced:
            setattr(module, name, value)


def launches_of(case: Case, gpu: GPU, slots: int = SLOTS, rows: int = 3) -> list[Launch]:
    """Record the launches of one layer's attention: attend, merge, and with scorer "entropy" weigh."""
    heads, (width, value_width) = case.kv_heads * case.groups, case.widths

    def empty(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recording(attention) as launches:
        attention.scored_attention(
            empty(rows, heads, 1, width),
            empty(rows, case.kv_heads, slots, width),
            empty(rows, case.kv_heads, slots, value_width),
            empty(rows, 1, 1, slots, dtype=torch.float32),
            empty(rows, slots, dtype=torch.bool),
            0.125,
            case.kv_heads,
            case.scorer,
            old=empty(rows, slots, dtype=torch.float32) if case.blend and case.scorer else None,
            softcap=30.0 if case.softcap else 0.0,
            sink=empty(heads, dtype=torch.float32) if case.sink else None,
            plan=case.plan_on(gpu),
            splits=7,  # neither 1 nor a multiple of 16: nothing is known about it in a graph
        )
    return launches


def bookkeeping_launches(dtype: torch.dtype, width: int, slots: int = SLOTS, rows: int = 3) -> list[Launch]:
    """Record the launches of a step's start (enter), of its end (evict), and of the first eviction's copy (gather)."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    momentum, positions = empty(rows, slots, dtype=torch.float32), empty(rows, slots)
    with recording(state) as launches:
        state.enter(momentum, positions, empty(rows), empty(rows))
        state.evict(momentum, positions, empty(rows), empty(rows), momentum, momentum, positions, 4, 5)
        state.gather(empty(rows, 8, slots, width, dtype=dtype), empty(rows, 643), 645)
    return launches
