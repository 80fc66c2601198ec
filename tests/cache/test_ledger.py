"""Host counting alone: no tensors, no cache."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inertia_fx import Config
from inertia_fx.cache.ledger import GROWTH, Compaction, Extension, Ledger, Phase


def prompted(*real: int) -> Ledger:
    return Ledger().add_prompt(max(real), real)


def test_an_empty_ledger() -> None:
    ledger = Ledger()
    assert (ledger.phase, ledger.rows, ledger.seen, ledger.capacity) == (Phase.EMPTY, 0, 0, 0)
    assert ledger.budgets(Config()) == ()


def test_a_prompt_counts_real_tokens_per_row_and_columns_for_all() -> None:
    ledger = Ledger().add_prompt(10, [10, 7])
    assert ledger == Ledger(Phase.PREFILL, 10, 0, 10, (10, 7), (10, 7), (0, 0), (False, False))
    assert ledger.rows == 2
    assert not ledger.is_dense and not ledger.is_uniform
    assert prompted(4, 4).is_dense and prompted(4, 4).is_uniform
    assert prompted(4).add_prompt(3, [2]) == Ledger(Phase.PREFILL, 7, 0, 7, (6,), (6,), (0,), (False,))


def test_budgets_are_the_configs() -> None:
    assert prompted(1000, 40).budgets(Config(ratio=0.9, min_budget=8)) == (100, 8)
    assert prompted(1000, 40).budgets(Config(budget=5)) == (5, 5)


def test_columns_become_slots_with_room_for_the_steps_before_the_first_eviction() -> None:
    ledger, more = prompted(10, 7).to_slots(Config(budget=5, evict_after=3))
    assert more == Extension(room=3, limits=(13, 13), full=(True, True))
    assert (ledger.phase, ledger.capacity, ledger.open) == (Phase.DECODE, 13, (13, 10))
    assert (ledger.live, ledger.seen, ledger.steps) == ((10, 7), 10, 0)


def test_the_first_eviction_keeps_the_budget_in_budget_and_one_slots() -> None:
    config = Config(ratio=0.5, min_budget=3)
    first = prompted(40, 10).to_slots(config)[0].add_step(config)
    assert first.compaction == Compaction(keep=(20, 5), limits=(21, 6), capacity=21)
    assert first.pooled is None and first.extension is None
    assert (first.ledger.live, first.ledger.open, first.ledger.capacity) == ((20, 5), (21, 6), 21)
    assert first.ledger.evicting == (True, True)
    second = first.ledger.add_step(config)
    assert (second.compaction, second.extension, second.pooled) == (None, None, None)
    assert second.ledger == dataclasses.replace(first.ledger, seen=42, steps=2)


def test_nothing_is_evicted_before_its_step() -> None:
    config = Config(budget=4, evict_after=3, pool_width=3)
    ledger = prompted(10).to_slots(config)[0]
    for live in (11, 12):
        result = ledger.add_step(config)
        ledger = result.ledger
        assert (result.pooled, result.compaction, result.extension) == (None, None, None)
        assert (ledger.live, ledger.capacity, ledger.evicting) == ((live,), 13, (False,))
    result = ledger.add_step(config)
    assert result.pooled == (True,)
    assert result.compaction == Compaction(keep=(4,), limits=(5,), capacity=5)
    assert result.ledger.live == (4,)
    assert result.ledger.add_step(config).pooled is None


def test_a_row_that_fills_up_pools_at_its_own_first_eviction() -> None:
    config = Config(budget=6, pool_width=3)
    ledger, pooled = prompted(4).to_slots(config)[0], []
    for _ in range(5):
        result = ledger.add_step(config)
        ledger = result.ledger
        pooled.append(result.pooled)
    assert pooled == [None, None, (True,), None, None]


def test_a_row_below_its_budget_gets_slots_in_buckets() -> None:
    config = Config(budget=200)
    ledger = prompted(30).to_slots(config)[0]
    capacities, extensions = [], []
    for _ in range(300):
        result = ledger.add_step(config)
        ledger = result.ledger
        capacities.append(ledger.capacity)
        if result.extension is not None:
            extensions.append(result.extension)
            assert ledger.open == result.extension.limits
    assert capacities == [64] * 33 + [128] * 64 + [192] * 64 + [201] * 139
    assert extensions == [
        Extension(64, (128,), (True,)), Extension(64, (192,), (True,)), Extension(9, (201,), (True,)),
    ]  # fmt: skip
    assert ledger.live == (200,)


def test_large_rows_grow_by_an_eighth() -> None:
    config = Config(budget=10**9)
    ledger = prompted(8000).to_slots(config)[0]
    result = ledger.add_step(config)
    assert result.compaction == Compaction((8001,), (8064,), 8064)
    while result.extension is None:
        result = result.ledger.add_step(config)
    assert result.extension == Extension(room=1008, limits=(9072,), full=(True,))


def test_slots_become_columns_again_as_wide_as_the_longest_row() -> None:
    config = Config(ratio=0.5, min_budget=3)
    ledger = prompted(40, 10).to_slots(config)[0].add_step(config).ledger
    columns = ledger.to_columns()
    assert (columns.phase, columns.capacity, columns.live, columns.seen) == (Phase.PREFILL, 20, (20, 5), 41)
    later = columns.add_prompt(6, [6, 2])
    assert (later.capacity, later.live, later.prompt, later.steps) == (26, (26, 7), (46, 12), 0)
    assert later.evicting == (False, False)
    assert later.budgets(config) == (23, 6)


def test_selected_rows_carry_their_counts_and_let_go_of_what_only_others_needed() -> None:
    config = Config(ratio=0.5, min_budget=3)
    columns = prompted(40, 10, 20)
    assert columns.select([2, 2, 0]) == prompted(20, 20, 40)
    assert columns.select([1]).trim(config).capacity == 40  # columns stay where they are
    ledger = columns.to_slots(config)[0].add_step(config).ledger
    selected = ledger.select([1, 2])
    assert (selected.live, selected.open, selected.prompt) == ((5, 10), (6, 11), (10, 20))
    assert (selected.capacity, selected.trim(config).capacity) == (21, 11)
    assert ledger.trim(config) == ledger
    waiting = columns.to_slots(Config(budget=3, evict_after=2))[0].add_step(Config(budget=3, evict_after=2)).ledger
    assert waiting.select([1]).trim(Config(budget=3, evict_after=2)).capacity == 42  # holes are closed when it compacts


def test_a_ledger_is_not_changed_by_what_follows() -> None:
    config = Config(budget=5)
    ledger = prompted(10, 7)
    copy = dataclasses.replace(ledger)
    ledger.add_prompt(3, [3, 3]).to_slots(config)[0].add_step(config).ledger.select([0]).trim(config).to_columns()
    assert ledger == copy
    with pytest.raises(dataclasses.FrozenInstanceError):
        ledger.seen = 3  # type: ignore[misc]


events = st.lists(
    st.one_of(
        st.integers(1, 40).map(lambda steps: ("steps", steps)),
        st.lists(st.integers(1, 200), min_size=4, max_size=4).map(lambda real: ("prompt", real)),
        st.lists(st.integers(0, 3), min_size=1, max_size=4).map(lambda rows: ("select", rows)),
    ),
    max_size=8,
)


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    events=events,
    budget=st.one_of(st.none(), st.integers(1, 300)),
    evict_after=st.integers(1, 5),
    pool_width=st.sampled_from([1, 3]),
)
def test_what_holds_after_any_event(
    lengths: list[int], events: list[Any], budget: int | None, evict_after: int, pool_width: int
) -> None:
    kept: dict[str, Any] = {"ratio": 0.6, "min_budget": 3} if budget is None else {"budget": budget}
    config = Config(**kept, evict_after=evict_after, pool_width=pool_width)
    ledger = prompted(*lengths)
    prompt, seen, steps = list(lengths), max(lengths), 0
    for kind, value in events:
        if kind == "steps":
            if ledger.phase is Phase.PREFILL:
                ledger, more = ledger.to_slots(config)
                assert more.limits == (ledger.capacity,) * ledger.rows
            for _ in range(value):
                before, result = ledger, ledger.add_step(config)
                ledger, seen, steps = result.ledger, seen + 1, steps + 1
                _check_step(config, before, ledger, result, steps)
        elif kind == "prompt":
            real = value[: ledger.rows]
            if ledger.phase is Phase.DECODE:
                ledger = ledger.to_columns()
                assert ledger.capacity == max(ledger.live)
            ledger = ledger.add_prompt(max(real), real)
            prompt, seen, steps = [old + new for old, new in zip(prompt, real, strict=True)], seen + max(real), 0
            assert ledger.phase is Phase.PREFILL and not any(ledger.evicting)
        else:
            rows = [row % ledger.rows for row in value]
            ledger, prompt = ledger.select(rows).trim(config), [prompt[row] for row in rows]
            if ledger.phase is Phase.DECODE and steps >= evict_after:
                assert ledger.capacity == max(ledger.open)
        assert (ledger.seen, ledger.steps, ledger.prompt) == (seen, steps, tuple(prompt))
        assert len(ledger.live) == len(ledger.open) == len(ledger.evicting) == ledger.rows == len(prompt)
        assert all(0 < live <= ledger.capacity for live in ledger.live)


def _check_step(config: Config, before: Ledger, ledger: Ledger, result: Any, steps: int) -> None:
    budgets = ledger.budgets(config)
    assert (result.compaction is not None) == (steps == config.evict_after)
    for row, budget in enumerate(budgets):
        live = before.live[row] + 1
        assert ledger.live[row] == (min(live, budget) if steps >= config.evict_after else live)
        assert ledger.evicting[row] == (before.evicting[row] or (steps >= config.evict_after and live > budget))
        # The next token always has a slot: a free one, or that of the token which was chosen to go.
        assert ledger.live[row] < ledger.open[row] <= ledger.capacity or steps < config.evict_after
        assert live <= before.open[row]
        if result.pooled is not None:
            assert result.pooled[row] == (ledger.evicting[row] and not before.evicting[row])
    if result.pooled is not None:
        assert config.pool_width > 1 and any(result.pooled)
    if steps >= config.evict_after:
        largest = max(budgets) + 1
        assert ledger.capacity <= largest
        # At most one bucket, or an eighth, more than the fullest row needs.
        assert ledger.capacity <= (max(ledger.live) + 1 + GROWTH) * 9 // 8
        if result.extension is not None:
            grown = result.compaction.capacity if result.compaction else before.capacity
            assert ledger.capacity == grown + result.extension.room
            assert result.extension.limits == ledger.open
