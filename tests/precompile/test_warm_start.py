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
import threading
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import inertia_fx
from inertia_fx import debug
from inertia_fx.errors import ConfigError, RecompileError, UnsupportedAttentionError
from inertia_fx.precompile import capture as traces
from inertia_fx.precompile import fingerprints
from inertia_fx.precompile import step as warm_start
from tests.common import models
from tests.precompile import constants as warm_start_constants


def helper(x: Tensor, unused: Any = 1) -> Tensor:
    return x * 2 if unused is None else x * 2 * unused


class Toy(nn.Module):
    factor = 1.0

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        more = warm_start_constants.decorated(warm_start_constants.scaled(x)) * self.factor
        more = warm_start_constants.count(more, (1, 2))
        return helper(self.inner(x)) + self.shift + more


class Derived(Toy):
    pass


def wrapped_function(real: Any) -> Any:
    @functools.wraps(real)
    def function(x: Tensor) -> Tensor:
        return real(x) + 10

    return function


def call(model: Toy, x: Tensor, settings: dict[str, Any]) -> Tensor:
    return model(x) * settings["factor"]


def step(function: Any = call) -> warm_start.Step:
    return warm_start.Step(function, {"backend": "inductor"}, lambda *_: "toy")


def toy(shift: float = 1.0) -> Toy:
    torch.manual_seed(0)
    return Toy(shift)


X = torch.arange(8.0).reshape(2, 4)
SETTINGS = {"factor": 3.0}


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    """A folder of our own for the steps; what Inductor compiles stays where it always is."""
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
    def forward(self: Any, x: Tensor) -> Tensor:
        return real(self, x) + 10

    return forward


def elsewhere(function: Any) -> Any:
    """The same code with the globals of another module."""
    return types.FunctionType(function.__code__, vars(warm_start_constants))


PATCHES = {
    "replaced": (Toy, "forward", patched_forward),
    "wrapped": (Toy, "forward", wrapped_forward(Toy.forward)),
    "other globals": (Toy, "forward", elsewhere(Toy.forward)),
    "copied globals": (Toy, "forward", types.FunctionType(Toy.forward.__code__, globals() | {"helper": other_helper})),
    "another signature": (warm_start_constants, "count", warm_start_constants.counted),
    "torch's": (nn.Linear, "forward", wrapped_forward(nn.Linear.forward)),
    "overridden": (nn.Linear, "__call__", lambda self, x: x),
    "defaults": (helper, "__defaults__", (None,)),
    "class attribute": (Toy, "factor", 9.0),
    "subclass attribute": (Derived, "factor", 9.0),
    "another module's constant": (warm_start_constants, "SCALE", 7.0),
    "another module's list": (warm_start_constants, "LIST", [1.0, 2.0, 3.0]),
    "another module's function": (warm_start_constants, "scaled", other_helper),
    "another module's function, wrapped": (
        warm_start_constants,
        "scaled",
        wrapped_function(warm_start_constants.scaled),
    ),
    "decorated": (warm_start_constants, "decorated", warm_start_constants.adding(9.0)(helper)),
}


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
@pytest.mark.parametrize("when", ["while storing", "while reading"])
def test_patches_are_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch, patch: tuple[Any, str, Any], when: str
) -> None:
    """Dynamo has no guards on most of these, as it would have traced what it finds. A file on disk has not."""
    torch.manual_seed(0)
    model = Derived(1.0)
    if when == "while storing":
        with monkeypatch.context() as patched:
            patched.setattr(*patch, raising=False)
            check(step(), model)
        check(step(), model)
    else:
        check(step(), model)
        monkeypatch.setattr(*patch, raising=False)
        check(step(), model)
    assert tracings.count == 2


@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook", "global"])
@pytest.mark.parametrize("when", ["while storing", "while reading"])
def test_hooks_are_noticed(folder: pathlib.Path, tracings: Tracings, kind: str, when: str) -> None:
    """Torch compiles them in and does not guard on them; so what has hooks is compiled in every process."""
    model = toy()
    if when == "while reading":
        check(step(), model)
    if kind == "global":
        handle = torch.nn.modules.module.register_module_forward_hook(lambda module, inputs, output: output * 3)
    elif kind == "register_forward_hook":
        handle = model.inner.register_forward_hook(lambda module, inputs, output: output * 3)
    else:
        handle = model.inner.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
    try:
        check(step(), model)
    finally:
        handle.remove()
    check(step(), model)
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


@torch.library.custom_op("inertia_fx_tests::users", mutates_args=())
def users_operator(x: Tensor) -> Tensor:
    return x * 3


users_operator.register_fake(torch.empty_like)


@torch._dynamo.allow_in_graph
def users_function(x: Tensor) -> Tensor:
    return x * 3


@torch._dynamo.assume_constant_result
def users_constant() -> int:
    return 3


def calls_a_constant(x: Tensor) -> Tensor:
    return x * users_constant()


_generated: dict[str, Any] = {}
exec("def generated(x):\n    return x * 3", _generated)


