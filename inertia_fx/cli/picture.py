"""Draw which positions of the text the demo's cache keeps after each decode step."""

from __future__ import annotations

import pathlib
from typing import Any

from .demo import Result

_GONE = {"text": "#f3f4f6", "needle": "#fde3d3", "answer": "#dff3e4"}
_KEPT = {"text": "#1f3a5f", "needle": "#d1410c", "answer": "#15803d"}


def draw(result: Result, path: pathlib.Path) -> None:
    """Draw which positions are kept after each decode step, as a PNG of 1200 x 700 pixels."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    prompt, inertia = len(result.prompt.ids), result.inertia
    total, needle = prompt + len(inertia.tokens), result.prompt.needle
    figure = Figure(figsize=(12, 7), dpi=100)
    FigureCanvasAgg(figure)
    share = f"{inertia.cached:,} of {total:,} tokens ({inertia.cached / total:.0%}) in the cache at the end"
    figure.text(0.065, 0.945, f"inertia_fx, ratio {result.config.ratio} (evicted): {share}", size=15, weight="bold")
    verdict = "right" if inertia.right else "wrong"
    figure.text(
        0.065, 0.908, f"A dark mark is a position that is kept. Answer ({verdict}): “{inertia.answer}”", size=11
    )

    whole = figure.add_axes((0.065, 0.47, 0.89, 0.36))
    _grid(whole, result, range(total), columns=1068)
    whole.set_xlabel("position in the text", labelpad=2)
    whole.set_ylabel("decode step")
    for area, name in ((needle, "needle"), (range(prompt, total), "answer")):
        colour, middle = _KEPT[name], (area[0] + area[-1]) / 2
        whole.text(middle, -0.6, f"{name}\n▾", color=colour, ha="center", va="bottom", size=11, linespacing=0.9)

    before, after = max(0, needle.start - 6), min(total, needle.stop + 6)
    for left, width, area, title in (
        (0.065, 0.38, range(before, after), "the needle and its surroundings"),
        (0.51, 0.445, range(max(0, prompt - 16), total), "the end of the prompt, and the answer"),
    ):
        part = figure.add_axes((left, 0.13, width, 0.22))
        _grid(part, result, area, columns=len(area))
        part.set_title(title, size=11, loc="left", pad=4)
        part.set_xticks(
            list(area), [_label(result.words[position]) for position in area], rotation=90, size=8, parse_math=False
        )
        part.tick_params(axis="x", length=0)
    figure.savefig(path, format="png")


def _grid(axes: Any, result: Result, area: range, columns: int) -> None:
    """Draw a row per step over the positions of `area`. Where several share a column, one that is kept shows."""
    import numpy
    from matplotlib.colors import to_rgb

    prompt, needle = len(result.prompt.ids), result.prompt.needle
    columns = min(columns, len(area))
    column = numpy.arange(len(area)) * columns // len(area)
    kind = numpy.array([2 if position >= prompt else int(position in needle) for position in area])
    rows = [list(range(prompt)), *result.inertia.kept]
    shown = numpy.zeros((len(rows), columns), int)  # places in the palette; in a shared column the highest wins
    for row, kept in zip(shown, rows, strict=True):
        numpy.maximum.at(row, column, kind + len(_GONE) * numpy.isin(area, kept))
    palette = numpy.array([to_rgb(colour) for colour in (*_GONE.values(), *_KEPT.values())])
    image = palette[shown]
    edges = (area.start - 0.5, area.stop - 0.5, len(rows) - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=edges)
    ticks = [0, *range(5, len(rows), 5)]
    axes.set_yticks(ticks, ["prompt", *map(str, ticks[1:])], size=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _label(word: str) -> str:
    """Write a token as an axis label, line ends visible."""
    return word.replace("\n", "↵").strip()[:14] or "·"
