"""A step on disk is used where tracing would have made it again, and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib
import logging
import os
import pathlib
import pickle
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import inertia_fx
from inertia_fx import debug, traces, warm_start
from inertia_fx.errors import RecompileError
from tests import models


def helper(x: Tensor) -> Tensor:
    return x * 2


class Toy(nn.Module):
    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return helper(self.inner(x)) + self.shift


def call(model: Toy, x: Tensor, settings: dict[str, Any]) -> Tensor:
    return model(x) * settings["factor"]


def step(**options: Any) -> warm_start.Step:
    return warm_start.Step(call, {"backend": "inductor"} | options, lambda *_: "toy", lambda *_: "cpu")


def toy(shift: float = 1.0) -> Toy:
    torch.manual_seed(0)
    return Toy(shift)


X = torch.arange(8.0).reshape(2, 4)
SETTINGS = {"factor": 3.0}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """Warm starts on, in a folder of our own; what Inductor compiles stays where it always is."""
    monkeypatch.setenv("INERTIA_FX_WARM_START", "1")
    folder = tmp_path_factory.mktemp("steps")
    monkeypatch.setattr(warm_start, "_folder", lambda: folder)
    with torch.no_grad():
        yield folder


@dataclasses.dataclass
class Tracings:
    count: int = 0


@pytest.fixture
def tracings(monkeypatch: pytest.MonkeyPatch) -> Tracings:
    """Counts how often something is traced."""
    result, real = Tracings(), traces.capture

    def capture(*args: Any) -> Any:
        result.count += 1
        return real(*args)

    monkeypatch.setattr(traces, "capture", capture)
    return result


def check(run: warm_start.Step, model: Toy, x: Tensor = X, settings: dict[str, Any] = SETTINGS) -> None:
    """Equal to the eager function."""
    torch.testing.assert_close(run(model, x, settings), call(model, x, settings))


def test_the_second_step_is_found(folder: pathlib.Path, tracings: Tracings) -> None:
    check(step(), toy())
    assert [file.suffix for file in folder.iterdir()] == [".step"]
    again = step()
    check(again, toy(), X + 1)
    check(again, toy(), X + 2)
    assert tracings.count == 1


@pytest.mark.parametrize(
    "different",
    [
        {"x": X.double().float()[:1]},
        {"x": X.clone().requires_grad_()},
        {"settings": {"factor": 4.0}},
        {"settings": {"factor": 3.0, "other": 1}},
        {"model": toy(shift=2.0)},
        {"model": toy().eval()},
    ],
    ids=["shape", "gradients", "constant", "one key more", "attribute", "mode"],
)
def test_the_guards_decide(folder: pathlib.Path, tracings: Tracings, different: dict[str, Any]) -> None:
    """All of these have the same file. Where torch.compile's guards would not mind (`mode`), neither do ours."""
    check(step(), toy())
    plain = torch.compile(warm_start.own_code(call), backend="eager")
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain(toy(), X, SETTINGS)
    arguments = {"model": toy(), "x": X, "settings": SETTINGS} | different
    plain(**arguments)
    recompiles = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiles - 1
    check(step(), **arguments)
    assert tracings.count == 1 + recompiles


def other_helper(x: Tensor) -> Tensor:
    return x * 5


