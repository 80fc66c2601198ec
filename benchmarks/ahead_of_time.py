"""What Triton makes of our kernels for a GPU that is not here: registers, spills, shared memory, width of the loads.

    launches = launches_of(Case(torch.bfloat16, groups=4, width=128), GPUS["sm_90"])
    [compile_launch(launch, GPUS["sm_90"]) for launch in launches]

The host functions in `kernels/` run on meta tensors with their kernels replaced by a recorder, so what is compiled has
the arguments, constants and strides of a real launch, specialised as Triton's launcher does it: pointers and multiples
of 16 are marked as such, a 1 becomes a constant. Needs triton, no driver.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from inertia_fx.kernels.triton import attention as scored_attention
from inertia_fx.kernels.triton import plan
from inertia_fx.kernels.triton import state as evict

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
    plan: plan.Plan | None = None

    @property
    def widths(self) -> tuple[int, int]:
        return self.width, self.width if self.value_width is None else self.value_width

    def plan_on(self, gpu: GPU) -> plan.Plan:
        if self.plan is not None:
            return self.plan
        return plan.plan_for(self.groups, *self.widths, self.dtype.itemsize, gpu.is_hip)

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


@dataclasses.dataclass(frozen=True)
class Resources:
    """What one compiled kernel takes, per program unless said otherwise.

    Attributes:
        registers: per lane (AMD: vector registers, accumulation registers included).
        spilled: bytes per lane in local memory.
        shared: bytes of shared memory.
        wide_loads, narrow_loads: instructions that read keys or values, of 16 bytes per lane and of fewer.
        by_registers, by_shared, by_warps: programs that may be resident on one processor, for each of the limits.
    """

    kernel: str
    gpu: str
    registers: int
    spilled: int
    shared: int
    wide_loads: int
    narrow_loads: int
    by_registers: int
    by_shared: int
    by_warps: int

    @property
    def resident(self) -> int:
        return min(self.by_registers, self.by_shared, self.by_warps)

    @property
    def limit(self) -> str:
        """What limits the programs per processor."""
        limits = {"registers": self.by_registers, "shared": self.by_shared, "warps": self.by_warps}
        return min(limits, key=lambda name: limits[name])


# ---------------------------------------------------------------------- recording launches


class _Recorder:
    """In place of a kernel: `recorder[grid](*arguments, **constants)` notes the launch."""

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
    """Every kernel that the host functions of these modules launch inside, instead of running it."""
    launches: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    stack.enter_context(mock.patch.object(module, name, _Recorder(value, launches)))
            if hasattr(module, "wrap_triton"):
                stack.enter_context(mock.patch.object(module, "wrap_triton", lambda kernel: kernel))
        yield launches


def launches_of(case: Case, gpu: GPU, slots: int = SLOTS, rows: int = 3) -> list[Launch]:
    """The launches of one layer's attention: attend, merge, and with scorer "entropy" weigh."""
    heads, (width, value_width) = case.kv_heads * case.groups, case.widths

    def empty(*shape: int, dtype: torch.dtype = case.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    with recording(scored_attention) as launches:
        scored_attention.scored_attention(
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
    """The launches of a step's start (enter), of its end (evict), and of the first eviction's copy (gather)."""

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    momentum, positions = empty(rows, slots, dtype=torch.float32), empty(rows, slots)
    with recording(evict) as launches:
        evict.enter(momentum, positions, empty(rows), empty(rows))
        evict.evict(momentum, positions, empty(rows), empty(rows), momentum, momentum, positions, 4, 5)
        evict.gather(empty(rows, 8, slots, width, dtype=dtype), empty(rows, 643), 645)
    return launches


# ---------------------------------------------------------------------- compiling

_TYPES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64",
    torch.bool: "i1",
}  # fmt: skip


def compile_launch(launch: Launch, gpu: GPU) -> Resources:
    """Compile for `gpu` with the specialisation of a real launch, and read the result."""
    kernel, names = launch.kernel, launch.kernel.arg_names
    constants = {param.name for param in kernel.params if param.is_constexpr}
    signature: dict[str, str] = {}
    fixed: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, name in enumerate(names):
        value = launch.arguments[name]
        if name in constants or (isinstance(value, int) and value == 1):
            signature[name], fixed[place,] = "constexpr", value
            continue
        facts: list[list[Any]] = []
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            facts.append(["tt.divisibility", 16])
            if gpu.is_hip and value.numel() * value.element_size() < 2**31:
                facts.append(["tt.pointer_range", 32])
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                facts.append(["tt.divisibility", 16])
        if facts:
            attributes[place,] = facts
    compiled = triton.compile(
        ASTSource(kernel, signature, fixed, attributes), target=gpu.target, options=dict(launch.options)
    )
    passed = [name for name in names if signature[name] != "constexpr"]
    buffers = [passed.index(name) for name in ("key", "value", "buffer") if name in passed]
    if gpu.is_hip:
        registers, spilled = _amd_registers(compiled.asm["amdgcn"])
        loads = _llvm_loads(compiled.asm["llir"], buffers)
    else:
        registers, spilled = _nvidia_registers(compiled.asm["cubin"])
        loads = _ptx_loads(compiled.asm["ptx"], buffers)
    shared, warps = compiled.metadata.shared, compiled.metadata.num_warps
    per_lane = -(-registers // gpu.granule) * gpu.granule
    warps_per_scheduler = gpu.registers // gpu.schedulers // gpu.target.warp_size // per_lane
    return Resources(
        kernel=kernel.__name__.removesuffix("_kernel"),
        gpu=gpu.name,
        registers=registers,
        spilled=spilled,
        shared=shared,
        wide_loads=sum(width >= 16 for width in loads),
        narrow_loads=sum(width < 16 for width in loads),
        by_registers=warps_per_scheduler * gpu.schedulers // warps,
        by_shared=gpu.shared // (shared + gpu.reserved) if shared + gpu.reserved else gpu.warps,
        by_warps=gpu.warps // warps,
    )


def _nvidia_registers(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack (our kernels have no arrays: what is there was spilled)."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", said)
    assert found is not None, said
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def _amd_registers(assembly: str) -> tuple[int, int]:
    def number(name: str) -> int:
        found = re.search(rf"\.{name}: *(\d+)", assembly)
        assert found is not None, name
        return int(found.group(1))

    # Spilled scalars go to lanes of vector registers; only what does not fit there reaches memory.
    return number("vgpr_count"), max(number("private_segment_fixed_size"), 4 * number("vgpr_spill_count"))


# ---------------------------------------------------------------------- whose loads, and how wide


def _ptx_loads(ptx: str, buffers: list[int]) -> list[int]:
    """Bytes per lane of every load whose address comes from one of these parameters."""
    body = ptx[ptx.index(".entry") :]
    statements = [text.strip() for line in body.splitlines() for text in line.split("//")[0].split(";")]
    statements = [re.sub(r"^@!?%p\d+\s+", "", text) for text in statements if text]
    wanted = [f"_param_{place}]" for place in buffers]
    edges, loads, tainted = [], [], set()
    for text in statements:
        registers = re.findall(r"%rd?\d+", text)
        if text.startswith("ld.param"):
            if any(text.endswith(end) for end in wanted):
                tainted.add(registers[0])
        elif text.startswith("ld.global"):
            vector = re.search(r"\.v(\d)\.", text)
            bits = re.search(r"\.[bufs](\d+)\s", text)
            assert bits is not None, text
            address = re.findall(r"%rd?\d+", text[text.rindex("[") :])[0]
            loads.append((address, int(vector.group(1) if vector else 1) * int(bits.group(1)) // 8))
        elif text.startswith(("cp.async.cg.", "cp.async.ca.")):
            if match := re.search(r"\[ *(%rd?\d+)[^\]]*\], *(0x[0-9a-f]+|\d+)", text.split("],", 1)[1]):
                loads.append((match.group(1), int(match.group(2), 0)))
        elif registers and not text.startswith(("st.", "ld.", "bra")):
            edges.append((registers[0], registers[1:]))
    return [width for address, width in loads if address in _reached(tainted, edges)]


def _llvm_loads(code: str, buffers: list[int]) -> list[int]:
    """As :func:`_ptx_loads`, in LLVM IR (AMD's assembly reuses registers, so that nothing can be followed there)."""
    start = code.index("define amdgpu_kernel")
    tainted = {f"%{place}" for place in buffers}
    edges, loads = [], []
    for line in code[start : code.index("\n}", start)].splitlines()[1:]:
        match = re.match(r"\s*(%[\w.]+) = (.*)", line)
        if match is None:
            continue
        result, text = match.groups()
        names = re.findall(r"%[\w.]+", text)
        if re.match(r"(tail )?call .*buffer\.load", text) or (text.startswith("load ") and "addrspace(1) %" in text):
            loads.append((names[0], _bytes_of(text)))
        else:
            edges.append((result, names))
    return [width for address, width in loads if address in _reached(tainted, edges)]


def _bytes_of(text: str) -> int:
    sizes = {"half": 2, "bfloat": 2, "float": 4, "double": 8}
    found = re.search(r"<(\d+) x (\w+)>|\b(i\d+|half|bfloat|float|double)\b", text)
    assert found is not None, text
    count, scalar = int(found.group(1) or 1), found.group(2) or found.group(3)
    return count * (sizes[scalar] if scalar in sizes else max(8, int(scalar[1:])) // 8)


def _reached(start: set[str], edges: list[tuple[str, list[str]]]) -> set[str]:
    """Registers computed from those in `start`; loops make it a fixed point."""
    reached = set(start)
    while True:
        more = {result for result, operands in edges if result not in reached and not reached.isdisjoint(operands)}
        if not more:
            return reached
        reached |= more
