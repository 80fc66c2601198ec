"""Bytes and FLOPs of decode attention with scores, and how long a GPU needs for them at the least.

    python benchmarks/roofline.py [--gpus H200,MI300X] [--launch-us 3]

Everything here is arithmetic (`verify/theory/roofline.py`): nothing was run. Writes benchmarks/results/roofline.md.
"""

from __future__ import annotations

import argparse
import sys

import torch
from result_tables import Results

from inertia_fx.verify.theory.roofline import (
    GPUS,
    LAUNCH_MICROSECONDS,
    LLAMA,
    Shape,
    roofline,
    scoring_bytes,
    scoring_share,
    traffic,
)  # fmt: skip

SHAPES = (
    *(("Llama-8B", Shape(rows, 8, 4, slots, 128, 128)) for slots in (6400, 65536) for rows in (1, 8, 64, 128)),
    ("same in fp32", Shape(8, 8, 4, 6400, 128, 128, torch.float32)),
    ("Llama-70B", Shape(8, 8, 8, 6400, 128, 128)),
    ("no groups", Shape(8, 32, 1, 6400, 128, 128)),
    ("multi-query", Shape(8, 1, 64, 6400, 128, 128)),
    ("Gemma-2-9B", Shape(8, 8, 2, 6400, 256, 256)),
    ("SmolLM2-135M", Shape(1, 3, 3, 410, 64, 64)),
)
"""Attention of one layer: these models' heads (Llama is 3.1). No groups: 32 heads of width 128. Multi-query: 64 share one."""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", default=",".join(GPUS), help="comma separated: " + ", ".join(GPUS))
    parser.add_argument("--launch-us", type=float, default=LAUNCH_MICROSECONDS, help="assumed time of an empty kernel")
    arguments = parser.parse_args()
    command = " ".join(["python benchmarks/roofline.py", *sys.argv[1:]])
    columns: tuple[str, ...] = (
        "one layer", "slots", "batch", "MB", "scores", "µs", "bound", "splits", "programs", "uneven",
    )  # fmt: skip
    results = Results(
        "roofline",
        f"`{command}`: arithmetic, nothing was run; an empty kernel is assumed to take {arguments.launch_us:g} µs.",
        "",
        "MB: keys, values and all else that is moved, what stays in the cache included. Scores: their part of it.",
        "µs: at least. Programs: those with work.",
        "Uneven: tiles of the processor with the most over the mean per processor.",
    )
    for gpu in (GPUS[name] for name in arguments.gpus.split(",")):
        title = f"{gpu.name}: {gpu.bandwidth / 1e12:.2f} TB/s, {gpu.processors} processors"
        results.begin(title, columns, left=columns[:1], heading=title)
        for name, shape in SHAPES:
            found = roofline(shape, gpu, launch_microseconds=arguments.launch_us)
            moved = traffic(shape, found.splits).total
            results.row(
                name, f"{shape.slots:,}", str(shape.rows), _number(moved / 1e6), f"{scoring_bytes(shape) / moved:.1%}",
                _number(found.seconds * 1e6), found.bound, str(found.splits), f"{found.working:,}", f"{found.uneven:.2f}",
            )  # fmt: skip
        results.end()
    columns = ("step of Llama-3.1-8B, bf16", "bytes, GB", "of which scoring")
    title = "whole decode step, by bytes (weights read once)"
    results.begin(title, columns, left=columns[:1], heading="A whole decode step, by bytes")
    for slots in (1638, 6400, 65536):
        for rows in (1, 8, 64, 128):
            shape = Shape(rows, LLAMA.kv_heads, LLAMA.groups, slots, LLAMA.width, LLAMA.width)
            moved = LLAMA.weights * 2 + LLAMA.layers * traffic(shape, 1).total
            share = f"{scoring_share(LLAMA, rows, slots):.2%}"
            results.row(f"{slots:,} slots, batch {rows}", f"{moved / 1e9:.1f}", share)
    results.end()
    results.write()


if __name__ == "__main__":
    main()
