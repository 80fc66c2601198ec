"""Check whole decode steps on the device against the same steps on the CPU, token by token."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

import inertia_fx

from .decode import random_llama
from .report import Row, Setting

ROWS, PROMPT, STEPS = 3, 150, 24
SHAPE = {
    "hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128,
}  # fmt: skip
TOLERANCE = 1e-3
"""Of logits and momentum, as a part of the largest one. In fp32, so that rounding does not decide which token is evicted."""


@dataclasses.dataclass
class Course:
    """Record of a course of steps: logits, retained positions and their momentum."""

    logits: list[torch.Tensor] = dataclasses.field(default_factory=list)
    retained: list[list[list[int]]] = dataclasses.field(default_factory=list)
    momentum: list[torch.Tensor] = dataclasses.field(default_factory=list)


def compiled_steps(setting: Setting) -> Iterator[Row]:
    """The passes, the operators and Inductor's own launches together: what users run. On a CPU, AOTAutograd's graph."""
    torch.manual_seed(0)
    model = random_llama(SHAPE, torch.float32)
    moved = copy.deepcopy(model).to(setting.device)
    on_cpu = inertia_fx.compile(model, backend="eager")
    backend = "inductor" if setting.on_gpu else "aot_eager"
    compiled = inertia_fx.compile(moved, backend=backend)
    cases = [
        ("full refresh", compiled, {}),
        ("Lazy4, pooled", compiled, {"refresh_every": 4, "evict_after": 3, "pool_width": 3}),
        ("Score-Free", compiled, {"refresh_every": None}),
    ]
    if setting.on_gpu:
        cases.append(("reduce-overhead", inertia_fx.compile(moved, mode="reduce-overhead"), {}))
    for name, candidate, settings in cases:
        expect = _course(on_cpu, torch.device("cpu"), **settings)
        yield _compared(name, expect, _course(candidate, setting.device, **settings))


def _course(model: Any, device: torch.device, **settings: Any) -> Course:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(SHAPE["vocab_size"], (ROWS, PROMPT + STEPS), generator=generator).to(device)
    cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=0.8, min_budget=1, **settings))
    model(tokens[:, :PROMPT], past_key_values=cache)
    course = Course()
    for place in range(PROMPT, PROMPT + STEPS):
        logits = model(tokens[:, place : place + 1], past_key_values=cache).logits
        course.logits.append(logits[:, 0].cpu())
        course.retained.append([row.tolist() for row in cache.retained_positions()])
        course.momentum.append(torch.cat(cache.momentum).cpu())
    return course


def _compared(name: str, expect: Course, got: Course) -> Row:
    """Compare up to the first step that retains another token: from there on nothing can be equal."""
    same = next((step for step in range(STEPS) if expect.retained[step] != got.retained[step]), STEPS)
    logits = max((_error(a, b) for a, b in zip(expect.logits[: same + 1], got.logits, strict=False)), default=0.0)
    momentum = max((_error(a, b) for a, b in zip(expect.momentum[:same], got.momentum, strict=False)), default=0.0)
    return Row(
        name,
        {
            "steps with the same tokens retained": f"{same} of {STEPS}",
            "logits error": logits,
            "momentum error": momentum,
        },
        is_right=same == STEPS and logits <= TOLERANCE and momentum <= TOLERANCE,
    )


def _error(expect: torch.Tensor, got: torch.Tensor) -> float:
    return float((expect - got).abs().max() / expect.abs().max().clamp(min=1e-30))
