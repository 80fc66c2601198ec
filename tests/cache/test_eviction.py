"""The first eviction: which tokens stay, by momentum and position."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inertia_fx.cache import RetentionState, eviction


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
    keys = eviction._sortable(torch.tensor([values], dtype=torch.float32), torch.tensor([positions]))[0].tolist()
    order = sorted(range(len(values)), key=lambda slot: (values[slot], positions[slot]))
    assert sorted(range(len(values)), key=keys.__getitem__) == order
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(("keep", "protected", "expect"), [(2, 0, [1, 3]), (3, 0, [1, 3, 0]), (1, 1, [2])])
def test_tokens_whose_momentum_is_not_a_number_go_first(keep: int, protected: int, expect: list[int]) -> None:
    momentum = torch.tensor([[math.nan, 0.5, math.nan, 0.1, -math.inf]])
    positions = torch.tensor([[3, 1, 0, 2, -1]])
    state = RetentionState(momentum, positions, torch.tensor([4]), torch.tensor([4]))
    assert eviction.survivors(state, [keep], protected, 0).tolist() == [expect]
