"""Count the bytes and FLOPs of decode attention with scores, and bound how long a GPU needs for them from below.

Everything here is arithmetic: nothing is run. Keys and values are read once; what goes between our kernels (logits,
partial sums, statistics) is written and read back once, out of the L2 cache where it fits.
`benchmarks/roofline.py` prints the tables.
"""

from __future__ import annotations

import dataclasses

import torch

from ...kernels.triton import plan


@dataclasses.dataclass(frozen=True)
class GPU:
    """Peak rates per second (dense), last-level cache in bytes, processors (SMs, compute units)."""

    name: str
    bandwidth: float
    tensor_flops: float
    float_flops: float
    cache: int
    processors: int
    hip: bool = False

    def flops(self, dtype: torch.dtype) -> float:
        """Return the peak rate of products.

        fp32 products are exact ones (`input_precision="ieee"`), which NVIDIA's matrix units do not have.
        """
        return self.float_flops if dtype == torch.float32 else self.tensor_flops


GPUS = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA A100 80GB SXM datasheet (2,039 GB/s; 312 and 19.5 TFLOP/s) and the A100 whitepaper (40 MB, 108 SMs).
        GPU("A100", 2.039e12, 312e12, 19.5e12, 40 << 20, 108),
        # NVIDIA H100 SXM datasheet (3.35 TB/s; 1,979 with sparsity, so 989 and 67 TFLOP/s), H100 whitepaper (50 MB, 132).
        GPU("H100", 3.35e12, 989e12, 67e12, 50 << 20, 132),
        # NVIDIA H200 datasheet (4.8 TB/s); processor and cache are the H100's.
        GPU("H200", 4.8e12, 989e12, 67e12, 50 << 20, 132),
        # AMD Instinct MI300X datasheet (5.3 TB/s; 1,307 and 163.4 TFLOP/s; 256 MB Infinity Cache; 304 compute units).
        GPU("MI300X", 5.3e12, 1307e12, 163.4e12, 256 << 20, 304, hip=True),
    )
}

