"""What the passes did to a decode graph: per-pass reports, the graph before and after, all of it in a folder.

And what a compile is doing while it lasts.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import pathlib
from collections.abc import Callable, Iterator

from torch import fx

from .passes import PassResult

log = logging.getLogger("inertia_fx")

_listeners: contextvars.ContextVar[tuple[list[Explanation], ...]] = contextvars.ContextVar(
    "inertia_fx_listeners", default=()
)


_watcher: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "inertia_fx_watcher", default=None
)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One rewritten decode graph.

    Attributes:
        results: what each pass matched and skipped, in order.
        before, after: the graph as readable Python, as Dynamo traced it and as it went to the inner compiler.
    """

    results: tuple[PassResult, ...]
    before: str
    after: str

    def dump(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Write `report.txt`, `before.py` and `after.py` into `folder` (made if missing); returns it."""
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.txt").write_text("\n".join(str(result) for result in self.results) + "\n")
        (folder / "before.py").write_text(self.before)
        (folder / "after.py").write_text(self.after)
        return folder


@contextlib.contextmanager
def record() -> Iterator[list[Explanation]]:
    """Collect an :class:`Explanation` of every decode graph compiled inside the block."""
    collected: list[Explanation] = []
    token = _listeners.set((*_listeners.get(), collected))
    try:
        yield collected
    finally:
        _listeners.reset(token)


def is_recorded() -> bool:
    """Whether there is a :func:`record` block around us."""
    return bool(_listeners.get())


def publish(explanation: Explanation) -> None:
    """Hand an explanation to every :func:`record` block around the compile, and to the log."""
    for result in explanation.results:
        log.info("%s", result)
    for listener in _listeners.get():
        listener.append(explanation)


def stage(words: str) -> None:
    """Tell the log, and :func:`watched` blocks, what is being done from now on."""
    log.info("%s", words)
    watcher = _watcher.get()
    if watcher is not None:
        watcher(words)


@contextlib.contextmanager
def watched(watcher: Callable[[str], None]) -> Iterator[None]:
    """Call `watcher` with every :func:`stage` of the compiles inside the block."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def readable(gm: fx.GraphModule) -> str:
    """The graph as Python with shapes, as far as they are known."""
    return gm.print_readable(print_output=False, include_stride=False, include_device=False)
