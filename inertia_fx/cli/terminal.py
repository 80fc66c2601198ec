"""Talk to the terminal: errors in red, a line for each stage of what takes long."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from transformers.utils import logging as transformers_logging

from ..errors import InertiaError


@contextlib.contextmanager
def errors(status: int = 1) -> Iterator[None]:
    """Print an error of ours as a message in red instead of a traceback, and exit with this status."""
    try:
        yield
    except InertiaError as error:
        Console(file=sys.stderr).print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(status) from None


@contextlib.contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Show on stderr a line with a spinner and the time it has taken for each stage; the finished ones stay."""
    # Bound to today's stderr: while a model converts, what else goes there is thrown away.
    console = Console(file=sys.stderr)
    with _quiet_transformers():
        if not console.is_terminal:
            yield lambda stage: console.print(Text(f"{stage} ..."), soft_wrap=True)
            return
        spinner = SpinnerColumn("line", finished_text="✓" if is_unicode(console) else "+")
        with Progress(
            spinner, TextColumn("{task.description}", markup=False), TimeElapsedColumn(), console=console
        ) as bars:
            running: list[Any] = []

            def begin(stage: str) -> None:
                finish()
                running.append(bars.add_task(stage, total=1))

            def finish() -> None:
                while running:
                    bars.update(running.pop(), completed=1)

            yield begin
            finish()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Switch off its progress bars and warnings, which would be drawn into ours."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def is_unicode(console: Console) -> bool:
    """Tell whether a console takes more than ASCII."""
    return console.encoding.lower().startswith("utf")
