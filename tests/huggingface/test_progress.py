"""The line that says what the first step waits for."""

from __future__ import annotations

import io
import sys

import pytest
import torch
import transformers

import inertia_fx
from tests.common import models


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> list[str]:
    """What stderr shows over two decode steps, cut at every redrawing of the line."""
    compiled = inertia_fx.compile(models.llama(), backend="eager", ratio=0.5, min_budget=1)
    monkeypatch.setattr(sys, "stderr", terminal)
    cache = inertia_fx.InertiaCache()
    compiled(torch.tensor([models.prompt(6)]), past_key_values=cache)
    compiled(torch.tensor([models.prompt(1)]), past_key_values=cache)
    first = terminal.getvalue()
    compiled(torch.tensor([models.prompt(1)]), past_key_values=cache)
    assert terminal.getvalue() == first  # only the step that compiles says so
    return first.split("\r")


def test_a_line_says_what_the_first_step_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = shown(monkeypatch, Terminal())
    stages = list(dict.fromkeys(line.split(" [")[0].strip() for line in lines if line.strip()))
    assert stages[-3:] == [
        "inertia_fx: tracing the decode step, which is compiled once",
        "inertia_fx: rewriting its graph",
        "inertia_fx: compiling its 2 layers with eager",
    ]
    assert lines[-1].strip() == ""  # and it is gone when it is done


def test_the_line_is_one_of_transformers_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == [""]
    monkeypatch.setattr(transformers.utils.logging, "_tqdm_active", False)
    assert shown(monkeypatch, Terminal()) == [""]
