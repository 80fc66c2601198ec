"""Registers, spills, shared memory, width of the loads and programs per processor of our kernels, for GPUs not here.

    python benchmarks/kernel_resources.py [--all] [--targets sm_80,sm_90,gfx942]

Compiles ahead of time (`verify/testing/ahead_of_time.py`; a few seconds per kernel) and writes
benchmarks/results/kernel_resources.md. By default a subset that meets every tile shape; `--all` is every dtype x head
width x group size, scored and unscored. Needs triton and no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # Triton's default up to 3.9, which asks to have it written down

import torch
import triton
from result_tables import Results
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inertia_fx.verify.testing.ahead_of_time import compile_launch
from inertia_fx.verify.testing.launches import GPUS, Case, Launch, bookkeeping_launches, launches_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
WIDTHS, GROUPS = (32, 64, 80, 96, 112, 128, 256), (1, 4, 8, 16, 64)
COLUMNS = (
    "kernel", "configuration", "tile", "warps", "stages", "registers", "spilled, B", "shared, B", "16-byte loads",
    "narrower", "resident", "limited by",
)  # fmt: skip


def cases(everything: bool) -> Iterator[Case]:
    """What is compiled. A group of 64 or more query heads (multi-query attention) runs in chunks of 64."""
    if everything:
        for dtype, width, groups, scored in itertools.product(DTYPES, WIDTHS, GROUPS, (True, False)):
            yield Case(dtype, groups, width, scorer="attention" if scored else None)
    else:
        for dtype, width in itertools.product((torch.bfloat16, torch.float32), WIDTHS):
            yield Case(dtype, 4, width)
        for dtype, groups in itertools.product((torch.bfloat16, torch.float32), (1, 16, 64)):
            yield Case(dtype, groups, 128)
        yield Case(torch.float16, 4, 128)
        yield Case(torch.float32, 64, 256)
        yield Case(torch.bfloat16, 64, 256)
        yield Case(torch.bfloat16, 4, 128, scorer=None)
    for scorer in ("vnorm", "entropy"):
        yield Case(torch.bfloat16, 4, 128, scorer=scorer)
    yield Case(torch.bfloat16, 8, 64, softcap=True, sink=True)
    yield Case(torch.bfloat16, 8, 192, value_width=128)


def rows_of(target: str, everything: bool) -> Iterator[tuple[str, ...] | None]:
    """One row of the table per kernel and configuration; ``None`` for each case done."""
    gpu = GPUS[target]
    seen = set()
    # The bookkeeping knows nothing of the attention: one case of its own.
    for case in [*cases(everything), None]:
        if case is None:
            launches: list[Launch] = bookkeeping_launches(torch.bfloat16, 128)
        else:
            launches = launches_of(case, gpu)
        for launch in launches:
            tile = ""
            name = launch.kernel.__name__.removesuffix("_kernel")
            if name == "attend":
                assert case is not None
                plan = case.plan_on(gpu)
                tile = f"{plan.block_group}×{plan.block_slots}×{plan.block_width}"
            constants = {key: value for key, value in launch.arguments.items() if key.isupper()}
            if name != "attend" and (key := (name, tuple(constants.items()))) in seen:
                continue
            elif name != "attend":
                seen.add(key)
            described = (
                name, "" if case is None else str(case), tile, str(launch.options["num_warps"]),
                str(launch.options.get("num_stages", "")),
            )  # fmt: skip
            try:
                made = compile_launch(launch, gpu)
            except Exception as failure:  # a row of the table like any other: the rest is worth knowing
                yield (*described, f"does not compile: {type(failure).__name__}", *[""] * 6)
                continue
            yield (
                *described, str(made.registers), str(made.spilled), f"{made.shared:,}",
                str(made.wide_loads), str(made.narrow_loads), str(made.resident), made.limit,
            )  # fmt: skip
        yield None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", default=",".join(GPUS), help="comma separated: " + ", ".join(GPUS))
    parser.add_argument(
        "--all", action="store_true", help="every configuration: 630 of attention alone, of 1 to 5 s each"
    )
    arguments = parser.parse_args()
    targets = arguments.targets.split(",")
    command = " ".join(["python benchmarks/kernel_resources.py", *sys.argv[1:]])
    results = Results(
        "kernel_resources",
        f"`{command}`: torch {torch.__version__}, triton {triton.__version__}, compiled ahead of time, run nowhere.",
        "",
        "Per program; registers per lane; a tile is query heads × slots × width; resident programs per processor.",
        "16-byte and narrower loads are instructions that read keys or values.",
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for target in targets:
            task = progress.add_task(target, total=len(list(cases(arguments.all))) + 1)
            results.begin(target, COLUMNS, left=("kernel", "configuration"), heading=target)
            for row in rows_of(target, arguments.all):
                if row is None:
                    progress.advance(task)
                else:
                    results.row(*row)
            results.end()
    results.write()


if __name__ == "__main__":
    main()
