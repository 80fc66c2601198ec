"""Tables that go to the terminal and, as Markdown, to benchmarks/results/."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import rich.box
from rich.console import Console
from rich.table import Table

RESULTS = pathlib.Path(__file__).parent / "results"


class Results:
    """What a benchmark found: an introduction, and tables that are printed as each is complete.

    Args:
        name: of the file in benchmarks/results/, without its ending.
        introduction: lines of Markdown.
    """

    def __init__(self, name: str, *introduction: str) -> None:
        self.name = name
        self.lines = list(introduction)
        self.console = Console()
        self.table = Table()

    def begin(self, title: str, columns: Sequence[str], left: Sequence[str] = (), heading: str | None = None) -> None:
        """A new table. Columns are aligned right, but for those named in `left`; `heading` is Markdown's alone."""
        self.table = Table(title=title, box=rich.box.SIMPLE_HEAD, padding=0, pad_edge=False)
        for column in columns:
            self.table.add_column(column, justify="left" if column in left else "right")
        if heading is not None:
            self.lines += ["", f"## {heading}"]
        self.lines += ["", f"| {' | '.join(columns)} |", f"| {' | '.join('---' for _ in columns)} |"]

    def row(self, *cells: str) -> None:
        self.table.add_row(*cells)
        self.lines.append(f"| {' | '.join(cells)} |")

    def end(self) -> None:
        self.console.print(self.table)

    def write(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"{self.name}.md"
        target.write_text("\n".join(self.lines) + "\n")
        self.console.print(f"written to {target}")
