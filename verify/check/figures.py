"""Lay out the report's figures: headings, stacked panels, labels at the end of curves."""

from __future__ import annotations

import collections
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from .report_data import ReportData

INK, GREY = "#1f3a5f", "#6b7280"
LEFT, BOTTOM = 0.075, 0.10
"""Margins, as fractions of the figure."""


def new_figure(title: str, subtitle: str) -> tuple[Any, float]:
    """Return a figure with its heading, and the height at which there is room for axes and their titles."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.5), dpi=100)
    FigureCanvasAgg(figure)
    height = 0.965
    styles: tuple[dict[str, Any], ...] = ({"size": 14, "weight": "bold"}, {"size": 10.5, "color": GREY})
    for words, columns, line, style in zip((title, subtitle), (86, 128), (0.042, 0.03), styles, strict=True):
        lines = textwrap.wrap(words[:1].upper() + words[1:], columns, break_on_hyphens=False)
        figure.text(LEFT, height, "\n".join(lines), va="top", linespacing=1.25, parse_math=False, **style)
        height -= line * len(lines) + 0.006
    return figure, height - 0.055


def stacked_panels(
    report: ReportData, title: str, subtitle: str, panels: Sequence[str], last_label: str
) -> tuple[Any, list[Any]]:
    """Stack axes over the same steps, with room for labels at their right."""
    figure, top = new_figure(title, subtitle)
    over = f", mean of {len(report.rows)} rows" if len(report.rows) > 1 else ""
    grid = figure.add_gridspec(len(panels), 1, left=LEFT, right=0.87, top=top, bottom=BOTTOM, hspace=0.32)
    axes = [figure.add_subplot(grid[index]) for index in range(len(panels))]
    for panel, name in zip(axes, panels, strict=True):
        panel.set_title(name + over, size=11, loc="left", pad=5)
        panel.tick_params(axis="x", labelbottom=panel is axes[-1])
        hide_frame(panel)
    axes[-1].set_xlabel(last_label)
    return figure, axes


def hide_frame(axes: Any) -> None:
    """Hide the frame at the top and at the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def whole_numbers(axis: Any) -> None:
    """Tick an axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))


def write_instead(axes: Any, said: str) -> None:
    """Write words into axes that have nothing to draw."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_xlabel("")
    for spine in axes.spines.values():
        spine.set_visible(False)
    words = "\n".join(textwrap.wrap(said, 90))
    axes.text(0.5, 0.5, words, color=GREY, size=12, ha="center", va="center", transform=axes.transAxes)


def label_ends(axes: Any, labels: Sequence[tuple[float, str, Any]], size: float = 10) -> None:
    """Label (y, words, colour) at the right edge; labels that would overlap are moved apart, as little as it takes."""
    gap = 1.25 * size * axes.figure.dpi / 72 / axes.get_window_extent().height
    inverse = axes.transData + axes.transAxes.inverted()
    wanted = sorted(
        ((float(inverse.transform((1, y))[1]), words, colour) for y, words, colour in labels), key=lambda w: w[0]
    )
    blocks: list[list[float]] = []  # runs of labels that touch, without their gaps
    for index, (place, _, _) in enumerate(wanted):
        blocks.append([place - index * gap])
        while len(blocks) > 1 and statistics.fmean(blocks[-2]) > statistics.fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    places = [statistics.fmean(block) for block in blocks for _ in block]
    for index, (place, (_, words, colour)) in enumerate(zip(places, wanted, strict=True)):
        inside = max(0.0, min(place, 1 - (len(places) - 1) * gap)) + index * gap
        axes.text(1.012, inside, words, color=colour, size=size, va="center", transform=axes.transAxes)


def mean_by_step(rows: Iterable[Sequence[float]], steps: int) -> dict[int, float]:
    """Return the mean over the rows at each step; every list ends at the last step."""
    seen: dict[int, list[float]] = collections.defaultdict(list)
    for values in rows:
        for step, value in enumerate(values, steps - len(values) + 1):
            seen[step].append(value)
    return {step: statistics.fmean(seen[step]) for step in sorted(seen)}


def tint(colour: str, part: float) -> tuple[float, ...]:
    """Mix `part` of a colour with white."""
    from matplotlib.colors import to_rgb

    return tuple(part * channel + 1 - part for channel in to_rgb(colour))
