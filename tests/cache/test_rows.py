"""Rows of a slot cache that are reordered, doubled and dropped, also through what transformers calls."""

from __future__ import annotations

import math

import pytest
import torch

from inertia_fx import Config, InertiaCache, errors
from inertia_fx.cache import Phase, SlotCache
from tests.cache.driven import SLOT_BYTES, Driven


def driven(config: Config, lengths: list[int]) -> tuple[Driven, InertiaCache]:
    cache = InertiaCache(config)
    return Driven(config, lengths, cache), cache


def test_select_rows_carries_everything() -> None:
    run, cache = driven(Config(ratio=0.5, min_budget=3), [12, 20])
    for _ in range(3):
        run.step(lambda row, position: math.sin(position * (row + 1)))
    before, momentum = run.retained, [row.tolist() for row in run.cache.momentum]
    address = run.cache.layers[0].keys.data_ptr()
    cache.reorder_cache(torch.tensor([1, 0]))
    assert run.cache.layers[0].keys.data_ptr() == address
    assert run.retained == before[::-1]
    assert [row.tolist() for row in run.cache.momentum] == momentum[::-1]
    assert run.cache.budget == [10, 6]
    run.lengths = run.lengths[::-1]
    run.step(lambda row, position: math.sin(position * (2 - row)))
    straight = Driven(Config(ratio=0.5, min_budget=3), [12, 20])
    for _ in range(4):
        straight.step(lambda row, position: math.sin(position * (row + 1)))
    assert run.retained == straight.retained[::-1]
    cache.batch_repeat_interleave(2)
    assert run.cache.rows == 4
    assert run.retained == [row for row in straight.retained[::-1] for _ in range(2)]
    cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert run.retained == straight.retained[::-1]
    cache.batch_select_indices(torch.tensor([1]))
    assert run.retained == [straight.retained[0]]


def test_storage_shrinks_with_the_row_that_needed_it() -> None:
    run, cache = driven(Config(ratio=0.5, min_budget=3), [40, 10])
    for _ in range(3):
        run.step(lambda row, position: math.sin(position))
    assert run.cache.nbytes == 2 * 21 * SLOT_BYTES
    short = run.retained[1]
    cache.batch_select_indices(torch.tensor([1]))
    assert run.cache.nbytes == 6 * SLOT_BYTES
    assert run.retained == [short]
    run.lengths = run.lengths[1:]
    run.step(lambda row, position: math.sin(position))
    assert run.cache.nbytes == 6 * SLOT_BYTES
    straight = Driven(Config(ratio=0.5, min_budget=3), [10])
    for _ in range(4):
        straight.step(lambda row, position: math.sin(position))
    assert run.retained == straight.retained


def test_rows_of_a_slot_cache_are_selected_at_any_time() -> None:
    """In columns, in slots, before and after the first eviction: what a row is does not depend on its neighbours."""
    config = Config(budget=6, evict_after=3)
    run = Driven(config, [12, 4, 20])
    run.cache.select_rows(torch.tensor([2, 1]))
    assert run.cache.phase is Phase.PREFILL
    assert run.retained == [list(range(20)), list(range(4))]
    run.lengths = [20, 4]
    for number in range(1, 6):
        run.step(lambda row, position: position % 5)
        run.cache.select_rows(torch.tensor([1, 0]))
        run.lengths = run.lengths[::-1]
        straight = Driven(config, [20, 4])
        for _ in range(number):
            straight.step(lambda row, position: position % 5)
        assert run.retained == (straight.retained[::-1] if number % 2 else straight.retained)


def test_rows_may_be_selected_from_an_empty_cache_but_one_must_stay() -> None:
    cache = SlotCache(Config())
    cache.select_rows(torch.tensor([3]))
    assert cache.rows == 0
    run = Driven(Config(), [4, 4])
    with pytest.raises(errors.CacheError, match=r"No row would stay in the cache: call cache\.reset\(\)"):
        run.cache.select_rows(torch.tensor([], dtype=torch.int64))
    assert run.retained == [[0, 1, 2, 3]] * 2
    with pytest.raises(errors.CacheError, match="inside another step"), run.cache.step(2):
        run.cache.select_rows(torch.tensor([0, 1]))
    with pytest.raises(errors.CacheError, match="inside another prompt"), run.cache.prompt(2, 1):
        run.cache.reset()
    run.step()
    assert run.retained == [[0, 1, 2, 3, 4]] * 2
