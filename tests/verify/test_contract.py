"""The contract that users run on their models, run on ours: grouped and multi-query, sdpa and eager attention."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar

import pytest

from inertia_fx import errors
from inertia_fx.verify import testing
from inertia_fx.verify.testing import DecoderContract
from tests.common import models


class TestLlama(DecoderContract):
    model = models.llama()
    steps = 8


class TestMultiQueryEagerOneLayer(DecoderContract):
    model = staticmethod(lambda: models.llama(1, 4, 1, attention="eager"))
    steps = 8


def test_a_contract_without_a_model_says_so() -> None:
    class Nothing(DecoderContract):
        pass

    with pytest.raises(errors.ConfigError, match=r"Nothing.model is not set"):
        Nothing().report()


def test_a_contract_of_too_few_steps_says_so() -> None:
    with pytest.raises(errors.ConfigError, match=r"Short\.steps=3: the contract needs at least 4"):

        class Short(DecoderContract):
            steps = 3


def test_what_the_settings_or_the_model_exclude_is_skipped() -> None:
    class Few(DecoderContract):
        model = staticmethod(lambda: models.tiny("gpt2", n_positions=48))
        settings: ClassVar[Any] = {"aggregator": "cumulative", "protect_first": 4, "min_budget": 5}
        steps = 4

    with pytest.raises(pytest.skip.Exception, match="exclude it: alpha_time belongs to aggregator='ema'"):
        Few().test_other_rules_agree_with_the_reference("time_and_layer")
    with pytest.raises(pytest.skip.Exception, match="do not fit the model's 48 positions"):
        Few().test_the_ratio_is_the_decimal_that_was_written()
    Few().test_a_single_row_agrees_with_the_reference()
    halves = type("Halves", (DecoderContract,), {"model": models.llama(1).bfloat16()})
    with pytest.raises(pytest.skip.Exception, match=r"bfloat16 rounds the two sides apart"):
        halves().test_rows_do_not_see_each_other()


def test_other_prompts_for_other_seeds() -> None:
    class Own(DecoderContract):
        prompts: ClassVar[Any] = ([5, 6, 7], [8, 9])

    assert Own().rows() == [[5, 6, 7], [8, 9]]
    assert Own().rows(seed=7) == [[7, 6, 5], [9, 8]]


def test_a_graph_compiled_anew_is_seen() -> None:
    class Forgetful(DecoderContract):
        model = staticmethod(lambda: models.llama(1))
        steps = 4

        def run(self, *given: Any, **settings: Any) -> list[Any]:
            self._made.pop("compiled", None)
            return super().run(*given, **settings)

    with pytest.raises(AssertionError, match=r"^6 graphs were compiled anew"):
        Forgetful().test_one_graph_serves_every_length()


def test_the_contract_needs_pytest_only_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = testing.Nothing
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(errors.ConfigError, match=r'DecoderContract needs pytest: pip install "inertia_fx\[verify\]"'):
        _ = testing.DecoderContract
