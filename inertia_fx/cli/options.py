"""Derive command-line options from settings: name, type, default and text are those of the dataclass's fields."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_args

import typer

from ..errors import ConfigError
from ..settings import Setting, settings_of

Command = TypeVar("Command", bound=Callable[..., Any])

NEVER = "never"
"""How ``None`` is written on the command line, where it is a value of its own and not the default."""


def with_options(kind: type, *names: str) -> Callable[[Command], Command]:
    """Give a command that is written with ``**settings`` an option for each setting of a dataclass.

    Args:
        kind: the dataclass.
        names: of the settings; all of them if none is named.
    """
    settings = settings_of(kind)

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        options = [_option(settings[name]) for name in names or settings]
        command.__signature__ = signature.replace(parameters=[*own, *options])  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *options)}
        return command

    return decorate


def given(kind: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the settings that were given on the command line, and read "never" as ``None``.

    Raises:
        ConfigError: one that takes a number or "never" is neither.
    """
    known = settings_of(kind)
    return {
        name: _number_or_never(name, value) if _may_be_never(known[name]) else value
        for name, value in settings.items()
        if value is not None
    }


def summary(kind: type, name: str) -> str:
    """Return what a setting says about itself, in one line, as the help text of an option."""
    return f"{settings_of(kind)[name].summary}."


def _option(setting: Setting) -> inspect.Parameter:
    """Make an option that is ``None`` unless it is given, and that shows the setting's own default."""
    kinds = get_args(setting.type) or (setting.type,)
    kind: Any = str
    text = f"{setting.summary}."
    if _may_be_never(setting):
        text = text.replace("None", NEVER)
    elif float in kinds:
        kind = float
    elif int in kinds:
        kind = int
    shown = False if setting.default is None else str(setting.default)
    annotation = Annotated[kind | None, typer.Option(help=text, show_default=shown)]
    return inspect.Parameter(setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _may_be_never(setting: Setting) -> bool:
    return type(None) in get_args(setting.type) and setting.default is not None


def _number_or_never(name: str, value: str) -> int | None:
    if value == NEVER:
        return None
    try:
        return int(value)
    except ValueError:
        option = name.replace("_", "-")
        raise ConfigError(f'{option}={value!r} is neither a whole number nor "{NEVER}".') from None