LAUNCH_MICROSECONDS = 3.0
"""Assumed time of one kernel that does nothing, when launches follow each other in a stream. `gpu_check` measures it."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer's decode attention: rows, KV heads, query heads per KV head, slots, head widths."""

    rows: int
    kv_heads: int
    groups: int
    slots: int
    width: int
    value_width: int
    dtype: torch.dtype = torch.bfloat16

    @property
    def heads(self) -> int:
        return self.kv_heads * self.groups

    def plan_on(self, gpu: GPU) -> plan.Plan:
        return plan.plan_for(self.groups, self.width, self.value_width, self.dtype.itemsize, gpu.hip)

    def chunks(self, chosen: plan.Plan) -> int:
        """Programs that share a KV head's slots, each with its part of the query heads."""
        return -(-self.groups // chosen.block_group)

    def splits_on(self, gpu: GPU) -> int:
        chosen = self.plan_on(gpu)
        programs = self.rows * self.kv_heads * self.chunks(chosen)
        return plan.splits_for(programs, self.slots, gpu.processors, chosen.block_slots)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of one layer's attention. A name with `_twice` is written by one kernel and read by the next, both counted."""

    keys_values: int
    queries_masks: int
    outputs: int
    momentum: int
    logits_twice: int
    partials_twice: int

    @property
    def between_kernels(self) -> int:
        return self.logits_twice + self.partials_twice

    @property
    def total(self) -> int:
        return self.keys_values + self.queries_masks + self.outputs + self.momentum + self.between_kernels


def traffic(shape: Shape, splits: int, scored: bool = True) -> Traffic:
    """Count what `kernels/triton/attention.py` moves, each byte once per reader.

    The scorer is "attention", and the momentum is blended in.
    """
    rows, heads, slots = shape.rows, shape.heads, shape.slots
    size = shape.dtype.itemsize
    return Traffic(
        keys_values=rows * shape.kv_heads * slots * (shape.width + shape.value_width) * size,
        queries_masks=rows * heads * shape.width * size + rows * slots * 4,
        outputs=rows * heads * shape.value_width * size,
        momentum=2 * rows * slots * 4 if scored else 0,
        logits_twice=2 * rows * heads * slots * 4 if scored else 0,
        partials_twice=2 * rows * heads * splits * (shape.value_width + 2) * 4,
    )


def scoring_bytes(shape: Shape) -> int:
    """Count what scores add: logits written and read, the old momentum read and the new one written."""
    with_scores = traffic(shape, 1)
    return with_scores.logits_twice + with_scores.momentum


def flops(shape: Shape, padded_group: int | None = None) -> int:
    """Count the FLOPs of the two products.

    Args:
        padded_group: query heads per KV head that the matrix units are given, padding included.
    """
    heads = shape.heads if padded_group is None else shape.kv_heads * padded_group
    return 2 * shape.rows * heads * shape.slots * (shape.width + shape.value_width)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Least seconds of one layer's attention on one GPU, for each of the limits, and how the work is cut.

    `per_processor`: the most tiles that one processor gets over the mean per processor; 1 is an even share.
    """

    memory: float
    compute: float
    launch: float
    splits: int
    programs: int
    working: int
    uneven: float

    @property
    def seconds(self) -> float:
        return max(self.memory, self.compute, self.launch)

    @property
    def bound(self) -> str:
        times = {"memory": self.memory, "compute": self.compute, "launch": self.launch}
        return max(times, key=lambda name: times[name])


def roofline(shape: Shape, gpu: GPU, scored: bool = True, launch_microseconds: float = LAUNCH_MICROSECONDS) -> Roofline:
    """Bound the time of one layer's attention.

    What goes between the kernels costs memory bandwidth as far as the last-level cache does not hold it.
    """
    chosen, splits = shape.plan_on(gpu), shape.splits_on(gpu)
    moved = traffic(shape, splits, scored)
    overflow = max(0, moved.between_kernels // 2 - gpu.cache)
    chunks = shape.chunks(chosen)
    tiles = -(-shape.slots // chosen.block_slots)
    per_split = -(-tiles // splits)
    working = -(-tiles // per_split)
    pieces = shape.rows * shape.kv_heads * chunks
    # Programs go to the processors in turns: the fullest one holds so many, of per_split tiles each.
    fullest = -(-pieces * working // gpu.processors) * per_split
    return Roofline(
        memory=(moved.total - moved.between_kernels + 2 * overflow) / gpu.bandwidth,
        compute=flops(shape, chunks * chosen.block_group) / gpu.flops(shape.dtype),
        launch=2 * launch_microseconds * 1e-6,
        splits=splits,
        programs=pieces * splits,
        working=pieces * working,
        uneven=fullest * gpu.processors / (pieces * tiles),
    )


@dataclasses.dataclass(frozen=True)
class Model:
    """As much of a decoder as its step's bytes depend on. `weights`: parameters that a step reads (embedding rows aside)."""

    name: str
    layers: int
    kv_heads: int
    groups: int
    width: int
    weights: float


# The models' config.json on huggingface.co: hidden and intermediate sizes, vocabulary; counted below.
def _weights(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, width: int, vocabulary: int) -> int:
    attention = hidden * width * (2 * heads + 2 * kv_heads)
    return layers * (attention + 3 * hidden * inner + 2 * hidden) + vocabulary * hidden + hidden


LLAMA = Model("Llama-3.1-8B", 32, 8, 4, 128, _weights(32, 4096, 14336, 32, 8, 128, 128256))


def scoring_share(model: Model, rows: int, slots: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Return the part that scoring has in the bytes of a whole decode step.

    Counted are the weights, once, and every layer's attention, its scores' logits out of memory too.
    """
    shape = Shape(rows, model.kv_heads, model.groups, slots, model.width, model.width, dtype)
    scoring = model.layers * scoring_bytes(shape)
    everything = model.weights * dtype.itemsize + model.layers * traffic(shape, 1).total
    return scoring / everything
