"""Print and plot the report of :func:`inertia_fx.verify.check`."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from .console import print_report
from .plots import plot_report
from .report_data import ReportData

if TYPE_CHECKING:
    from rich.console import Console


@dataclasses.dataclass
class Report(ReportData):
    """What `check` returns: :class:`.report_data.ReportData` that prints and plots itself."""

    def print(self, console: Console | None = None) -> None:
        """Print the report with rich, readable at 80 columns.

        Args:
            console: where to; default the terminal.

        Raises:
            ConfigError: rich is not installed.
        """
        print_report(self, console)

    def plot(self, folder: str | pathlib.Path) -> list[pathlib.Path]:
        """Plot retention, churn, ranking and divergence as PNGs.

        Args:
            folder: where to; made if missing.

        Returns:
            The paths of the four files.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        return plot_report(self, folder)
