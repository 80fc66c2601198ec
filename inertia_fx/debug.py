"""What the passes did to a decode graph: per-pass reports, the graph before and after, all of it in a folder."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import pathlib
from collections.abc import Iterator

from torch import fx

from .passes import PassResult

log = logging.getLogger("inertia_fx")

_listeners: contextvars.ContextVar[tuple[list[Explanation], ...]] = contextvars.ContextVar(
    "inertia_fx_listeners", default=()
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


def publish(explanation: Explanation) -> None:
    """Hand an explanation to every :func:`record` block around the compile, and to the log."""
    for result in explanation.results:
        log.info("%s", result)
    for listener in _listeners.get():
        listener.append(explanation)


def readable(gm: fx.GraphModule) -> str:
    """The graph as Python with shapes, as far as they are known."""
    return gm.print_readable(print_output=False, include_stride=False, include_device=False)
