"""How long the first decode step of SmolLM2-135M takes, and what Inductor's options add to it and take off the step.

    python benchmarks/compile_time.py [--dtype bfloat16] [--rounds 1] [--only NAME ...] [--quick]

Every figure is taken in a process of its own: cold with an empty Inductor cache, warm with the cache that the cold one
left. The candidates take turns. The step itself is timed on one thread. Cache contents are random (4,096 tokens). With
several rounds the medians are shown. Writes benchmarks/results/compile_time_DTYPE.md, or with `--only` another file.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

TOKENS = 4096
CANDIDATES: dict[str, dict[str, Any] | None] = {
    "full cache, static": None,
    "full cache, dynamic": None,
    "inertia_fx": {},
    "warm_start": {"warm_start": True},
    "regions=False": {"regions": False},
    "freezing": {"options": {"freezing": True}},
    "freezing, max_autotune": {"options": {"freezing": True, "max_autotune": True}},
    "regions=False, freezing, max_autotune": {
        "regions": False,
        "options": {"freezing": True, "max_autotune": True},
    },
}
"""Arguments of `inertia_fx.compile`; None is the model's own step with a full cache."""


def first_step(name: str, model: str | None, dtype: str, backend: str) -> dict[str, Any]:
    """What runs in a process of its own: seconds of the first step, milliseconds of the later ones."""
    import torch
    import transformers
    from decode_step import bounded, filled_cache

    import inertia_fx
    from inertia_fx.cli import checkpoint

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    loaded, _ = checkpoint.load(model, getattr(torch, dtype))
    settings = CANDIDATES[name]
    if settings is not None:
        settings = settings if backend == "inductor" else {}  # they are Inductor's
        compiled = inertia_fx.compile(loaded, ratio=0.9, backend=backend, **settings)
        run = bounded(compiled, TOKENS, name, ratio=0.9).step
    else:
        static = name == "full cache, static"
        cache = filled_cache(loaded, TOKENS, 64, static)
        if not static:  # one graph for any length from the first step on
            for layer in cache.layers:
                torch._dynamo.mark_dynamic(layer.keys, 2)
                torch._dynamo.mark_dynamic(layer.values, 2)
        token, position = torch.tensor([[5]]), torch.tensor([[TOKENS]])

        def forward() -> Any:
            return loaded(token, position_ids=position, past_key_values=cache, use_cache=True).logits

        run = torch.compile(forward, backend=backend, fullgraph=True)
    torch.set_num_threads(1)  # of the step; compilers use all cores
    with torch.no_grad():
        began = time.perf_counter()
        run()
        first = time.perf_counter() - began
        times = []
        for _ in range(20):
            began = time.perf_counter()
            run()
            times.append(time.perf_counter() - began)
    return {"first": first, "ms": statistics.median(times) * 1e3, "torch": torch.__version__}


def measured(name: str, arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", name, "--dtype", arguments.dtype]
    command += ["--quick"] if arguments.quick else []
    command += ["--model", arguments.model] if arguments.model else []
    here = pathlib.Path(__file__).parent
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}
    done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--model", default=None, help="local folder or hub name; default SmolLM2-135M-Instruct")
    parser.add_argument("--only", nargs="+", choices=CANDIDATES, help="these candidates, default all")
    parser.add_argument("--quick", action="store_true", help="inner compiler 'eager': tries the script only")
    parser.add_argument("--child", choices=CANDIDATES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        backend = "eager" if arguments.quick else "inductor"
        print(json.dumps(first_step(arguments.child, arguments.model, arguments.dtype, backend)))
        return

    from result_tables import Results
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    names = arguments.only or list(CANDIDATES)
    taken: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True,
                  console=Console(stderr=True)) as progress:  # fmt: skip
        for _ in range(arguments.rounds):
            for name in names:
                with tempfile.TemporaryDirectory() as folder:
                    for state in ("cold", "warm"):
                        task = progress.add_task(f"{state}: {name}", total=None)
                        taken.setdefault((name, state), []).append(measured(name, arguments, folder))
                        progress.remove_task(task)
    version = taken[names[0], "cold"][0]["torch"]
    command = shlex.join(["python", "benchmarks/compile_time.py", *sys.argv[1:]])
    results = Results(
        f"compile_time_{arguments.dtype}" + ("_only" if arguments.only else ""),
        f"`{command}`: torch {version}, {arguments.dtype}, {os.cpu_count()} cores, a prompt of {TOKENS:,} tokens",
    )
    results.begin(
        "the first decode step of a process", ("step", "cold, s", "warm, s", "later steps, ms"), left=("step",)
    )
    for name in names:
        cells = [f"{statistics.median(run['first'] for run in taken[name, state]):.1f}" for state in ("cold", "warm")]
        results.row(name, *cells, f"{statistics.median(run['ms'] for run in taken[name, 'warm']):.1f}")
    results.end()
    if not arguments.quick:
        results.write()


if __name__ == "__main__":
    main()
