"""Derive signatures, docstrings and refusals of unknown names from the dataclasses in which settings are written.

A setting is written once, as a field ``name: Annotated[type, Doc("Summary. The rest.")] = default`` of a dataclass
(`inertia_fx.Config`, `inertia_fx.config.CompilerOptions`). What it says is read here for the functions that take it,
for `help()`, for the command line, and for the table in README.md. Static checkers read the same fields, through a
``ParamSpec`` of the dataclass's constructor.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, TypeVar, get_type_hints

from typing_extensions import Doc

from .errors import UnknownSettingError

P = ParamSpec("P")
Result = TypeVar("Result")
Settings = TypeVar("Settings")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of a settings dataclass.

    Attributes:
        type: its annotation, without the text.
        doc: what it says about itself; the first sentence is the summary.
    """

    name: str
    type: Any
    default: Any
    doc: str

    @property
    def summary(self) -> str:
        """The first sentence, without its full stop."""
        return re.split(r"\.(?:\s|$)", self.doc, maxsplit=1)[0]


def settings_of(kind: type) -> Mapping[str, Setting]:
    """Read the settings that a dataclass declares, by name, in order. Fields without a text are not settings."""
    plain, annotated = get_type_hints(kind), get_type_hints(kind, include_extras=True)
    found = {}
    for field in dataclasses.fields(kind):
        texts = [note for note in getattr(annotated[field.name], "__metadata__", ()) if isinstance(note, Doc)]
        if texts:
            found[field.name] = Setting(field.name, plain[field.name], field.default, texts[0].documentation)
    return found


def refuse_unknown(function: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise :class:`UnknownSettingError`, with the nearest known name, unless every given name is known."""
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UnknownSettingError(
                f"{function}() got an unexpected keyword argument {name!r}.{hint} It takes {', '.join(known)}."
            )


def documented(kind: type[Settings]) -> type[Settings]:
    """Complete a settings dataclass: its docstring lists its fields, its constructor refuses other names."""
    constructor = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(constructor)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        refuse_unknown(kind.__name__, given, names)
        constructor(self, *args, **given)

    signature = inspect.signature(constructor)
    texts = settings_of(kind)  # plain types instead of those with a text
    parameters = [
        parameter.replace(annotation=texts[name].type) if name in texts else parameter
        for name, parameter in signature.parameters.items()
    ]
    __init__.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    kind.__init__ = __init__  # type: ignore[method-assign]
    describe(kind, kind)
    return kind


def describe(owner: Any, *kinds: type, default: object = None) -> None:
    """Append to the docstring of a class or function what the settings of `kinds` are.

    Args:
        default: what stands for every setting's own default, if it is another than the field's.
    """
    if not owner.__doc__:  # python -OO
        return
    lines = [inspect.cleandoc(owner.__doc__)]
    for kind in kinds:
        lines += ["", f"Settings ({kind.__name__}):"]
        for setting in settings_of(kind).values():
            shown = setting.default if default is None else default
            text = f"{setting.name}: {setting.doc} (default: {shown!r})"
            lines.append(textwrap.fill(text, 116, initial_indent="    ", subsequent_indent="        "))
    owner.__doc__ = "\n".join(lines)


def takes(
    arguments: Callable[P, Any], *, default: object = None
) -> Callable[[Callable[..., Result]], Callable[P, Result]]:
    """Give a function that is written with ``**settings`` the signature of a dataclass's constructor.

    Static checkers see every field by name, type and default; so do `help()` and `inspect.signature`.

    Args:
        arguments: a dataclass; its fields are the function's parameters.
        default: what `inspect.signature` shows for every setting's default, where the function has its own.
    """
    kind: Any = arguments
    settings = settings_of(kind)

    def decorate(function: Callable[..., Result]) -> Callable[P, Result]:
        signature = inspect.signature(function)
        parameters = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        for setting in settings.values():
            shown = setting.default if default is None else default
            keyword = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(setting.name, keyword, default=shown, annotation=setting.type))
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        describe(function, *reversed(kind.__bases__), default=default)  # the groups, not the class that joins them
        return function

    return decorate
