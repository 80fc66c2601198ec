"""The contract that users run on their models, run on ours: grouped, multi-query and eager attention, learned positions."""

from __future__ import annotations

import pytest

from inertia_fx.verify.contract import DecoderContract
from tests import models


class TestLlama(DecoderContract):
    model = models.llama()


class TestMultiQueryEagerOneLayer(DecoderContract):
    model = staticmethod(lambda: models.llama(1, 4, 1, attention="eager"))
    steps = 8


class TestLearnedPositions(DecoderContract):
    model = staticmethod(lambda: models.tiny("gpt2"))
    steps = 8


def test_a_contract_without_a_model_says_so() -> None:
    class Nothing(DecoderContract):
        pass

    with pytest.raises(AssertionError, match=r"Nothing.model is not set"):
        Nothing().report()
