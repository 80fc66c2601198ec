"""Compile kernel launches for a GPU that is not here: registers, spills, shared memory, width of the loads.

    launches = launches_of(Case(torch.bfloat16, groups=4, width=128), GPUS["sm_90"])
    [compile_launch(launch, GPUS["sm_90"]) for launch in launches]

Arguments are specialised as Triton's launcher does it: pointers and multiples of 16 are marked as such, a 1 becomes a
constant. Needs triton, no driver.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton import knobs
from triton.compiler import ASTSource

from .launches import GPU, Launch


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
        loads = llvm_loads(compiled.asm["llir"], buffers)
    else:
        registers, spilled = _nvidia_registers(compiled.asm["cubin"])
        loads = ptx_loads(compiled.asm["ptx"], buffers)
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


def ptx_loads(ptx: str, buffers: list[int]) -> list[int]:
    """Return the bytes per lane of every load whose address comes from one of these parameters."""
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


def llvm_loads(code: str, buffers: list[int]) -> list[int]:
    """Return the same as :func:`ptx_loads`, from LLVM IR: in AMD's assembly registers are reused, so nothing can be followed."""
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
