"""The slot cache: storage in bytes, counts on the host, rows, growth. No transformers, no compile (kernels run eagerly)."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inertia_fx import Config, errors
from inertia_fx.cache import SlotCache
from inertia_fx.cache import storage as slots

LAYERS, HEADS, WIDTH = 2, 2, 4
SLOT_BYTES = LAYERS * 2 * HEADS * WIDTH * 4


def columns(tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that say which token they belong to, [B, N, T, D], and values that are their negation."""
    key = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, WIDTH).contiguous()
    return key, -key


class Driven:
    """A SlotCache driven without a model: the key of the token at position p is p, scores are handed in."""

    def __init__(self, config: Config, lengths: list[int]) -> None:
        self.cache = SlotCache(config)
        self.lengths = [0] * len(lengths)
        self.prompt(lengths)

    def prompt(self, lengths: list[int]) -> None:
        width = max(lengths)
        padding = torch.tensor([[column >= width - length for column in range(width)] for length in lengths])
        tokens = [
            [before + column - (width - length) for column in range(width)]
            for before, length in zip(self.lengths, lengths, strict=True)
        ]
        with self.cache.prompt(len(lengths), width, None if bool(padding.all()) else padding):
            for layer in range(LAYERS):
                self.cache.update(*columns(tokens), layer)
        self.lengths = [before + length for before, length in zip(self.lengths, lengths, strict=True)]

    def step(self, scores: Any = None) -> None:
        """One decode step; `scores(row, position)` is added to the momentum as the passes would."""
        cache = self.cache
        with cache.step(len(self.lengths)):
            entry = cache.enter()
            for layer in range(LAYERS):
                keys, values = cache.update(*columns([[length] for length in self.lengths]), layer)
            for row, positions in enumerate(entry.positions.tolist()):
                for slot, position in enumerate(positions):
                    if position >= 0:
                        assert keys[row, 0, slot, 0] == position == -values[row, 1, slot, 3]
            momentum = entry.momentum
            if scores is not None:
                momentum = momentum.clone()
                for row, positions in enumerate(entry.positions.tolist()):
                    for slot, position in enumerate(positions):
                        if position >= 0:
                            momentum[row, slot] = scores(row, position)
            cache.leave(dataclasses.replace(entry, momentum=momentum))
        self.lengths = [length + 1 for length in self.lengths]

    @property
    def retained(self) -> list[list[int]]:
        return [positions.tolist() for positions in self.cache.retained_positions()]


def test_storage_is_the_budget_and_one() -> None:
    run = Driven(Config(ratio=0.9, min_budget=1), [1000])
    assert run.cache.nbytes == 1000 * SLOT_BYTES
    for _ in range(3):
        run.step(lambda row, position: position)
        assert run.cache.nbytes == 101 * SLOT_BYTES
        assert run.cache.slots == 101
        assert run.cache.budget == [100]
    assert run.retained == [list(range(903, 1003))]
    assert run.cache.get_seq_length() == 1003


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


def test_select_rows_carries_everything() -> None:
    run = Driven(Config(ratio=0.5, min_budget=3), [12, 20])
    for _ in range(3):
        run.step(lambda row, position: math.sin(position * (row + 1)))
    before, momentum = run.retained, [row.tolist() for row in run.cache.momentum]
    address = run.cache.layers[0].keys.data_ptr()
    run.cache.reorder_cache(torch.tensor([1, 0]))
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
    run.cache.batch_repeat_interleave(2)
    assert run.cache.rows == 4
    assert run.retained == [row for row in straight.retained[::-1] for _ in range(2)]
    run.cache.batch_select_indices(torch.tensor([True, False, False, True]))
    assert run.retained == straight.retained[::-1]
    run.cache.batch_select_indices(torch.tensor([1]))
    assert run.retained == [straight.retained[0]]


def test_storage_shrinks_with_the_row_that_needed_it() -> None:
    run = Driven(Config(ratio=0.5, min_budget=3), [40, 10])
    for _ in range(3):
        run.step(lambda row, position: math.sin(position))
    assert run.cache.nbytes == 2 * 21 * SLOT_BYTES
    short = run.retained[1]
    run.cache.batch_select_indices(torch.tensor([1]))
    assert run.cache.nbytes == 6 * SLOT_BYTES
    assert run.retained == [short]
    run.lengths = run.lengths[1:]
    run.step(lambda row, position: math.sin(position))
    assert run.cache.nbytes == 6 * SLOT_BYTES
    straight = Driven(Config(ratio=0.5, min_budget=3), [10])
    for _ in range(4):
        straight.step(lambda row, position: math.sin(position))
    assert run.retained == straight.retained


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
    before = run.retained, [row.tolist() for row in run.cache.momentum], run.cache.get_seq_length()

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
    assert (run.retained, [row.tolist() for row in run.cache.momentum], run.cache.get_seq_length()) == before
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
    assert cache.get_seq_length() == 0


