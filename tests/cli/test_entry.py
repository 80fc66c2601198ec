"""The entry point `inertia-fx`, and the options that are derived from the settings."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
from typing import Any

import pytest

from inertia_fx import cli
from inertia_fx.cli import commands, options
from inertia_fx.config import Config
from inertia_fx.errors import ConfigError
from inertia_fx.settings import settings_of
from tests.common.commands import invoke


def test_without_the_optional_packages_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("typer", "rich") else found("json"))
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == 'inertia-fx needs typer and rich: pip install "inertia_fx[demo]"\n'


def test_the_entry_point_can_be_imported_without_the_optional_packages() -> None:
    code = (
        "import sys\n"
        "for name in ('typer', 'rich', 'matplotlib'): sys.modules[name] = None\n"  # importing it now raises
        "from inertia_fx.cli import main"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")


def test_the_entry_point_runs_the_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["inertia-fx", "--help"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("demo", "explain", "verify"))


def test_verify_has_an_option_for_every_setting_with_its_text_and_default() -> None:
    parameters = inspect.signature(commands.verify).parameters
    own = ["model", "prompt", "prompt_file", "tokens", "steps", "backend", "json", "plots"]
    assert list(parameters) == own + list(settings_of(Config))
    said = " ".join(line.strip("│ ") for line in invoke("verify", "--help", columns=200).stdout.splitlines())
    for setting in settings_of(Config).values():
        default = "" if setting.default is None else f" [default: ({setting.default})]"
        text = setting.summary.replace("None", "never")
        assert parameters[setting.name].default is None
        assert f"{text}.{default}" in " ".join(said.split()), setting.name


def test_demo_takes_two_of_the_settings() -> None:
    own = ["model", "tokens", "backend", "picture_file"]
    assert list(inspect.signature(commands.demo).parameters) == [*own, "ratio", "alpha"]


@pytest.mark.parametrize(
    ("settings", "expect"),
    [
        ({"ratio": None, "alpha": 0.5, "budget": None}, {"alpha": 0.5}),
        ({"refresh_every": "never"}, {"refresh_every": None}),
        ({"refresh_every": "4", "budget": 7}, {"refresh_every": 4, "budget": 7}),
        ({"refresh_every": None}, {}),
    ],
)
def test_what_was_given(settings: dict[str, Any], expect: dict[str, Any]) -> None:
    assert options.given(Config, settings) == expect


def test_neither_a_number_nor_never() -> None:
    with pytest.raises(ConfigError, match=r"refresh-every='4\.5' is neither a whole number nor \"never\""):
        options.given(Config, {"refresh_every": "4.5"})
