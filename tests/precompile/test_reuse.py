"""A step on disk is used where tracing would have made it again, and the guards decide."""

from __future__ import annotations

import gc
import pathlib
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from inertia_fx import debug
from inertia_fx.backend import own_code
from inertia_fx.errors import RecompileError
from tests.precompile import toys
from tests.precompile.toys import SETTINGS, Toy, X, call, check, other_helper, step, toy
from tests.precompile.tracings import Tracings


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
    plain = torch.compile(own_code(call), backend="eager")
    compiles = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    plain(toy(), X, SETTINGS)
    arguments = {"model": toy(), "x": X, "settings": SETTINGS} | different
    plain(**arguments)
    recompiles = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiles - 1
    check(step(), **arguments)
    assert tracings.count == 1 + recompiles


def test_a_replaced_function_is_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a step that is found on disk, and by one that is in use."""
    in_use = step()
    check(in_use, toy())
    monkeypatch.setattr(toys, "helper", other_helper)
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
    monkeypatch.setattr(toys, "helper", other_helper)
    check(found, toy())
    assert tracings.count == 2


def applied(model: Toy, x: Tensor, settings: dict[str, Any]) -> Tensor:
    return settings["function"](x)


FIRST_PROGRAM = """
import pathlib, sys
import torch
from inertia_fx.precompile import files
from tests.precompile import toys

torch.set_num_threads(1)
files.folder = lambda: pathlib.Path(sys.argv[1])
with torch.no_grad():
    toys.check(toys.step(), toys.toy())
"""

PROGRAM = """
import pathlib, sys, types
import torch
from inertia_fx.precompile import capture, files
from tests.precompile import toys

def compile_another(x):
    return len([x]) * x

torch.set_num_threads(1)
files.folder = lambda: pathlib.Path(sys.argv[1])
capture.capture = None  # tracing would fail
another = torch.compile(types.FunctionType(compile_another.__code__, vars(toys)), backend="eager")
with torch.no_grad():
    another(torch.ones(2))
    step = toys.step()
    toys.check(step, toys.toy())
    another(torch.ones(2, 2, 2))
    toys.check(step, toys.toy(), toys.X + 1)
print(len(step.entries), sum(name.startswith("__builtins_dict__") for name in vars(toys)))
"""


@pytest.mark.slow
@pytest.mark.xdist_group("warm")
def test_another_process_finds_it(folder: pathlib.Path) -> None:
    """Also one whose Dynamo has given the same numbers to other globals, before and afterwards."""
    # Both are new: what other tests have set in this one (Inductor's settings, say) is part of the file's name.
    for program in (FIRST_PROGRAM, PROGRAM):
        command = [sys.executable, "-c", program, str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "1 2"


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
    assert tracings.count == 2 and len(run.entries) == 1


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
    assert tracings.count == 1 and len(run.entries) == 1


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
    run, before = step(), set(vars(toys))
    check(run, toy())
    (name,) = {name for name in vars(toys) if name.startswith("__inertia_compiled")} - before
    del run
    gc.collect()
    assert name not in vars(toys)
