"""A few runs through Inductor: the same as the reference, one graph for every length, half precision."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import inertia_fx
from inertia_fx.verify import reference
from tests.common import models

pytestmark = pytest.mark.slow

SETTINGS: dict[str, Any] = {"ratio": 0.7, "min_budget": 5}


@functools.cache
def compiled(dtype: torch.dtype) -> tuple[Any, Any]:
    """The original and the compiled model; all tests of a dtype share its graphs."""
    model = models.llama().to(dtype)
    return model, inertia_fx.compile(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.xdist_group("inductor")
def test_no_new_graphs_for_new_lengths(dtype: torch.dtype) -> None:
    """20 prompts of 20 lengths from 50 to 3,000, some that are shorter than the budget, and one of over 4,096 slots."""
    model = compiled(dtype)[1]
    prompts = [(length, 0.9) for length in (50, 3000, *range(60, 2900, 158), 5000, 1, 2, 3, 12, 20, 21)]
    assert len(prompts) >= 20
    graphs, slots = [], []
    for index, (length, ratio) in enumerate([*prompts, (5000, 0.1), (60, 0.9)]):
        ids = torch.tensor([models.prompt(length, index)])
        cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=ratio))
        model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, past_key_values=cache)
        slots.append(cache.slots)
        graphs.append(counters["stats"]["unique_graphs"])
    assert set(graphs) == {graphs[0]}
    assert max(slots) > 4096


@pytest.mark.xdist_group("inductor")
def test_same_as_reference() -> None:
    model, runner = compiled(torch.float32)
    rows = [models.prompt(length, seed) for seed, length in enumerate((40, 23, 31))]
    for lengths, refresh_every, evict_after in ((1, 1, 1), (3, 4, 8)):
        settings = SETTINGS | {"refresh_every": refresh_every, "evict_after": evict_after}
        run = models.decode(runner, rows[:lengths], 64, inertia_fx.InertiaCache(inertia_fx.Config(**settings)))
        for index, row in enumerate(rows[:lengths]):
            expect = reference.decode(model, row, 64, **settings)
            assert run.retained[index] == expect.retained
            assert run.tokens[index] == expect.tokens


@pytest.mark.xdist_group("inductor")
def test_half_precision_decodes_as_eager_does() -> None:
    """bf16 rounds differently in a fused loop: compared by teacher-forced logits, and by what is retained."""
    model, runner = compiled(torch.bfloat16)
    row = models.prompt(60)
    forced = models.prompt(30, 9)
    traces = []
    for run in (inertia_fx.compile(model, backend="eager"), runner):
        cache = inertia_fx.InertiaCache(inertia_fx.Config(**SETTINGS))
        trace = []
        with torch.no_grad():
            run(torch.tensor([row]), past_key_values=cache)
            for token in forced:
                logits = run(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].float()
                trace.append((logits, set(cache.retained_positions()[0].tolist())))
        traces.append(trace)
    same = sum(len(a & b) / len(a | b) for (_, a), (_, b) in zip(*traces, strict=True)) / len(forced)
    assert same > 0.8
    first, second = traces[0][0][0], traces[1][0][0]
    assert (first - second).abs().max() < 0.05 * first.abs().max()


@pytest.mark.parametrize(
    "settings", [{"scorer": "vnorm"}, {"scorer": "entropy", "options": {"freezing": True}}], ids=str
)
def test_scorers_same_as_reference(settings: dict[str, Any]) -> None:
    model = models.llama(layers=1)
    row = models.prompt(40)
    run = models.decode(inertia_fx.compile(model, **SETTINGS, **settings), [row], 64)
    expect = reference.decode(model, row, 64, **SETTINGS, scorer=settings["scorer"])
    assert run.retained[0] == expect.retained
    assert run.tokens[0] == expect.tokens
