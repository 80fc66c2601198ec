"""The settings are written once: what `compile`, `check` and `help()` say comes from the dataclasses' fields."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
import pathlib
import pydoc
import subprocess
import sys
from typing import Any, Literal

import pytest

import inertia_fx
from inertia_fx import errors, verify
from inertia_fx.config import CompilerOptions, Config
from inertia_fx.settings import settings_of
from tests.common import models

ROOT = pathlib.Path(__file__).parents[2]


def test_the_signature_is_the_promised_one() -> None:
    parameters = inspect.signature(inertia_fx.compile).parameters
    assert str(inspect.signature(inertia_fx.compile).replace(return_annotation=inspect.Signature.empty)).startswith(
        "(model"
    )
    defaults = {name: parameter.default for name, parameter in parameters.items() if name != "model"}
    assert defaults == {
        "config": None,
        "ratio": 0.9, "alpha": 0.8, "refresh_every": 1, "evict_after": 1, "pool_width": 1, "budget": None,
        "min_budget": 64, "aggregator": "ema", "scorer": "attention", "alpha_time": None, "alpha_layer": None,
        "protect_first": 0, "protect_recent": 0, "backend": "inductor", "mode": None, "options": None, "regions": True,
        "disable_passes": (), "warm_start": False,
    }  # fmt: skip
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in defaults if name != "config")
    assert parameters["aggregator"].annotation == Literal["ema", "cumulative", "single_step"]
    assert parameters["refresh_every"].annotation == int | None
    with pytest.raises(TypeError, match="unexpected keyword"):
        inertia_fx.compile(object(), ratios=0.9)  # type: ignore[call-arg]


def test_every_field_is_a_setting_with_a_summary() -> None:
    for kind in (Config, CompilerOptions):
        assert list(settings_of(kind)) == [field.name for field in dataclasses.fields(kind)]
        for setting in settings_of(kind).values():
            assert setting.doc.startswith(setting.summary)
            assert len(setting.summary) <= 110, setting.name  # a line of the README's table, and of --help
            assert "[" not in setting.summary, setting.name  # rich reads it as markup
            assert setting.doc.endswith("."), setting.name


@pytest.mark.parametrize("described", [Config, CompilerOptions, inertia_fx.compile, verify.check])
def test_help_lists_settings_by_name_text_and_default(described: Any) -> None:
    said = " ".join(pydoc.render_doc(described, renderer=pydoc.plaintext).replace("|", " ").split())
    kinds = {Config: [Config], CompilerOptions: [CompilerOptions], verify.check: [Config]}
    for kind in kinds.get(described, [Config, CompilerOptions]):
        for setting in settings_of(kind).values():
            own = described is verify.check
            default = "the compiled model's own" if own else repr(setting.default)
            assert f" {setting.name}: {setting.doc} (default: {default})" in said


def test_check_takes_the_settings_of_config() -> None:
    parameters = inspect.signature(verify.check).parameters
    assert list(parameters) == ["model", "inputs", "steps", "on_progress", *settings_of(Config)]
    assert parameters["steps"].default == 64
    for setting in settings_of(Config).values():
        assert parameters[setting.name].annotation == setting.type
        assert repr(parameters[setting.name].default) == "the compiled model's own"


def test_constructors_show_plain_types() -> None:
    parameters = inspect.signature(Config).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(Config)]
    assert parameters["budget"].annotation == int | None
    assert parameters["ratio"].default == 0.9


SNIPPET = """
import inertia_fx
from inertia_fx import verify
class Net: ...
reveal_type(inertia_fx.compile)
reveal_type(inertia_fx.compile(Net(), ratio=0.5, backend="eager"))
reveal_type(verify.check)
reveal_type(inertia_fx.Config().scorer)
inertia_fx.compile(Net(), inertia_fx.Config(), regions=False)
inertia_fx.compile(Net(), ration=0.5)
inertia_fx.compile(Net(), pool_width="wide")
verify.check(Net(), [1], steps=2, scorer="keys")
inertia_fx.Config(alpha=[])
"""


def test_a_static_checker_sees_every_setting(tmp_path: pathlib.Path) -> None:
    """mypy on a snippet; pyright reads the same ParamSpec."""
    (tmp_path / "tree").mkdir()
    package = tmp_path / "tree" / "inertia_fx"
    package.mkdir()
    for entry in (ROOT / "inertia_fx").iterdir():
        (package / entry.name).symlink_to(entry)
    for name in ("passes", "kernels", "verify"):
        (package / name).symlink_to(ROOT / name)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nignore_missing_imports = True\n"
        "[mypy-torch.*,transformers.*,sympy.*,mpmath.*,scipy.*,matplotlib.*,numpy.*,rich.*,typer.*]\nfollow_imports = skip\n"
        "[mypy-inertia_fx.*]\nignore_errors = True\n"
    )
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--no-incremental", "snippet.py"]
    environment = os.environ | {"MYPYPATH": str(tmp_path / "tree")}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    revealed = [line.partition("Revealed type is ")[2] for line in lines if "Revealed" in line]
    ratio = "ratio: float | fractions.Fraction | decimal.Decimal | str ="
    assert len(revealed) == 4, run.stdout + run.stderr
    for signature in (revealed[0], revealed[2]):
        assert ratio in signature
        for name in settings_of(Config):
            assert f"{name}: " in signature
    for name in settings_of(CompilerOptions):
        assert f"{name}: " in revealed[0]
    assert revealed[1] == '"snippet.Net"'  # the model's own class comes back
    assert "inertia_fx.verify.check.report" in revealed[2].rpartition("->")[2]
    assert revealed[3] == "\"Literal['attention'] | Literal['vnorm'] | Literal['entropy']\""
    mistakes = [line for line in lines if ": error:" in line]
    assert [line.split(":")[1] for line in mistakes] == ["10", "11", "12", "13"], run.stdout
    assert 'Unexpected keyword argument "ration"' in mistakes[0]
    assert 'did you mean "ratio"?' in mistakes[0]


# ---------------------------------------------------------------------- unknown names, both at once


@pytest.mark.parametrize(
    ("call", "function", "near"),
    [
        (lambda: inertia_fx.compile(object(), ration=0.9), "inertia_fx.compile", "ratio"),  # type: ignore[call-arg]
        (lambda: inertia_fx.compile(object(), refresh=4), "inertia_fx.compile", "refresh_every"),  # type: ignore[call-arg]
        (lambda: Config(alpha_times=0.9), "Config", "alpha_time"),  # type: ignore[call-arg]
        (lambda: CompilerOptions(bakend="eager"), "CompilerOptions", "backend"),  # type: ignore[call-arg]
        (lambda: dataclasses.replace(Config(), budgets=3), "Config", "budget"),  # type: ignore[call-arg]
        (lambda: verify.check(None, [1], pool_with=3), "check", "pool_width"),  # type: ignore[call-arg]
    ],
)
def test_an_unknown_setting_is_refused_with_the_nearest_one(call: Any, function: str, near: str) -> None:
    with pytest.raises(errors.UnknownSettingError) as caught:
        call()
    said = str(caught.value)
    assert said.startswith(f"{function}() got an unexpected keyword argument ")
    assert f"Did you mean {near!r}?" in said
    known = {Config: settings_of(Config), CompilerOptions: settings_of(CompilerOptions)}
    for name in known[CompilerOptions if function == "CompilerOptions" else Config]:
        assert name in said
    for kind in (errors.ConfigError, ValueError, TypeError):
        assert isinstance(caught.value, kind)


def test_a_name_like_no_setting_gets_the_list_alone() -> None:
    with pytest.raises(errors.UnknownSettingError, match=r"argument 'zzz'\. It takes ratio, alpha, "):
        Config(zzz=1)  # type: ignore[call-arg]


def test_a_config_is_taken_as_it_is() -> None:
    config = Config(ratio=0.5, pool_width=3)
    for compiled in (
        inertia_fx.compile(models.llama(1), config, backend="eager"),
        inertia_fx.compile(models.llama(1), config=config, backend="eager"),
    ):
        assert compiled._inertia.config is config
        assert compiled._inertia.compiler == CompilerOptions(backend="eager")


def test_config_and_settings_exclude_each_other() -> None:
    with pytest.raises(
        errors.ConfigError, match=r"and ratio=0\.9 both say what to keep.*dataclasses\.replace\(config, ratio=0\.9\)"
    ):
        inertia_fx.compile(object(), Config(), ratio=0.9)
    with pytest.raises(errors.ConfigError, match=r"config=0\.9 is not an inertia_fx\.Config"):
        inertia_fx.compile(object(), 0.9)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"regions": 1}, "regions=1 is neither True nor False"),
        ({"warm_start": None}, "warm_start=None is neither True nor False"),
        ({"warm_start": True, "backend": "eager"}, "warm_start=True keeps what Inductor compiles with its default"),
        ({"warm_start": True, "options": {"freezing": True}}, "leave backend, mode and options out"),
        ({"mode": "fast"}, "mode='fast' is unknown"),
        ({"options": {"nonsense": 1}}, r"options\['nonsense'\] is not an Inductor setting"),
        ({"backend": 3}, "backend=3 is neither a name nor a callable"),
    ],
)
def test_bad_compiler_options(options: dict[str, Any], message: str) -> None:
    for call in (lambda: CompilerOptions(**options), lambda: inertia_fx.compile(object(), **options)):
        with pytest.raises(errors.ConfigError, match=message):
            call()


# ---------------------------------------------------------------------- the README


def test_the_readmes_table_is_the_fields() -> None:
    """A row for each setting: name, default, summary. What it has to be is in the message of the assertion."""

    def shown(value: object) -> str:
        return "`None`" if value is None else f'`"{value}"`' if isinstance(value, str) else str(value)

    settings = [*settings_of(Config).values(), *settings_of(CompilerOptions).values()]
    expect = [f"| `{setting.name}` | {shown(setting.default)} | {setting.summary} |" for setting in settings]
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("| `ratio` |"))
    table = list(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))
    assert table == expect, "\n".join(expect)
