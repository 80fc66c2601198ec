"""Models find their compiled steps again, in this process and in others."""

from __future__ import annotations

import copy
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx.errors import ConfigError
from tests.common import models
from tests.precompile.generation import generate
from tests.precompile.tracings import Tracings


@pytest.mark.slow
@pytest.mark.xdist_group("warm")
def test_a_model_finds_its_steps(folder: pathlib.Path, tracings: Tracings) -> None:
    """Two steps (with scores and without), for a new model, a copy and an unpickled one, also in inference mode."""
    model = models.llama()
    expect = generate(inertia_fx.compile(model, backend="eager"), refresh_every=2)
    first = inertia_fx.compile(model, warm_start=True)
    assert generate(first, refresh_every=2) == expect
    assert tracings.count == len(list(folder.iterdir())) == 2
    for again in (
        inertia_fx.compile(models.llama(), warm_start=True),
        copy.deepcopy(first),
        pickle.loads(pickle.dumps(first)),
    ):
        assert generate(again, refresh_every=2) == expect
    assert tracings.count == 2
    with torch.inference_mode():
        assert generate(first, refresh_every=2) == expect
        assert generate(inertia_fx.compile(models.llama(), warm_start=True), refresh_every=2) == expect


PROGRAM = """
import sys, torch
import inertia_fx
from inertia_fx.precompile import capture as module
from tests.common import models
from tests.precompile.generation import generate

torch.set_num_threads(1)
state, more = sys.argv[1:]
allowed = 1 if more == "more" else 0
real = module.capture
def capture(*arguments):
    global allowed
    allowed -= 1
    assert state == "cold" or allowed >= 0, "traced"
    return real(*arguments)
module.capture = capture
if more == "compiled before":
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
model = inertia_fx.compile(models.llama(), warm_start=True)
print(generate(model))
if more == "more":
    ids = torch.tensor([models.prompt(12), models.prompt(12, 1)])
    print(model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0).shape)
"""


@pytest.mark.slow
@pytest.mark.xdist_group("warm")
def test_other_processes_find_them(tmp_path: pathlib.Path) -> None:
    """Also one that has used torch.compile before, and one that compiles something else afterwards."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    answers = []
    for state, more in (("cold", ""), ("warm", "compiled before"), ("warm", "more")):
        command = [sys.executable, "-c", PROGRAM, state, more]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=os.getcwd())
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout.splitlines())
    assert all(answer[0] == answers[0][0] for answer in answers) and answers[0][0].startswith("([")
    assert answers[-1][1] == "torch.Size([2, 15])"


@pytest.mark.parametrize(
    "settings", [{"backend": "eager"}, {"mode": "reduce-overhead"}, {"options": {"freezing": True}}], ids=str
)
def test_only_with_inductors_default_settings(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="default settings"):
        inertia_fx.compile(models.cached_llama(2, 4, 2), warm_start=True, **settings)


def test_only_on_cpus() -> None:
    """A step on another device is refused, with nothing done."""
    model = inertia_fx.compile(models.cached_llama(2, 4, 2), warm_start=True)
    cache = inertia_fx.InertiaCache(inertia_fx.Config())
    with pytest.raises(ConfigError, match="on CPUs only"):
        model._inertia_step(cache, 1, torch.device("cuda"), {})