events = st.lists(
    st.one_of(st.integers(1, 12), st.just("step"), st.just("step"), st.just("step"), st.just("fail")), max_size=12
)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    events=events,
    evict_after=st.integers(1, 4),
    budget=st.one_of(st.none(), st.integers(1, 40)),
    pool_width=st.sampled_from([1, 3]),
    protect=st.sampled_from([(0, 0), (1, 0), (0, 1)]),
    seed=st.integers(0, 1000),
)
def test_any_course_of_events_is_that_of_a_plain_list(
    lengths: list[int],
    events: list[Any],
    evict_after: int,
    budget: int | None,
    pool_width: int,
    protect: Any,
    seed: int,
) -> None:
    """Prompts of unequal rows, steps, failing steps and prompts, in any order: retained positions are a list model's."""
    config = Config(
        **({"ratio": 0.6, "min_budget": 3} if budget is None else {"budget": budget}),
        evict_after=evict_after, pool_width=pool_width, protect_first=protect[0], protect_recent=protect[1],
    )  # fmt: skip
    run = Driven(config, lengths)
    rows = [ListRow(config, protect) for _ in lengths]
    for row, length in zip(rows, lengths, strict=True):
        row.prompt(length)

    def score(row: int, position: int) -> float:
        # Few distinct values, so that ties occur; they change from step to step.
        return float((position * 7919 + row * 104729 + rows[row].t * 31 + seed) % 11) / 8

    for event in events:
        if event == "fail":
            for body in (lambda: run.cache.step(len(rows)), lambda: run.cache.prompt(len(rows), 3)):
                with pytest.raises(KeyError), body():
                    raise KeyError
        elif event == "step":
            for row in rows:
                row.t += 1
            run.step(score)
            for index, row in enumerate(rows):
                row.step(lambda position, index=index: score(index, position))
        else:
            new = [1 + (event + index * 5) % 12 for index in range(len(rows))]
            run.prompt(new)
            for row, length in zip(rows, new, strict=True):
                row.prompt(length)
        assert run.retained == [sorted(row.momentum) for row in rows]
        assert run.cache.budget == [row.budget for row in rows]
        for got, row in zip(run.cache.momentum, rows, strict=True):
            assert got.tolist() == pytest.approx([row.momentum[position] for position in sorted(row.momentum)])
        if all(row.t >= evict_after for row in rows):
            largest = max(row.budget for row in rows) + 1
            assert run.cache.slots <= largest


class ListRow:
    """One row as a dictionary from position to momentum."""

    def __init__(self, config: Config, protect: tuple[int, int]) -> None:
        self.config, self.protect = config, protect
        self.momentum: dict[int, float] = {}
        self.seen = self.length = self.t = 0
        self.pooled = False

    @property
    def budget(self) -> int:
        return self.config.budget_of(self.length)

    def mean(self) -> float:
        return math.fsum(self.momentum.values()) / len(self.momentum) if self.momentum else 0.0

    def prompt(self, length: int) -> None:
        mean = self.mean()
        self.momentum |= {self.seen + index: mean for index in range(length)}
        self.seen, self.length, self.t, self.pooled = self.seen + length, self.length + length, 0, False

    def step(self, score: Any) -> None:
        self.momentum[self.seen] = 0.0
        self.momentum = {position: score(position) for position in self.momentum}
        self.seen += 1
        if self.t < self.config.evict_after or len(self.momentum) <= self.budget:
            return
        if not self.pooled:
            self.pooled, order, reach = True, sorted(self.momentum), self.config.pool_width // 2
            values = [self.momentum[position] for position in order]
            self.momentum = {
                position: max(values[max(0, place - reach) : place + reach + 1]) for place, position in enumerate(order)
            }
        while len(self.momentum) > self.budget:
            loose = [p for p in self.momentum if self.protect[0] <= p < self.seen - self.protect[1]]
            del self.momentum[min(loose, key=lambda position: (self.momentum[position], position))]


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.floats(width=32, allow_nan=False), st.sampled_from([0.0, -0.0, math.inf, -math.inf, 0.25, 1e-45])),
        min_size=1,
        max_size=20,
    ),
    data=st.data(),
)
def test_one_integer_orders_as_momentum_and_position_do(values: list[float], data: Any) -> None:
    positions = data.draw(st.permutations([*range(len(values) - 1), 2**31 - 2]))
    keys = slots._sortable(torch.tensor([values], dtype=torch.float32), torch.tensor([positions]))[0].tolist()
    order = sorted(range(len(values)), key=lambda slot: (values[slot], positions[slot]))
    assert sorted(range(len(values)), key=keys.__getitem__) == order
    assert len(set(keys)) == len(keys)


def test_columns_of_numbers() -> None:
    like = torch.zeros(1)
    assert slots.column([3, 3], like).tolist() == [[3], [3]]
    assert slots.column([3, 4], like).tolist() == [[3], [4]]
    assert slots.column([3, 3], like).dtype == slots.column([3, 4], like).dtype == torch.int64
    assert slots.column([True, True], like).dtype == slots.column([True, False], like).dtype == torch.bool


@pytest.mark.parametrize(("keep", "protected", "expect"), [(2, 0, [1, 3]), (3, 0, [1, 3, 0]), (1, 1, [2])])
def test_tokens_whose_momentum_is_not_a_number_go_first(keep: int, protected: int, expect: list[int]) -> None:
    momentum = torch.tensor([[math.nan, 0.5, math.nan, 0.1, -math.inf]])
    positions = torch.tensor([[3, 1, 0, 2, -1]])
    state = slots.RetentionState(momentum, positions, torch.tensor([4]), torch.tensor([4]))
    assert slots.survivors(state, [keep], protected, 0).tolist() == [expect]
