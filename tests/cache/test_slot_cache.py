"""The slot cache, driven: storage in bytes, growth, what is refused. No transformers, no compile (kernels run eagerly)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from inertia_fx import Config, errors
from inertia_fx.cache import Phase, SlotCache, eviction, storage
from tests.cache.driven import HEADS, LAYERS, SLOT_BYTES, WIDTH, Driven, columns


def test_storage_is_the_budget_and_one() -> None:
    run = Driven(Config(ratio=0.9, min_budget=1), [1000])
    assert run.cache.nbytes == 1000 * SLOT_BYTES
    for _ in range(3):
        run.step(lambda row, position: position)
        assert run.cache.nbytes == 101 * SLOT_BYTES
        assert run.cache.slots == 101
        assert run.cache.budget == [100]
    assert run.retained == [list(range(903, 1003))]
    assert run.cache.seen == 1003


def test_storage_before_the_first_eviction_is_prompt_and_steps() -> None:
    run = Driven(Config(ratio=0.5, min_budget=1, evict_after=4), [100])
    for step in range(1, 7):
        run.step()
        assert run.cache.nbytes == (104 if step < 4 else 51) * SLOT_BYTES
        assert [len(row) for row in run.retained] == [100 + step if step < 4 else 50]


def test_a_view_of_something_larger_is_not_kept_alive() -> None:
    cache = SlotCache(Config())
    fused = torch.randn(1, HEADS * 3, 10, WIDTH)
    with cache.prompt(1, 10):
        for layer in range(LAYERS):
            cache.update(fused[:, :HEADS], fused[:, HEADS : 2 * HEADS], layer)
    assert cache.nbytes == 10 * SLOT_BYTES


@pytest.mark.parametrize("budget", [10**9, 200])
def test_a_large_budget_fills_up_in_buckets(budget: int) -> None:
    run = Driven(Config(budget=budget), [30])
    sizes = []
    for step in range(300):
        run.step(lambda row, position: position)
        sizes.append(run.cache.slots)
        assert run.retained == [list(range(max(0, 31 + step - budget), 31 + step))]
    assert len(set(sizes)) <= 6
    assert sizes[0] == 64
    assert sizes[-1] <= min(budget + 1, 448)


def test_rows_of_unequal_length_have_their_own_budget_and_closed_slots() -> None:
    run = Driven(Config(ratio=0.5, min_budget=3), [40, 10, 2])
    assert run.cache.budget == [20, 5, 3]
    for _ in range(8):
        run.step(lambda row, position: -position)
        assert run.cache.slots == 21
        closed = (run.cache.state.momentum == math.inf).sum(-1).tolist()
        assert closed == [0, 21 - 6, 21 - 4]
    assert run.retained == [list(range(20)), list(range(5)), [0, 1, 2]]


def test_ties_let_the_oldest_go_at_once_and_step_by_step() -> None:
    run = Driven(Config(budget=5), [20])
    for step in range(10):
        run.step(lambda row, position: 0.5)
        assert run.retained == [list(range(16 + step, 21 + step))]


def test_protected_tokens_stay() -> None:
    run = Driven(Config(budget=8, protect_first=2, protect_recent=3), [20])
    for step in range(40):
        run.step(lambda row, position: 1.0 if 5 <= position < 11 else 0.1)
        newest = 20 + step
        assert {0, 1, newest, newest - 1, newest - 2} <= set(run.retained[0])
        assert len(run.retained[0]) == 8
    assert set(run.retained[0]) - {0, 1, 57, 58, 59} <= set(range(5, 11))


def test_pooling_keeps_neighbours_whole() -> None:
    run = Driven(Config(budget=6, pool_width=3, evict_after=2), [20])
    for _ in range(2):
        run.step(lambda row, position: {7: 1.0, 15: 0.9}.get(position, 0.0))
    assert run.retained == [[6, 7, 8, 14, 15, 16]]
    assert run.cache.momentum[0].tolist() == pytest.approx([1.0, 1.0, 1.0, 0.9, 0.9, 0.9])


def test_pooling_of_a_row_that_fills_up_happens_at_its_own_first_eviction() -> None:
    """Budget 6, prompt 4: the seventh token makes the row evict, pooled: 3 and 5 are saved by 4, and 0 goes, not 3."""
    run = Driven(Config(budget=6, pool_width=3), [4])
    momentum = {0: 0.2, 1: 0.3, 2: 0.4, 3: 0.1, 4: 0.9, 5: 0.1, 6: 0.5}
    for _ in range(3):
        run.step(lambda row, position: momentum[position])
    assert run.retained == [[1, 2, 3, 4, 5, 6]]


def test_contexts_exclude_each_other_and_an_empty_cache_cannot_step() -> None:
    cache = SlotCache(Config())
    with pytest.raises(errors.CacheError, match="needs a non-empty cache"), cache.step(1):
        pass
    with pytest.raises(errors.CacheError, match="The cache is empty"):
        _ = cache.state
    assert (cache.retained_positions(), cache.momentum, cache.budget, cache.nbytes) == ([], [], [], 0)
    run = Driven(Config(), [4])
    with pytest.raises(errors.CacheError, match="inside another step"), run.cache.step(1), run.cache.prompt(1, 3):
        pass
    with pytest.raises(errors.CacheError, match="does not drive it"):
        run.cache.update(*columns([[4]]), 0)
    run.step()
    assert run.retained == [[0, 1, 2, 3, 4]]


def test_a_body_that_raises_or_does_nothing_is_no_step() -> None:
    run = Driven(Config(budget=5), [12])
    run.step(lambda row, position: position % 7)
    before = run.retained, [row.tolist() for row in run.cache.momentum], run.cache.seen

    def late() -> None:
        with run.cache.step(1):
            entry = run.cache.enter()
            for layer in range(LAYERS):
                run.cache.update(*columns([run.lengths]), layer)
            run.cache.leave(entry)
            raise KeyError

    def empty() -> None:
        with run.cache.step(1):
            pass

    with pytest.raises(KeyError):
        late()
    with pytest.raises(errors.CacheError, match="ran no decode step"):
        empty()
    assert (run.retained, [row.tolist() for row in run.cache.momentum], run.cache.seen) == before
    run.step(lambda row, position: position % 7)
    straight = Driven(Config(budget=5), [12])
    for _ in range(2):
        straight.step(lambda row, position: position % 7)
    assert run.retained == straight.retained


def test_a_step_needs_a_config_and_padding_the_prompts_shape() -> None:
    cache = SlotCache()
    with pytest.raises(errors.CacheError, match=r"padding has shape \(1, 4\)"), cache.prompt(1, 5, torch.ones(1, 4)):
        pass
    with cache.prompt(1, 3):
        for layer in range(LAYERS):
            cache.update(*columns([[0, 1, 2]]), layer)
    with pytest.raises(errors.CacheError, match="make the cache with a Config"), cache.step(1):
        pass


def test_layers_that_do_not_cache_every_token_are_named() -> None:
    cache = SlotCache(Config())

    def forward() -> None:
        with cache.prompt(1, 5):
            cache.update(*columns([[0, 1, 2, 3, 4]]), 1)  # layer 0 is another layer's reader, say
            cache.layers[0].append(*columns([[0, 1, 2, 3, 4]]))
            cache.layers[1].keys = cache.layers[1].values = None

    with pytest.raises(errors.UnsupportedModelError, match="Layer 1 cached 0 tokens where 5 were expected"):
        forward()
    assert cache.nbytes == 0
    assert cache.seen == 0


def test_a_cache_goes_from_empty_to_columns_to_slots_and_back() -> None:
    cache = SlotCache(Config(budget=3))
    assert (cache.phase, cache.rows, cache.slots, cache.seen) == (Phase.EMPTY, 0, 0, 0)
    run = Driven(Config(budget=3), [6])
    assert (run.cache.phase, run.cache.columns, run.cache.slots) == (Phase.PREFILL, 6, 6)
    run.step()
    assert (run.cache.phase, run.cache.slots, run.cache.seen) == (Phase.DECODE, 4, 7)
    run.prompt([2])
    assert (run.cache.phase, run.cache.columns, run.cache.seen) == (Phase.PREFILL, 5, 9)
    run.cache.reset()
    assert (run.cache.phase, run.cache.nbytes, run.cache.seen, run.cache.rows) == (Phase.EMPTY, 0, 0, 0)


def test_a_config_tells_whether_a_step_refreshes() -> None:
    run = Driven(Config(budget=3, refresh_every=2), [6])
    seen = []
    for _ in range(4):
        seen.append(run.cache.refreshing)
        run.step()
    assert seen == [True, False, True, False]
    with pytest.raises(errors.CacheError, match="make the cache with a Config"):
        _ = SlotCache().refreshing


def test_a_prompt_that_caches_nothing_is_an_error() -> None:
    cache = SlotCache(Config())
    with pytest.raises(errors.CacheError, match="cached nothing: it must call update"), cache.prompt(1, 5):
        pass
    assert cache.phase is Phase.EMPTY


def contents(run: Driven) -> tuple[Any, ...]:
    """All that a cache holds, by value."""
    buffers = [buffer.tolist() for layer in run.cache.layers for buffer in (layer.keys, layer.values)]
    return run.cache._ledger, buffers, [tensor.tolist() for tensor in run.cache.state.tensors]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_later_prompt_that_fails_gives_the_same_buffers_back(steps: int) -> None:
    run = Driven(Config(budget=5, evict_after=2), [12])
    for _ in range(steps):
        run.step(lambda row, position: position % 7)
    before, held = contents(run), [layer.keys for layer in run.cache.layers]
    key, value = columns([[12 + steps, 13 + steps]])

    def fails() -> None:
        with run.cache.prompt(1, 2):
            run.cache.update(key, value, 0)
            raise MemoryError

    with pytest.raises(MemoryError):
        fails()
    assert contents(run) == before
    assert all(layer.keys is keys for layer, keys in zip(run.cache.layers, held, strict=True))
    run.prompt([2])
    assert run.cache.seen == 14 + steps


def test_a_prompt_whose_tokens_cannot_join_is_no_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Driven(Config(budget=5), [12])
    before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "join", fail)
        with pytest.raises(MemoryError):
            run.prompt([3])
    assert contents(run) == before


@pytest.mark.parametrize("operation", ["pool", "survivors"])
def test_a_step_that_cannot_evict_is_no_step(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph has run: momentum, positions and length are taken back with the counts."""
    run = Driven(Config(budget=5, evict_after=2, pool_width=3), [12])
    run.step(lambda row, position: position % 7)
    (_, _, state) = before = contents(run)
    with monkeypatch.context() as patch:
        patch.setattr(eviction, operation, fail)
        with pytest.raises(MemoryError):
            run.step(lambda row, position: position % 5)
    ledger, _, now = contents(run)
    assert ledger is before[0]
    assert now == state
    run.step(lambda row, position: position % 5)
    straight = Driven(Config(budget=5, evict_after=2, pool_width=3), [12])
    for modulus in (7, 5):
        straight.step(lambda row, position, modulus=modulus: position % modulus)
    assert contents(run) == contents(straight)


def test_what_a_failed_step_is_taken_back_to_compiles_as_before() -> None:
    """Its slot count is a dynamic dimension and its addresses stay, as for any other state."""
    run = Driven(Config(budget=5), [12])
    run.step()
    with pytest.raises(KeyError), run.cache.step(1):
        raise KeyError
    momentum, positions, *_ = run.cache.state.tensors
    assert momentum._dynamo_dynamic_indices == positions._dynamo_dynamic_indices == {1}
    assert all(tensor._dynamo_static_input_type == "unguarded" for tensor in run.cache.state.tensors)


def fail(*given: Any) -> Any:
    raise MemoryError
