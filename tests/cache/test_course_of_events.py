"""Prompts, steps and failures of a slot cache in any order, beside plain dictionaries."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inertia_fx import Config
from tests.cache.driven import Driven, ListRow

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