@pytest.mark.parametrize("function", [users_operator, users_function, calls_a_constant, _generated["generated"]])
def test_code_that_no_guard_is_about_is_not_stored(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    monkeypatch.setattr(warm_start_constants, "scaled", function)
    with caplog.at_level(logging.WARNING, "inertia_fx"):
        check(step(), toy())
    assert "no warm start" in caplog.text and list(folder.iterdir()) == []


OUTSIDE = nn.Linear(4, 4)


def uses_a_global_module(x: Tensor) -> Tensor:
    return OUTSIDE(x)


@pytest.mark.parametrize("function", [users_operator, uses_a_global_module])
def test_a_warning_says_why(
    folder: pathlib.Path, caplog: pytest.LogCaptureFixture, monkeypatch: Any, function: Any
) -> None:
    monkeypatch.setattr(warm_start_constants, "scaled", function)
    with caplog.at_level(logging.WARNING, "inertia_fx"):
        check(step(), toy())
    expect = "not part of a model" if function is uses_a_global_module else "inertia_fx_tests.users"
    assert expect in caplog.text and list(folder.iterdir()) == []


def test_a_file_names_its_own_modules_only(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that other traces have brought into the same globals: they may not exist where it is read."""
    monkeypatch.setitem(globals(), "__import_of_another_trace", os)
    check(step(), toy())
    (file,) = folder.iterdir()
    names = pickle.loads(file.read_bytes()).modules
    assert "__import_of_another_trace" not in names and "tests.warm_start_constants" in names.values()


def applied(model: Toy, x: Tensor, settings: dict[str, Any]) -> Tensor:
    return settings["function"](x)


def test_a_function_may_be_made_anew_for_every_call(folder: pathlib.Path, tracings: Tracings) -> None:
    def make() -> Any:
        return lambda x: x * 4

    run = step(applied)
    for _ in range(10):
        torch.testing.assert_close(run(None, X, {"function": make()}), X * 4)
    assert tracings.count == 1


def test_reset_forgets(folder: pathlib.Path, tracings: Tracings) -> None:
    run, model = step(), toy()
    check(run, model)
    (file,) = folder.iterdir()
    file.unlink()
    torch._dynamo.reset()
    check(run, model)
    assert tracings.count == 2 and len(run.traces) == 1


def test_threads_compile_once(folder: pathlib.Path, tracings: Tracings) -> None:
    run, model = step(), toy()

    def work() -> None:
        with torch.no_grad():
            check(run, model)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tracings.count == 1 and len(run.traces) == 1


def test_a_failed_compile_leaves_nothing_behind(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = step(), {name for name in globals() if name.startswith("__compiled")}

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedAttentionError(0, "node", "reason")

    monkeypatch.setattr(warm_start, "inertia", refuse)
    with pytest.raises(UnsupportedAttentionError):
        run(toy(), X, SETTINGS)
    assert {name for name in globals() if name.startswith("__compiled")} == before and not run.traces


@pytest.mark.parametrize(
    "setting",
    [{"force_disable_caches": True}, {"fx_graph_cache": False}, {"freezing": True}],
    ids=lambda s: next(iter(s)),
)
def test_off_with_torchs_settings(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any]
) -> None:
    with torch._inductor.config.patch(setting):
        run = step()
        monkeypatch.setattr(run, "compiled", call)
        check(run, toy())
    assert tracings.count == 0 and list(folder.iterdir()) == []


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
    description = fingerprints.describe_code(make(ordered, number, "one"))
    assert fingerprints.describe_code(make(ordered[::-1], number, "two")) == description
    assert fingerprints.describe_code(make(ordered, number + 1, "one")) != description
    assert fingerprints.describe_code(make([*ordered, "another one"], number, "one")) != description


@pytest.mark.parametrize("value", [object(), Toy(1.0), functools.partial(helper), type("Local", (), {}).__call__])
def test_what_cannot_be_recognised_is_not_described(value: Any) -> None:
    with pytest.raises(fingerprints.NotStorable):
        fingerprints.describe(value)


@pytest.mark.parametrize(
    "value",
    [1, "word", None, helper, Toy, os, len, torch.add, torch.ops.aten.add.Tensor, torch.float32, helper.__code__],
)
def test_descriptions_survive_the_file(value: Any) -> None:
    description = fingerprints.describe(value)
    assert pickle.loads(pickle.dumps(description)) == description
    assert fingerprints.describe(value) == description


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
from inertia_fx.precompile import capture as traces
from tests.common import models
from tests.precompile import test_warm_start

torch.set_num_threads(1)
state, more = sys.argv[1:]
allowed = 1 if more == "more" else 0
real = traces.capture
def capture(*arguments):
    global allowed
    allowed -= 1
    assert state == "cold" or allowed >= 0, "traced"
    return real(*arguments)
traces.capture = capture
if more == "compiled before":
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
model = inertia_fx.compile(models.llama(), warm_start=True)
print(test_warm_start.generate(model))
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
