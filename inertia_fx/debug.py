"""Reports of what the passes did to a decode graph: matches as data, the graph around every pass, all of it in a folder.

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

log = logging.getLogger("inertia_fx")


@dataclasses.dataclass(frozen=True)
class MatchRecord:
    """One thing that a pass matched, or looked at and left.

    Attributes:
        matched: False if it was left as it is.
        detail: what was done, or why nothing was.
        layer: the cache layer it belongs to, if it belongs to one.
        node: name of the graph node it is about.
        into: name of what stands in its place.
    """

    matched: bool
    detail: str
    layer: int | None = None
    node: str | None = None
    into: str | None = None

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}: "
        arrow = " -> " if self.node is not None and self.into is not None else ""
        what = ("" if self.node is None else f"'{self.node}'") + arrow + ("" if self.into is None else f"'{self.into}'")
        return where + what + (": " if what and self.detail else "") + self.detail


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass did.

    Attributes:
        name: the pass.
        matched, skipped: its records.
        seconds: what it took, the check of the graph after it included.
        before, after: the graph as readable Python; empty unless somebody records or traces.
    """

    name: str
    matched: tuple[MatchRecord, ...]
    skipped: tuple[MatchRecord, ...] = ()
    seconds: float = 0.0
    before: str = ""
    after: str = ""

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.matched)} matched, {len(self.skipped)} skipped"]
        lines += [f"  + {record}" for record in self.matched]
        lines += [f"  - {record}" for record in self.skipped]
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """One rewritten decode graph.

    Attributes:
        results: what each pass did, in order.
        before, after: the graph as readable Python, as Dynamo traced it and as it went to the inner compiler.
        before_graph, after_graph: the same as graphs, to look things up in.
    """

    results: tuple[PassResult, ...]
    before: str
    after: str
    before_graph: fx.Graph | None = None
    after_graph: fx.Graph | None = None

    def result(self, name: str) -> PassResult:
        """Look up what one pass did.

        Raises:
            KeyError: it was not run.
        """
        for result in self.results:
            if result.name == name:
                return result
        raise KeyError(f"{name} was not run; there are {', '.join(result.name for result in self.results)}")

    def dump(self, folder: str | pathlib.Path) -> pathlib.Path:
        """Write the report, the graph before and after, and the graph around every pass into `folder`; returns it.

        The files are `report.txt`, `before.py`, `after.py` and `passes/01_find_attention.py` and so on, each with the
        graph as that pass left it.
        """
        folder = pathlib.Path(folder)
        (folder / "passes").mkdir(parents=True, exist_ok=True)
        lines = [f"{result}\n  ({result.seconds * 1e3:.0f} ms)" for result in self.results]
        (folder / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "before.py").write_text(self.before, encoding="utf-8")
        (folder / "after.py").write_text(self.after, encoding="utf-8")
        for number, result in enumerate(self.results, 1):
            (folder / "passes" / f"{number:02}_{result.name}.py").write_text(result.after, encoding="utf-8")
        return folder


_listeners: contextvars.ContextVar[tuple[list[Explanation], ...]] = contextvars.ContextVar(
    "inertia_fx_listeners", default=()
)


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
    """Tell whether there is a :func:`record` block around us."""
    return bool(_listeners.get())


def publish(explanation: Explanation) -> None:
    """Hand an explanation to every :func:`record` block around the compile, and to the log."""
    for result in explanation.results:
        log.info("%s", result)
    for listener in _listeners.get():
        listener.append(explanation)


_watcher: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar(
    "inertia_fx_watcher", default=None
)


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
    """Print the graph as Python with shapes, as far as they are known."""
    return gm.print_readable(print_output=False, include_stride=False, include_device=False)
