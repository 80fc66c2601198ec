"""One decode step of SmolLM2-135M: inertia_fx against the best compiled full cache, in one process, in turns.

    python benchmarks/decode_step.py [--prompts 4096,8192] [--dtype bfloat16] [--rounds 15] [--quick]

Each row is the median over all rounds; a round times a few steps of every candidate one after the other, so that a
machine that slows down slows all of them. One thread. Cache contents are random (a step costs the same whatever the
numbers), so no prompt is computed. Writes the table to benchmarks/results/decode_step_DTYPE.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from result_tables import Results
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import inertia_fx
from inertia_fx.cli import checkpoint

COLUMNS = ("step", "ms", "faster", "floor", "cached", "K/V MiB", "start, s")
"""The last one: what the first three steps took, compile included. Equal graphs are compiled once per process."""


@dataclasses.dataclass
class Candidate:
    """Something whose decode step is timed: `step()` runs one."""

    name: str
    step: Callable[[], Any]
    cached: Callable[[], int]
    nbytes: Callable[[], int]
    first: float = 0.0
    times: list[float] = dataclasses.field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        return statistics.median(self.times) * 1e3


def random_layers(model: Any, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    config = model.config
    shape = (1, config.num_key_value_heads, tokens, config.head_dim)
    return [
        (torch.randn(shape).to(model.dtype), torch.randn(shape).to(model.dtype))
        for _ in range(config.num_hidden_layers)
    ]


def storage(cache: Any) -> int:
    return sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))


def filled_cache(model: Any, tokens: int, room: int, static: bool) -> Any:
    """transformers' StaticCache, with room for more tokens, or DynamicCache."""
    if static:
        cache = transformers.StaticCache(config=model.config, max_cache_len=tokens + room)
    else:
        cache = transformers.DynamicCache(config=model.config)
    for layer, (key, value) in enumerate(random_layers(model, tokens)):
        cache.update(key, value, layer)
    return cache


def full_cache(model: Any, tokens: int, room: int, static: bool, backend: str) -> Candidate:
    """Return the baseline: the model's own step under torch.compile, with transformers' DynamicCache or StaticCache."""
    kind = "static" if static else "dynamic"
    cache = filled_cache(model, tokens, room, static)
    position = [tokens]
    token = torch.tensor([[5]])

    def forward(token: Any, positions: Any, cache: Any) -> Any:
        return model(token, position_ids=positions, past_key_values=cache, use_cache=True).logits

    compiled = torch.compile(forward, backend=backend)

    def step() -> None:
        compiled(token, torch.tensor([[position[0]]]), cache)
        position[0] += 1

    return Candidate(f"full cache, {kind}", step, lambda: position[0], lambda: storage(cache))


def bounded(model: Any, tokens: int, name: str, **settings: Any) -> Candidate:
    cache = inertia_fx.InertiaCache(inertia_fx.Config(**settings))
    with cache.prompt(1, tokens):
        for layer, (key, value) in enumerate(random_layers(model, tokens)):
            cache.update(key, value, layer)
    token = torch.tensor([[5]])
    return Candidate(
        f"inertia_fx, {name}",
        lambda: model(token, past_key_values=cache),
        lambda: len(cache.retained_positions()[0]),
        lambda: cache.nbytes,
    )


def measure(candidates: list[Candidate], rounds: int, steps: int, progress: Progress) -> None:
    for candidate in candidates:
        task = progress.add_task(f"compiling: {candidate.name}", total=None)
        begin = time.perf_counter()
        for _ in range(3):  # DynamicCache compiles twice, the first eviction changes the slot count
            candidate.step()
        candidate.first = time.perf_counter() - begin
        progress.remove_task(task)
    task = progress.add_task("timing", total=rounds)
    for _ in range(rounds):
        for candidate in candidates:
            candidate.step()
            for _ in range(steps):
                begin = time.perf_counter()
                candidate.step()
                candidate.times.append(time.perf_counter() - begin)
        progress.advance(task)
    progress.remove_task(task)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", default="4096,8192", help="prompt lengths, comma separated")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each candidate per round")
    parser.add_argument("--model", default=None, help="local folder or hub name; default SmolLM2-135M-Instruct")
    parser.add_argument(
        "--quick", action="store_true", help="few rounds, inner compiler 'eager': tries the script only"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # ours is there already
    dtype = getattr(torch, arguments.dtype)
    rounds = 2 if arguments.quick else arguments.rounds
    results = Results(
        f"decode_step_{arguments.dtype}",
        f"`{' '.join(['python benchmarks/decode_step.py', *sys.argv[1:]])}`: torch {torch.__version__},"
        f" transformers {transformers.__version__}, {arguments.dtype}, 1 thread of"
        f" {platform.processor() or platform.machine()} ({torch.backends.cpu.get_cpu_capability()}), medians of"
        f" {rounds * arguments.steps} steps",
        "",
        "faster: than the best full cache. floor: against our step with one token in the cache, what a step costs"
        " without attention.",
    )
    with Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), transient=True,
                  console=Console(stderr=True)) as progress, torch.no_grad():  # fmt: skip
        task = progress.add_task("loading the model", total=None)
        model, _ = checkpoint.load(arguments.model, dtype)
        progress.remove_task(task)
        backend = "eager" if arguments.quick else "inductor"
        compiled = inertia_fx.compile(model, ratio=0.9, backend=backend)
        for tokens in map(int, arguments.prompts.split(",")):
            candidates = [full_cache(model, tokens, 64 + 8 * rounds, static, backend) for static in (True, False)]
            candidates += [
                bounded(compiled, tokens, "full refresh", ratio=0.9),
                bounded(compiled, tokens, "Lazy4", ratio=0.9, refresh_every=4),
                bounded(compiled, tokens, "Score-Free", ratio=0.9, refresh_every=None),
                bounded(compiled, 1, "one token", budget=1),
            ]
            measure(candidates, rounds, arguments.steps, progress)
            best = min(candidate.milliseconds for candidate in candidates[:2])
            floor = candidates[-1].milliseconds
            heading = f"A prompt of {tokens:,} tokens, ratio 0.9"
            results.begin(heading, COLUMNS, left=("step",), heading=heading)
            for candidate in candidates:
                ours = candidate not in candidates[:2]
                results.row(
                    candidate.name, f"{candidate.milliseconds:.1f}", f"{best / candidate.milliseconds:.2f}",
                    f"{candidate.milliseconds / floor:.2f}" if ours else "", f"{candidate.cached():,}",
                    f"{candidate.nbytes() / 2**20:.1f}", f"{candidate.first:.0f}",
                )  # fmt: skip
            results.end()
    if not arguments.quick:
        results.write()


if __name__ == "__main__":
    main()
