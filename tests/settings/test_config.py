"""Settings: what is refused, with what advice; budgets and refreshes are exact."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import inertia_fx
from inertia_fx import errors
from tests.common import models


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 1.0}, r"ratio=1.0 is outside \[0, 1\)"),
        ({"ratio": -0.1}, r"ratio=-0.1 is outside \[0, 1\)"),
        ({"ratio": float("nan")}, "ratio=nan is not a finite number"),
        ({"ratio": "most"}, "ratio='most' is not a finite number"),
        ({"ratio": None}, "ratio=None is not a number"),
        ({"ratio": True}, "ratio=True is not a number"),
        ({"ratio": 0.9, "budget": 100}, "ratio=0.9 and budget=100 both say"),
        ({"budget": 0}, "budget=0 is below 1"),
        ({"budget": 2.5}, "budget=2.5 is not a whole number"),
        ({"alpha": 1.0}, r"alpha=1.0 is outside \[0, 1\)"),
        ({"alpha": -0.2}, r"alpha=-0.2 is outside \[0, 1\)"),
        ({"alpha": float("nan")}, r"alpha=nan is outside \[0, 1\)"),
        ({"alpha": "0.8"}, "alpha='0.8' is not a number"),
        ({"alpha_time": 1.0}, r"alpha_time=1.0 is outside \[0, 1\)"),
        ({"alpha_layer": 1.1}, r"alpha_layer=1.1 is outside \[0, 1\]"),
        ({"alpha_time": 0.5, "aggregator": "cumulative"}, "alpha_time belongs to aggregator='ema'"),
        ({"refresh_every": 0}, "refresh_every=0 is below 1"),
        ({"refresh_every": 1.5}, "refresh_every=1.5 is not a whole number"),
        ({"evict_after": 0}, "evict_after=0 is below 1"),
        ({"pool_width": 4}, "pool_width=4 is even.*Use 3 or 5"),
        ({"pool_width": 0}, "pool_width=0 is below 1"),
        ({"min_budget": 0}, "min_budget=0 is below 1"),
        ({"aggregator": "mean"}, "aggregator='mean' is unknown: choose one of 'ema', 'cumulative', 'single_step'"),
        ({"scorer": "keys"}, "scorer='keys' is unknown"),
        ({"protect_first": -1}, "protect_first=-1 is below 0"),
        ({"protect_first": 40, "protect_recent": 30}, "70 tokens do not fit into min_budget=64"),
        ({"budget": 3, "protect_recent": 4}, "4 tokens do not fit into budget=3"),
        ({"backend": "inductr"}, "backend='inductr' is unknown"),
        ({"backend": "eager", "options": {"freezing": True}}, "Inductor's"),
        ({"mode": "default", "options": {"freezing": True}}, "exclude each other"),
    ],
)
def test_bad_arguments(model: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message) as caught:
        inertia_fx.compile(model, **arguments)
    assert isinstance(caught.value, ValueError)


@given(tenths=st.integers(0, 9), prompt=st.integers(0, 10**6))
def test_budget_is_exact_decimal_arithmetic(tenths: int, prompt: int) -> None:
    ratio = tenths / 10
    expect = (10 - tenths) * prompt // 10
    for written in (ratio, str(ratio), Fraction(tenths, 10), Decimal(str(ratio)), numpy.float64(ratio)):
        assert inertia_fx.Config(ratio=written, min_budget=1).budget_of(prompt) == max(1, expect)


def test_budget_examples() -> None:
    assert inertia_fx.Config().budget_of(1000) == 100  # floor((1 - 0.9) * 1000) in floats is 99
    assert inertia_fx.Config().budget_of(10) == 64
    assert inertia_fx.Config(min_budget=1).budget_of(5) == 1
    assert inertia_fx.Config(budget=7).budget_of(10**6) == 7
    assert repr(inertia_fx.Config()) == "Config(ratio=0.9 (evicted))"
    assert repr(inertia_fx.Config(budget=7, alpha=0.5)) == "Config(alpha=0.5, budget=7)"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_still_knows_that_its_ratio_is_the_default(clone: Any) -> None:
    config = clone(inertia_fx.Config(budget=3))
    assert config == inertia_fx.Config(budget=3)
    assert dataclasses.replace(config, budget=4) == inertia_fx.Config(budget=4)


@given(r=st.one_of(st.none(), st.integers(1, 50)), steps=st.integers(1, 200))
def test_number_of_refreshes(r: int | None, steps: int) -> None:
    config = inertia_fx.Config(refresh_every=r)
    refreshes = [step for step in range(1, steps + 1) if config.refreshes_at(step)]
    assert refreshes[0] == 1
    assert len(refreshes) == (1 if r is None else -(-steps // r))