def test_a_replaced_function_is_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step that is found on disk, and by one that is in use."""
    in_use = step()
    check(in_use, toy())
    monkeypatch.setitem(globals(), "helper", other_helper)
    check(step(), toy())
    assert tracings.count == 2
    check(in_use, toy())
    assert tracings.count == 2  # it finds the new step


def test_a_function_found_on_disk_is_watched(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(step(), toy())
    found = step()
    check(found, toy())
    assert tracings.count == 1
    monkeypatch.setitem(globals(), "helper", other_helper)
    check(found, toy())
    assert tracings.count == 2


def patched_forward(self: Toy, x: Tensor) -> Tensor:
    return self.inner(x) - self.shift


def wrapped_forward(real: Any) -> Any:
    @functools.wraps(real)
    def forward(self: Toy, x: Tensor) -> Tensor:
        return real(self, x) + 10

    return forward


@pytest.mark.parametrize("patch", [lambda _: patched_forward, wrapped_forward], ids=["replaced", "wrapped"])
@pytest.mark.parametrize("owner", [Toy, nn.Linear], ids=["ours", "torch's"])
def test_a_patched_class_is_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch, patch: Any, owner: Any
) -> None:
    """Dynamo has no guard on methods, as it would have traced the patched one. A file on disk has not."""
    if owner is nn.Linear and patch is not wrapped_forward:
        pytest.skip("not a forward of nn.Linear")
    check(step(), toy())
    monkeypatch.setattr(owner, "forward", patch(owner.forward))
    check(step(), toy())
    assert tracings.count == 2


def test_a_changed_file_is_noticed(
    folder: pathlib.Path, tracings: Tracings, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "users_model.py"
    source.write_text("import os\n\ndef scaled(x):\n    return x * 2\n")
    monkeypatch.syspath_prepend(tmp_path)
    users = importlib.import_module("users_model")
    monkeypatch.setitem(globals(), "helper", users.scaled)
    check(step(), toy())
    source.write_text("import os\n\ndef scaled(x):\n    return x * 7\n")
    importlib.invalidate_caches()
    importlib.reload(users)
    monkeypatch.setitem(globals(), "helper", users.scaled)
    check(step(), toy())
    assert tracings.count == 2


@pytest.mark.parametrize("damage", [b"", b"not a pickle", None], ids=["empty", "garbage", "cut off"])
def test_a_broken_file_is_replaced(
    folder: pathlib.Path, tracings: Tracings, caplog: pytest.LogCaptureFixture, damage: bytes | None
) -> None:
    check(step(), toy())
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    with caplog.at_level(logging.WARNING, "inertia_fx"):
        check(step(), toy())
    assert f"{file} cannot be read" in caplog.text and "compiling anew" in caplog.text
    check(step(), toy())
    assert tracings.count == 2 and list(folder.iterdir()) == [file]


def test_a_folder_that_cannot_be_written_costs_the_warm_start_only(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    taken = folder / "a file"
    taken.touch()
    monkeypatch.setattr(warm_start, "_folder", lambda: taken)
    with caplog.at_level(logging.WARNING, "inertia_fx"):
        check(step(), toy())
    assert "could not be kept" in caplog.text


def test_what_cannot_be_pickled_stays_in_the_process(
    folder: pathlib.Path, tracings: Tracings, caplog: pytest.LogCaptureFixture
) -> None:
    class Local(Toy):
        pass

    torch.manual_seed(0)
    model, run = Local(1.0), step()
    with caplog.at_level(logging.INFO, "inertia_fx"):
        check(run, model)
    assert "stays in this process" in caplog.text and list(folder.iterdir()) == []
    check(run, model, X + 1)
    assert tracings.count == 1
    model.shift = 4.0
    check(run, model)
    assert tracings.count == 2


@pytest.mark.parametrize(
    "setting",
    [{"force_disable_caches": True}, {"fx_graph_cache": False}, {"freezing": True}],
    ids=lambda s: next(iter(s)),
)
def test_off_with_torchs_caches(folder: pathlib.Path, tracings: Tracings, setting: dict[str, Any]) -> None:
    with torch._inductor.config.patch(setting):
        check(step(), toy())
    assert tracings.count == 0 and list(folder.iterdir()) == []


def test_off_by_environment(folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INERTIA_FX_WARM_START", "0")
    check(step(), toy())
    assert tracings.count == 0 and list(folder.iterdir()) == []


@pytest.mark.parametrize("options", [{"backend": "eager"}, {"mode": "reduce-overhead"}, {"options": {"debug": False}}])
def test_only_with_inductors_default_settings(
    folder: pathlib.Path, tracings: Tracings, options: dict[str, Any]
) -> None:
    check(step(**options), toy())
    assert tracings.count == 0 and list(folder.iterdir()) == []


def test_only_on_cpus(folder: pathlib.Path, tracings: Tracings) -> None:
    elsewhere = warm_start.Step(call, {"backend": "eager"}, lambda *_: "toy", lambda *_: "cuda")
    elsewhere.options["backend"] = "inductor"  # the compiled function stays what it is
    check(elsewhere, toy())
    assert tracings.count == 0


def test_recording_wants_to_see_the_passes(folder: pathlib.Path, tracings: Tracings) -> None:
    check(step(), toy())
    with debug.record():
        check(step(), toy())
    assert tracings.count == 2


def test_settings_of_torch_have_files_of_their_own(folder: pathlib.Path, tracings: Tracings) -> None:
    check(step(), toy())
    with torch._inductor.config.patch("cpp.simdlen", 0):
        check(step(), toy())
    assert tracings.count == 2 and len(list(folder.iterdir())) == 2


def test_the_recompile_limit_is_torchs(folder: pathlib.Path) -> None:
    run, model = step(), toy()
    with torch._dynamo.config.patch(recompile_limit=2):
        for x in (X, X[0]):
            check(run, model, x)
        with pytest.raises(RecompileError, match="recompile_limit"):
            run(model, X[None], SETTINGS)
        check(run, model, X)


def test_a_forgotten_step_leaves_nothing_behind(folder: pathlib.Path) -> None:
    run, before = step(), set(globals())
    check(run, toy())
    (name,) = {name for name in globals() if name.startswith("__inertia_compiled")} - before
    del run
    gc.collect()
    assert name not in globals()


# ------------------------------------------------------------------------------------------------------- descriptions


@given(st.sets(st.text(max_size=5), min_size=1), st.integers(0, 3))
def test_code_is_described_by_what_it_does(words: set[str], number: int) -> None:
    """Not by where it is or how it is called; the order of a set's elements depends on the process."""

    def make(words: list[str], number: int, name: str) -> types.CodeType:
        literal = "{" + ", ".join(map(repr, words)) + "}"
        scope: dict[str, Any] = {}
        exec(f"def {name}(x):\n    return (x in {literal}, x + {number})", scope)
        return scope[name].__code__

    ordered = sorted(words)
    description = traces._describe_code(make(ordered, number, "one"))
    assert traces._describe_code(make(ordered[::-1], number, "two")) == description
    assert traces._describe_code(make(ordered, number + 1, "one")) != description
    assert traces._describe_code(make([*ordered, "another one"], number, "one")) != description


