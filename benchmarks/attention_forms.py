"""One query's attention with scores, in the forms that the `lower` pass can choose from, compiled by Inductor.

    python benchmarks/attention_forms.py [--slots 410,820,8193] [--rounds 100]

All forms of a row run in turns in one process, one thread; medians in microseconds. SmolLM2's shapes: 9 query and 3 KV
heads, width 64. Writes benchmarks/results/attention_forms.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from result_tables import Results

from inertia_fx.kernels import cpu, reference

HEADS, KV_HEADS, WIDTH = 9, 3, 64


def sdpa(q: Any, k: Any, v: Any, mask: Any, live: Any) -> Any:
    """Run the baseline: scaled_dot_product_attention, which gives no scores."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True, scale=0.125)


def matrix_products(q: Any, k: Any, v: Any, mask: Any, live: Any) -> Any:
    return reference.scored_attention(q, k, v, mask, live, 0.125, KV_HEADS, "attention")


def cpu_decomposition(q: Any, k: Any, v: Any, mask: Any, live: Any) -> Any:
    return cpu.scored_attention(q, k, v, mask, live, 0.125, KV_HEADS, "attention", HEADS // KV_HEADS, False)


def cpu_decomposition_half(q: Any, k: Any, v: Any, mask: Any, live: Any) -> Any:
    return cpu.scored_attention(q, k, v, mask, live, 0.125, KV_HEADS, "attention", HEADS // KV_HEADS, True)


FORMS = (sdpa, matrix_products, cpu_decomposition, cpu_decomposition_half)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", default="410,820,8193")
    parser.add_argument("--rounds", type=int, default=100)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    about = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    results = Results("attention_forms", f"`python benchmarks/attention_forms.py`: {about}")
    names = ("dtype", "slots", *(form.__name__ for form in FORMS))
    results.begin("attention of one query with scores, microseconds", names)
    for dtype in (torch.bfloat16, torch.float32):
        for slots in map(int, arguments.slots.split(",")):
            q = torch.randn(1, HEADS, 1, WIDTH).to(dtype)
            k, v = (torch.randn(1, KV_HEADS, slots, WIDTH).to(dtype) for _ in range(2))
            mask, live = torch.zeros(1, 1, 1, slots), torch.ones(1, slots, dtype=torch.bool)
            compiled = [torch.compile(form) for form in FORMS]
            for run in compiled:
                run(q, k, v, mask, live)
            times: list[list[float]] = [[] for _ in FORMS]
            for _ in range(arguments.rounds):
                for index, run in enumerate(compiled):
                    begin = time.perf_counter()
                    run(q, k, v, mask, live)
                    times[index].append(time.perf_counter() - begin)
            medians = [f"{statistics.median(each) * 1e6:.0f}" for each in times]
            results.row(str(dtype).removeprefix("torch."), str(slots), *medians)
    results.end()
    results.write()


if __name__ == "__main__":
    main()
