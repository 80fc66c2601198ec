"""`inertia-fx verify` without the terminal: what is refused before anything slow begins, the run, the files."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any

import torch

from .. import api, verify
from ..backend import check_inner
from ..config import Config
from ..errors import ConfigError
from ..verify import Report
from ..verify.optional import require
from . import demo
from .checkpoint import Progress

TOKENS = 1000
"""Length of the needle prompt that is taken when none is given."""


@dataclasses.dataclass(frozen=True)
class Task:
    """What the user asked for, checked.

    Attributes:
        text: the prompt; ``None`` is the demo's needle prompt of about `tokens` tokens.
        settings: of :class:`Config`, those that were given.
    """

    text: str | None
    tokens: int
    steps: int
    backend: str
    settings: dict[str, Any]
    json: pathlib.Path | None
    plots: pathlib.Path | None


def prepare(
    *,
    prompt: str | None,
    prompt_file: pathlib.Path | None,
    tokens: int | None,
    steps: int,
    backend: str,
    json: pathlib.Path | None,
    plots: pathlib.Path | None,
    refresh_every: str | None,
    **settings: Any,
) -> Task:
    """The task, or a :class:`ConfigError`. A setting that is ``None`` was not given."""
    require("scipy", "verify")
    given = {name: value for name, value in settings.items() if value is not None}
    if refresh_every is not None:
        given["refresh_every"] = _refresh_every(refresh_every)
    Config(**given)
    check_inner(backend, None, None)
    if steps < 1:
        raise ConfigError(f"steps={steps} is below 1: there is nothing to check without a decode step.")
    if prompt is not None and prompt_file is not None:
        raise ConfigError("prompt and prompt-file exclude each other: pass one of them.")
    text = prompt if prompt_file is None else _read(prompt_file)
    if text is not None and tokens is not None:
        raise ConfigError(f"tokens={tokens} is the length of the needle prompt: leave it out beside a prompt.")
    tokens = TOKENS if tokens is None else tokens
    if tokens < demo.SHORTEST:
        raise ConfigError(f"tokens={tokens} is too short a text to hide a number in: pass at least {demo.SHORTEST}.")
    if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
        raise ConfigError(f"json={json} is not a file in an existing folder: pass a path such as report.json.")
    if plots is not None and not _existing(plots).is_dir():
        raise ConfigError(f"plots={plots} is a file, or below one: pass a folder, it is made if missing.")
    for name, path in (("json", json), ("plots", plots)):
        if path is not None and not os.access(_existing(path), os.W_OK):
            raise ConfigError(f"{name}={path} cannot be written to: its folder or file is write-protected.")
    return Task(text, tokens, steps, backend, given, json, plots)


def run(task: Task, model: Any, tokenizer: Any, on_progress: Progress) -> Report:
    """Compile the model and check it.

    Raises:
        ConfigError: the prompt has no tokens.
        InertiaError: the model cannot be compiled or checked.
    """
    needle = task.text is None
    ids = demo.build_prompt(tokenizer, task.tokens).ids if needle else list(tokenizer(task.text).input_ids)
    if not ids:
        raise ConfigError("The prompt has no tokens: pass some text.")
    compiled = api.compile(model, backend=task.backend)
    inputs = torch.tensor([ids], device=model.device)
    return verify.check(compiled, inputs, steps=task.steps, on_progress=on_progress, **task.settings)


def write(task: Task, report: Report) -> list[str]:
    """Write the files that were asked for. Returns a line about each."""
    lines = []
    for name, path, save in (("JSON", task.json, report.save), ("Pictures", task.plots, report.plot)):
        if path is None:
            continue
        try:
            save(path)
        except OSError as failure:
            raise ConfigError(f"{path} cannot be written: {failure}") from failure
        lines.append(f"{name}: {path}")
    return lines


def _refresh_every(value: str) -> int | None:
    if value == "never":
        return None
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f'refresh-every={value!r} is neither a whole number nor "never" (Score-Free).') from None


def _read(path: pathlib.Path) -> str:
    try:
        return path.read_bytes().decode("utf-8")  # line ends as they stand
    except (OSError, UnicodeDecodeError) as failure:
        raise ConfigError(f"prompt-file={path} cannot be read as UTF-8 text: {failure}") from None


def _existing(path: pathlib.Path) -> pathlib.Path:
    """The path itself or the nearest folder above it that exists."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if place.exists())