@pytest.mark.parametrize("value", [object(), Toy(1.0), functools.partial(helper), type("Local", (), {}).__call__])
def test_what_cannot_be_recognised_is_not_described(value: Any) -> None:
    with pytest.raises(traces.NotStorable):
        traces._describe(value)


@pytest.mark.parametrize(
    "value",
    [1, "word", None, helper, Toy, os, len, torch.add, torch.ops.aten.add.Tensor, torch.float32, helper.__code__],
)
def test_descriptions_survive_the_file(value: Any) -> None:
    description = traces._describe(value)
    assert pickle.loads(pickle.dumps(description)) == description
    assert traces._describe(value) == description


# --------------------------------------------------------------------------------------------------------------- models


def generate(model: Any, **settings: Any) -> tuple[list[int], Any]:
    cache = inertia_fx.InertiaCache(inertia_fx.Config(ratio=0.5, min_budget=8, **settings))
    ids = torch.tensor([models.prompt(40)])
    tokens = model.generate(ids, past_key_values=cache, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return tokens[0, 40:].tolist(), [kept.tolist() for kept in cache.retained_positions()]


@pytest.mark.slow
@pytest.mark.xdist_group("warm")
def test_a_model_finds_its_steps(folder: pathlib.Path, tracings: Tracings) -> None:
    """Two steps (with scores and without), for a new model, a copy and an unpickled one, also in inference mode."""
    model = models.llama()
    expect = generate(inertia_fx.compile(model, backend="eager"), refresh_every=2)
    first = inertia_fx.compile(model)
    assert generate(first, refresh_every=2) == expect
    assert tracings.count == len(list(folder.iterdir())) == 2
    for again in (inertia_fx.compile(models.llama()), copy.deepcopy(first), pickle.loads(pickle.dumps(first))):
        assert generate(again, refresh_every=2) == expect
    assert tracings.count == 2
    with torch.inference_mode():
        assert generate(first, refresh_every=2) == expect
        assert generate(inertia_fx.compile(models.llama()), refresh_every=2) == expect


PROGRAM = """
import sys, torch
from inertia_fx import traces
import inertia_fx
from tests import models, test_warm_start

torch.set_num_threads(1)
if sys.argv[1] == "warm":
    def capture(*_): raise AssertionError("traced")
    traces.capture = capture
print(test_warm_start.generate(inertia_fx.compile(models.llama())))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("warm")
def test_another_process_finds_them(tmp_path: pathlib.Path) -> None:
    environment = os.environ | {"INERTIA_FX_WARM_START": "1", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    answers = []
    for kind in ("cold", "warm", "warm"):
        command = [sys.executable, "-c", PROGRAM, kind]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=os.getcwd())
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    assert len(set(answers)) == 1 and answers[0].startswith("([")
