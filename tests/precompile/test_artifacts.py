"""What is written to disk, and what is not; broken files, and folders that cannot be written."""

from __future__ import annotations

import logging
import os
import pathlib
import pickle
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inertia_fx.errors import UnsupportedAttentionError
from inertia_fx.precompile import artifact as artifacts
from inertia_fx.precompile import files
from inertia_fx.precompile import step as precompiled
from tests.precompile import constants, toys
from tests.precompile.toys import SETTINGS, Toy, X, check, step, toy
from tests.precompile.tracings import Tracings


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
    monkeypatch.setattr(files, "folder", lambda: taken)
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
    monkeypatch.setattr(constants, "scaled", function)
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
    monkeypatch.setattr(constants, "scaled", function)
    with caplog.at_level(logging.WARNING, "inertia_fx"):
        check(step(), toy())
    expect = "not part of a model" if function is uses_a_global_module else "inertia_fx_tests.users"
    assert expect in caplog.text and list(folder.iterdir()) == []


def test_a_file_names_its_own_modules_only(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that other traces have brought into the same globals: they may not exist where it is read."""
    monkeypatch.setitem(vars(toys), "__import_of_another_trace", os)
    check(step(), toy())
    (file,) = folder.iterdir()
    names = pickle.loads(file.read_bytes()).modules
    assert "__import_of_another_trace" not in names and "tests.precompile.constants" in names.values()


def ordered(model: Toy, x: Tensor, settings: dict[str, Any]) -> Any:
    return OrderedDict(result=model(x), length=len(settings))


def test_a_file_has_no_names_that_dynamo_numbers(folder: pathlib.Path, tracings: Tracings) -> None:
    """Numbers and addresses of this process mean something else in another one, or are taken there."""
    expect = step(ordered)(toy(), X, SETTINGS)
    (file,) = folder.iterdir()
    artifact = pickle.loads(file.read_bytes())
    words = [*artifact.bytecode.co_names, *artifact.modules, *artifact.identities, *artifact.classes]
    words += artifact.guard_text
    assert not [word for word in words if "__builtins_dict__" in word or "___module_" in word]
    assert artifact.modules["__inertia_module_collections"] == "collections"
    assert "__inertia_builtins['len']" in artifact.identities
    again = step(ordered)(toy(), X, SETTINGS)
    assert type(again) is OrderedDict and again["length"] == 1
    torch.testing.assert_close(again["result"], expect["result"])
    assert tracings.count == 1


def test_a_name_that_is_taken_is_noticed(
    folder: pathlib.Path, tracings: Tracings, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(step(), toy())
    names = pickle.loads(next(folder.iterdir()).read_bytes()).modules
    name = next(name for name, module in names.items() if module == "tests.precompile.constants")
    monkeypatch.setitem(vars(toys), name, os)
    artifact = files.read(next(folder.iterdir()))
    found = artifacts.restore(artifact, step().function, (toy(), X, SETTINGS), lambda _: None)
    assert found == f"{name} is another module"


def test_a_failed_compile_leaves_nothing_behind(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, before = step(), {name for name in vars(toys) if name.startswith("__compiled")}

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedAttentionError(0, "node", "reason")

    monkeypatch.setattr(precompiled, "inertia", refuse)
    with pytest.raises(UnsupportedAttentionError):
        run(toy(), X, SETTINGS)
    assert {name for name in vars(toys) if name.startswith("__compiled")} == before and not run.entries
