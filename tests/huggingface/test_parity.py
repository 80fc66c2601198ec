"""The compiled graph against the literal reference: the same retained positions at every step, the same tokens."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx.verify import reference
from tests.common import models

STEPS = 64
SCHEDULES = {"full": 1, "lazy4": 4, "score_free": None}


@functools.cache
def compiled(layers: int, groups: int, backend: str) -> Any:
    """One compiled model for all schedules: they differ in what the host does, and share the graphs."""
    return inertia_fx.compile(models.cached_llama(layers, 4, 4 // groups), backend=backend)


@functools.cache
def expected(
    layers: int, groups: int, row: tuple[int, ...], settings: tuple[tuple[str, Any], ...]
) -> reference.DecodeRecord:
    return reference.decode(models.cached_llama(layers, 4, 4 // groups), list(row), STEPS, **dict(settings))


def check(layers: int, groups: int, backend: str, lengths: list[int], settings: dict[str, Any]) -> None:
    rows = [models.prompt(length, seed) for seed, length in enumerate(lengths)]
    cache = inertia_fx.InertiaCache(inertia_fx.Config(**settings))
    run = models.decode(compiled(layers, groups, backend), rows, STEPS, cache)
    for index, row in enumerate(rows):
        want = expected(layers, groups, tuple(row), tuple(settings.items()))
        assert cache.budget[index] == want.budget
        assert run.retained[index] == want.retained
        assert run.tokens[index] == want.tokens
        for got, exact in zip(run.momentum[index], want.momentum, strict=True):
            torch.testing.assert_close(got, torch.tensor(exact), rtol=1e-4, atol=1e-5)


SQUARE, OBLIQUE = [(1, 1), (2, 2), (4, 4)], [(1, 2), (1, 4), (2, 1), (2, 4), (4, 1), (4, 2)]


# Every combination on three shapes and, as AOTAutograd's tracing takes several times as long as the steps do, on three
# more of aot_eager; on the other shapes the hardest one.
@pytest.mark.parametrize(
    ("layers", "groups", "backend", "schedule", "evict_after", "lengths"),
    [
        (*shape, backend, schedule, evict_after, lengths)
        for backend, shapes in (("eager", SQUARE), ("aot_eager", [(1, 4), (2, 2), (4, 1)]))
        for shape in shapes
        for schedule in SCHEDULES
        for evict_after in (1, 8)
        for lengths in ([40], [40, 23, 31])
    ]
    + [(*shape, "eager", "lazy4", 8, [40, 23, 31]) for shape in OBLIQUE],
)
def test_same_as_reference(
    layers: int, groups: int, backend: str, schedule: str, evict_after: int, lengths: list[int]
) -> None:
    settings = {
        "ratio": 0.7, "min_budget": 5, "refresh_every": SCHEDULES[schedule], "evict_after": evict_after,
    }  # fmt: skip
    check(layers, groups, backend, lengths, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": "cumulative"},
        {"aggregator": "single_step"},
        {"alpha": 0.0},
        {"alpha": 0.99},
        {"scorer": "vnorm"},
        {"scorer": "entropy"},
        {"alpha_time": 0.9, "alpha_layer": 0.95},
        {"alpha_time": 0.0, "alpha_layer": 1.0},
        {"alpha_time": 0.5, "alpha_layer": 0.0},
        {"alpha_layer": 0.3},
        {"alpha": 0.95, "alpha_layer": 0.0},
        {"protect_first": 2, "protect_recent": 3},
        {"protect_first": 2, "protect_recent": 3, "evict_after": 4},
        {"evict_after": 4, "pool_width": 5},
        {"evict_after": 1, "pool_width": 9, "refresh_every": 4},
        {"min_budget": 64},
        {"min_budget": 64, "pool_width": 3, "evict_after": 2},
        {"ratio": 0.0},
        {"min_budget": 1, "ratio": 0.99},
    ],
    ids=str,
)
def test_every_option_same_as_reference(settings: dict[str, Any]) -> None:
    check(2, 2, "eager", [40, 9, 70], {"ratio": 0.7, "min_budget": 5} | settings)


@pytest.mark.parametrize("budget", [1, 2, 30, 39, 40, 41, 75, 10**9])
def test_absolute_budgets(budget: int) -> None:
    check(2, 2, "eager", [40, 23], {"budget": budget, "evict_after": 2})


@pytest.mark.parametrize("length", [1, 2, 3, 12, 20, 21])
@pytest.mark.parametrize("min_budget", [1, 16])
def test_short_prompts(length: int, min_budget: int) -> None:
    check(2, 2, "eager", [length], {"ratio": 0.9, "min_budget": min_budget})


def test_a_budget_that_is_never_reached_gives_the_uncompressed_model() -> None:
    model = models.cached_llama(2, 4, 2)
    row = models.prompt(30)
    cache = inertia_fx.InertiaCache(inertia_fx.Config(budget=10**9))
    run = models.decode(compiled(2, 2, "eager"), [row], STEPS, cache)
    assert run.retained[0][-1] == list(range(30 + STEPS))
    full = model.generate(torch.tensor([row]), max_new_tokens=STEPS + 1, do_sample=False, pad_token_id=0)
    assert run.tokens[0] == full[0, 30:].tolist()
    logits = model(full[:, :-1]).logits[0, 30:]
    torch.testing.assert_close(torch.stack(run.logits[0]), logits, rtol=1e-4, atol=1e-4)


def test_outputs_up_to_the_first_eviction_are_those_of_the_uncompressed_model() -> None:
    model = models.cached_llama(2, 4, 2)
    row = models.prompt(30)
    cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=0.9, min_budget=1, evict_after=5))
    run = models.decode(compiled(2, 2, "eager"), [row], 7, cache)
    text = torch.tensor([row + run.tokens[0][:-1]])
    logits = model(text).logits[0, 30:]
    torch.testing.assert_close(torch.stack(run.logits[0][:5]), logits[:5], rtol=1e-4, atol=1e-4)
    assert (run.logits[0][5] - logits[5]).abs().max() > 1e-2


@pytest.mark.parametrize("evict_after", [1, 3])
@pytest.mark.parametrize("pool_width", [1, 3])
def test_second_turn_same_as_reference(evict_after: int, pool_width: int) -> None:
    model = models.cached_llama(2, 4, 2)
    settings = {"ratio": 0.7, "min_budget": 5, "evict_after": evict_after, "pool_width": pool_width}
    cache = inertia_fx.InertiaCache(inertia_fx.Config(**settings))
    expect = reference.Reference(model, **settings)
    for turn, length in enumerate((40, 11, 25)):
        ids = models.prompt(length, seed=turn)
        run = models.decode(compiled(2, 2, "eager"), [ids], 20, cache)
        logits = expect.prompt(ids)
        for step in range(20):
            token = int(logits.argmax())
            assert run.tokens[0][step] == token
            logits = expect.step(token)
            assert run.retained[0][step] == expect.positions
        assert cache.budget == [expect.budget()]
        assert cache.get_seq_length() == expect.seen
