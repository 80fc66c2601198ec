"""Every kernel compiles for GPUs that are not here, hardly spills, fits, and reads keys and values 16 bytes at a time."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default up to 3.9, which asks to have it written down

import pytest
import torch

pytest.importorskip("triton")

from inertia_fx.verify.testing.ahead_of_time import Resources, compile_launch, llvm_loads, ptx_loads
from inertia_fx.verify.testing.launches import GPUS, Case, Launch, bookkeeping_launches, launches_of

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# One of each tile shape, and of each part of the attention kernel that is left out if nobody asks for it.
COVERING = [
    Case(BF16, 4, 128),
    Case(BF16, 4, 64),
    Case(BF16, 4, 256),
    Case(FP32, 4, 128),
    Case(BF16, 4, 80, scorer=None),
    Case(BF16, 8, 192, value_width=128, scorer="vnorm", softcap=True, sink=True),
    Case(BF16, 64, 128),
    Case(FP32, 64, 128),
]
REST = [
    Case(FP16, 4, 128),
    Case(BF16, 16, 128),
    Case(BF16, 32, 128),
    Case(BF16, 64, 256),
    Case(FP32, 4, 32),
    Case(FP32, 4, 256),
    Case(FP32, 64, 64),
]


def kernels(launches: list[Launch], *names: str) -> list[Launch]:
    return [launch for launch in launches if launch.kernel.__name__.removesuffix("_kernel") in names]


def require(made: Resources) -> None:
    gpu = GPUS[made.gpu]
    # ptxas 12.8 (Triton 3.6) at times parks up to four registers to come down to its next step of occupancy.
    assert made.spilled <= 16, made
    assert made.shared <= gpu.shared_per_program, made
    assert made.resident >= 1, made


def check_attention(case: Case, target: str) -> None:
    (attend,) = kernels(launches_of(case, GPUS[target]), "attend")
    made = compile_launch(attend, GPUS[target])
    require(made)
    assert made.wide_loads > 0, made
    assert made.narrow_loads == 0, made


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("case", COVERING, ids=str)
def test_attention(case: Case, target: str) -> None:
    check_attention(case, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("case", REST, ids=str)
def test_attention_of_the_rest(case: Case, target: str) -> None:
    check_attention(case, target)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize(
    "case",
    [
        *(Case(BF16, 4, 128, scorer=scorer) for scorer in ("attention", "vnorm", "entropy", None)),
        Case(BF16, 4, 128, blend=False),
        Case(BF16, 4, 128, blend=False, scorer="entropy"),
        Case(FP32, 64, 256, kv_heads=1, scorer="vnorm"),
        Case(FP16, 8, 192, value_width=80),
    ],
    ids=str,
)
def test_merge(case: Case, target: str) -> None:
    launches = kernels(launches_of(case, GPUS[target]), "merge", "weigh")
    assert len(launches) == (2 if case.scorer == "entropy" else 1)
    for launch in launches:
        made = compile_launch(launch, GPUS[target])
        require(made)
        assert made.resident >= 4, "small programs that wait for memory want company"


@pytest.mark.parametrize("target", GPUS)
def test_bookkeeping(target: str) -> None:
    enter, evict, gather = (compile_launch(launch, GPUS[target]) for launch in bookkeeping_launches(BF16, 128))
    assert [made.kernel for made in (enter, evict, gather)] == ["enter", "evict", "gather"]
    for made in (enter, evict, gather):
        require(made)
    assert gather.wide_loads > 0
    assert gather.narrow_loads == 0


WRITTEN = {
    "attend": {None: {"partial", "stats"}, "attention": {"partial", "stats", "logits"}, "entropy": {"partial", "stats", "logits"},
               "vnorm": {"partial", "stats", "logits", "norms", "norm_stats"}},
    "merge": {None: {"output"}, "attention": {"output", "scores"}, "vnorm": {"output", "scores"},
              "entropy": {"output", "scores", "entropies"}},
    "weigh": {"entropy": {"result"}},
    "enter": {None: {"new_momentum", "new_positions"}},
    "evict": {None: {"momentum", "positions", "free", "length"}},
    "gather": {None: {"result"}},
}  # fmt: skip


@pytest.mark.parametrize("blend", [True, False])
@pytest.mark.parametrize("scorer", [None, "attention", "vnorm", "entropy"])
def test_what_torch_takes_a_kernel_to_write(scorer: str | None, blend: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads that off the kernel's code. Whatever else it took for written, a compiled step would copy before."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, kernel_side_table
    from triton.backends.compiler import GPUTarget

    class Driver:
        def get_current_target(self) -> GPUTarget:
            return GPUTarget("cuda", 90, 32)

        def get_current_device(self) -> int:
            return 0

    monkeypatch.setattr(triton.runtime.driver, "_active", Driver())
    launches = launches_of(Case(BF16, 4, 128, scorer=scorer, blend=blend), GPUS["sm_90"])
    if scorer is None:
        launches += bookkeeping_launches(BF16, 128)
    for launch in launches:
        name = launch.kernel.__name__.removesuffix("_kernel")
        tensors = {
            key: torch.empty(2, dtype=value.dtype)
            for key, value in launch.arguments.items()
            if isinstance(value, torch.Tensor)
        }
        numbers = {key: value for key, value in launch.arguments.items() if key not in tensors}
        places = kernel_side_table.add_kernel(launch.kernel), kernel_side_table.add_constant_args(numbers)
        assert set(get_mutated_tensors(*places, tensors, {})) == WRITTEN[name][scorer], name


def test_a_width_that_is_no_multiple_of_16_bytes_is_read_in_smaller_pieces() -> None:
    """The count of narrow loads sees what it is there to see: 20 bf16 are 40 bytes, so rows start anywhere."""
    (attend,) = kernels(launches_of(Case(BF16, 4, 20), GPUS["sm_90"]), "attend")
    made = compile_launch(attend, GPUS["sm_90"])
    assert made.narrow_loads > 0
    assert made.wide_loads == 0


def test_launches_are_specialised_as_real_ones() -> None:
    attend, merge = launches_of(Case(BF16, 4, 128), GPUS["sm_90"], slots=641, rows=3)
    assert (attend.grid, attend.options) == ((24, 7, 1), {"num_warps": 4, "num_stages": 3})
    assert merge.grid == (3, 32 + 3)
    strides = {name: attend.arguments[name] for name in ("key_row", "key_head", "key_slot", "key_width", "mask_row")}
    assert strides == {
        "key_row": 8 * 641 * 128,
        "key_head": 641 * 128,
        "key_slot": 128,
        "key_width": 1,
        "mask_row": 641,
    }
    assert attend.arguments["key"].shape == (3, 8, 641, 128)


# ---------------------------------------------------------------------- whose loads, and how wide

PTX = """
.visible .entry kernel(
    .param .u64 kernel_param_0,
    .param .u64 kernel_param_1
)
{
    ld.param.b64 %rd1, [kernel_param_0];
    ld.param.b64 %rd2, [kernel_param_1];
    add.s64 %rd3, %rd1, 64;
    @%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd3 + 0 ];   // 16 bytes of parameter 0
    mov.b64 %rd4, %rd3; add.s64 %rd5, %rd4, %rd9;
    @!%p2 ld.global.b16 %rs1, [ %rd5 + 2 ];
    cp.async.cg.shared.global [ %r7 + 0 ], [ %rd5 + 0 ], 0x10, %r8;
    cp.async.ca.shared.global [ %r7 + 0 ], [ %rd2 + 0 ], 0x4, %r8;
    cp.async.commit_group;
    ld.global.v2.f32 { %r5, %r6 }, [ %rd2 + 0 ];
}
"""

LLVM = """
define amdgpu_kernel void @kernel(ptr addrspace(1) %0, ptr addrspace(1) %1) {
  %3 = tail call ptr addrspace(8) @llvm.amdgcn.make.buffer.rsrc.p8.p1(ptr addrspace(1) %0, i16 0, i64 9, i32 8)
  %4 = tail call <8 x bfloat> @llvm.amdgcn.raw.ptr.buffer.load.v8bf16(ptr addrspace(8) %3, i32 %9, i32 0, i32 0)
  %5 = getelementptr float, ptr addrspace(1) %0, i64 %9
  %6 = load <2 x float>, ptr addrspace(1) %5, align 8
  %7 = load i16, ptr addrspace(1) %1, align 2
  %8 = load <8 x half>, ptr addrspace(3) @global_smem, align 16
}
"""


def test_loads_are_followed_to_their_parameter() -> None:
    assert ptx_loads(PTX, [0]) == [16, 2, 16]
    assert ptx_loads(PTX, [1]) == [4, 8]
    assert llvm_loads(LLVM, [0]) == [16, 8]
    assert llvm_loads(LLVM, [1]) == [2]
