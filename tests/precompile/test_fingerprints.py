"""Functions, classes and code are told apart by what they do, also in another process."""

from __future__ import annotations

import functools
import os
import pickle
import types
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inertia_fx.precompile import fingerprints
from tests.precompile.toys import Toy, helper


@given(st.sets(st.text(max_size=5), min_size=1), st.integers(0, 3))
def test_code_is_told_apart_by_what_it_does(words: set[str], number: int) -> None:
    """Not by where it is or how it is called; the order of a set's elements depends on the process."""

    def make(words: list[str], number: int, name: str) -> types.CodeType:
        literal = "{" + ", ".join(map(repr, words)) + "}"
        scope: dict[str, Any] = {}
        exec(f"def {name}(x):\n    return (x in {literal}, x + {number})", scope)
        return scope[name].__code__

    ordered = sorted(words)
    fingerprint = fingerprints.fingerprint_code(make(ordered, number, "one"))
    assert fingerprints.fingerprint_code(make(ordered[::-1], number, "two")) == fingerprint
    assert fingerprints.fingerprint_code(make(ordered, number + 1, "one")) != fingerprint
    assert fingerprints.fingerprint_code(make([*ordered, "another one"], number, "one")) != fingerprint


@pytest.mark.parametrize("value", [object(), Toy(1.0), functools.partial(helper), type("Local", (), {}).__call__])
def test_what_cannot_be_recognised_has_no_fingerprint(value: Any) -> None:
    with pytest.raises(fingerprints.NotStorable):
        fingerprints.fingerprint(value)


@pytest.mark.parametrize(
    "value",
    [1, "word", None, helper, Toy, os, len, torch.add, torch.ops.aten.add.Tensor, torch.float32, helper.__code__],
)
def test_fingerprints_survive_the_file(value: Any) -> None:
    fingerprint = fingerprints.fingerprint(value)
    assert pickle.loads(pickle.dumps(fingerprint)) == fingerprint
    assert fingerprints.fingerprint(value) == fingerprint
