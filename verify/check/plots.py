"""Plot a report as four pictures with matplotlib, an optional package, imported where it is used."""

from __future__ import annotations

import itertools
import pathlib
import statistics
from typing import Any

from ...optional import require
from .figures import (
    BOTTOM,
    GREY,
    INK,
    LEFT,
    hide_frame,
    label_ends,
    mean_by_step,
    new_figure,
    stacked_panels,
    tint,
    whole_numbers,
    write_instead,
)
from .report_data import ReportData, RowReport
from .wording import plural, share

_GONE, _KEPT = {"prompt": "#f3f4f6", "generated": "#dff3e4"}, {"prompt": "#1f3a5f", "generated": "#15803d"}
_LIMIT, _RAW = "#d1410c", "#f59e0b"


def plot_report(report: ReportData, folder: str | pathlib.Path) -> list[pathlib.Path]:
    """Plot retention.png, churn.png, ranking.png and divergence.png (1100 x 650) into a folder, made if missing.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    require("matplotlib", extra="verify", purpose="Showing a report")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for draw in (_retention, _churn, _ranking, _divergence):
        paths.append(folder / f"{draw.__name__[1:]}.png")
        draw(report).savefig(paths[-1], format="png")
    return paths


def _xy(curve: dict[int, float]) -> tuple[list[int], list[float]]:
    return list(curve), list(curve.values())


def _which(report: ReportData, index: int) -> str:
    return f"Row {index} of {len(report.rows)}: " if len(report.rows) > 1 else ""


def _retention(report: ReportData) -> Any:
    row = report.rows[0]
    prompt, steps = row.prompt_tokens, len(row.retained)
    total, kept = prompt + steps, row.retained[-1]
    generated = sum(position >= prompt for position in kept)
    wide, narrow = 620, 310  # pixels
    figure, top = new_figure(
        f"{_which(report, 0)}after {plural(steps, 'decode step')} {len(kept):,} of {total:,} tokens are kept: "
        f"{len(kept) - generated:,} of the prompt, {generated:,} generated",
        "A dark mark is a position that is kept"
        + (", where a column holds several, the darker the more of them. " if total > wide else ". ")
        + f"{report.model}, {report.settings}",
    )
    end = range(max(0, prompt - max(16, steps // 2)), total)
    grid = figure.add_gridspec(
        1, 2, left=LEFT, right=0.975, top=top - 0.01, bottom=BOTTOM, width_ratios=(2, 1), wspace=0.1
    )
    for place, area, columns in ((grid[0], range(total), wide), (grid[1], end, narrow)):
        axes = figure.add_subplot(place)
        per_column = _positions(axes, row, area, columns)
        axes.set_xlabel("position in the text" + (f" ({per_column:.1f} per column)" if per_column > 1 else ""))
        axes.set_title("prompt", color=_KEPT["prompt"], size=11, loc="left", pad=4)
        axes.set_title("generated", color=_KEPT["generated"], size=11, loc="right", pad=4)
    figure.axes[0].set_ylabel("decode step (0: the prompt)")
    return figure


def _positions(axes: Any, row: RowReport, area: range, columns: int) -> float:
    """One line per step. A column of several positions is the darker the more of them are kept. Returns how many."""
    import numpy
    from matplotlib.colors import to_rgb

    columns = min(columns, len(area))
    column = numpy.arange(len(area)) * columns // len(area)
    size = numpy.bincount(column)[:, None]
    generated = numpy.bincount(column, numpy.array(area) >= row.prompt_tokens)[:, None] / size
    gone, kept = (
        (1 - generated) * to_rgb(colours["prompt"]) + generated * to_rgb(colours["generated"])
        for colours in (_GONE, _KEPT)
    )
    lines = [list(range(row.prompt_tokens)), *row.retained]
    image = numpy.empty((len(lines), columns, 3), dtype=numpy.float32)
    for line, positions in zip(image, lines, strict=True):
        shown = [position - area.start for position in positions if position in area]
        full = numpy.bincount(column[shown], minlength=columns)[:, None] / size
        line[:] = gone + (kept - gone) * numpy.sqrt(full)  # a single one of a few must still be seen
    edges = (area.start - 0.5, area.stop - 0.5, len(lines) - 0.5, -0.5)
    axes.imshow(image, aspect="auto", interpolation="nearest", extent=edges)
    whole_numbers(axes.xaxis)
    whole_numbers(axes.yaxis)
    hide_frame(axes)
    return len(area) / columns


def _churn(report: ReportData) -> Any:
    steps, rows = report.steps, report.rows
    ceiling = max(row.churn_ceiling for row in rows)
    worst = max((value - row.churn_ceiling for row in rows for value in row.churn), default=-ceiling)
    changes = [value for row in rows for value in row.churn]
    if not changes:
        title = "No step after a first eviction, so there is no churn of the kept set"
    elif worst > 1e-9:
        title = f"More than one kept token changes in a step: churn {max(changes):.3g}"
    else:
        title = f"At most one kept token changes per step: churn {max(changes):.3g}"
    title += f" (ceiling 2/(B+1) = {ceiling:.3g})" if changes else ""
    top = [mean_by_step((of(row) for row in rows), steps) for of in (lambda r: r.raw_churn, lambda r: r.smoothed_churn)]
    subtitle = "Churn of a set of tokens: 1 - Jaccard with the same set one step before."
    if all(top):
        raw, smoothed = (statistics.fmean(values.values()) for values in top)
        subtitle += (
            f" With the full cache the best B change by {raw:.3g} per step by raw score, {smoothed:.3g} smoothed."
        )
    figure, (first, second) = stacked_panels(
        report,
        title,
        subtitle,
        ["tokens kept by the compiled model", "full cache: the prompt's best B tokens by score"],
        "decode step",
    )
    values = mean_by_step((row.churn for row in rows), steps)
    if values:
        first.vlines(list(values), 0, list(values.values()), color=INK, linewidth=max(0.8, min(6.0, 400 / steps)))
        first.axhline(ceiling, color=_LIMIT, linestyle="--")
        first.set_ylim(0, 1.25 * max(*values.values(), ceiling))
        average = statistics.fmean(changes)
        label_ends(first, [(ceiling, "2/(B+1)", _LIMIT), (average, f"mean {average:.3g}", INK)])
    labels = []
    for curve, words, colour, width in zip(
        top, ("raw", "smoothed"), (_RAW, INK), (4.0 if steps < 200 else 2.0, 1.4), strict=True
    ):
        if curve:
            second.plot(*_xy(curve), color=colour, linewidth=width, marker="." if steps < 4 else "")
            labels.append((list(curve.values())[-1], words, colour))
    if labels:
        second.set_ylim(0, max(0.05, 1.1 * max(max(curve.values()) for curve in top if curve)))
        label_ends(second, labels)
    for axes, shown in ((first, values), (second, labels)):
        if shown:
            axes.set_ylabel("churn, fraction")
            axes.set_xlim(0.5, steps + 0.5)
            whole_numbers(axes.xaxis)
        else:
            write_instead(axes, "Nothing to compare: it takes a second step after the first eviction.")
    return figure


def _ranking(report: ReportData) -> Any:
    from matplotlib.ticker import LogLocator, NullLocator

    index = next((index for index, row in enumerate(report.rows) if row.ranking is not None), 0)
    row = report.rows[index]
    ranking = row.ranking
    if ranking is None or not ranking.positions:
        figure, top = new_figure(f"{_which(report, index)}no tokens to rank around the budget", "")
        holds = f"The budget of {row.budget:,} tokens holds the whole prompt of {row.prompt_tokens:,}."
        why = holds if row.budget >= row.prompt_tokens else row.why_no_stability or "There are no ranks in this report."
        write_instead(figure.add_axes((LEFT, BOTTOM, 0.9, top - BOTTOM)), why)
        return figure
    kept = [[[rank < ranking.budget for rank in step] for step in ranks] for ranks in (ranking.raw, ranking.smoothed)]
    raw, smoothed = (
        sum(a != b for before, after in itertools.pairwise(steps) for a, b in zip(before, after, strict=True))
        for steps in kept
    )
    tokens = plural(len(ranking.positions), "token")
    bound = f"No bound: {row.why_no_stability}."
    if row.stability is not None:
        observed, allowed = share(row.stability.observed), share(row.stability.bound)
        bound = f"Pairs misranked: {observed}, bound {allowed}."
    figure, top = new_figure(
        f"{_which(report, index)}{tokens} around the budget cross it {raw:,} times by raw score, "
        f"{smoothed:,} by smoothed score",
        "Full cache; rank 1 is the most useful token of the prompt. At the right, positions in the text: blue ones end"
        f" within the budget by smoothed score, orange ones beyond it. {bound}",
    )
    grid = figure.add_gridspec(1, 2, left=LEFT, right=0.92, top=top, bottom=BOTTOM, wspace=0.06)
    lowest, highest = (of(of(step) for step in ranking.raw + ranking.smoothed) + 1 for of in (min, max))
    lowest, highest = min(lowest, ranking.budget), max(highest, ranking.budget + 1)
    for place, name, ranks in ((grid[0], "raw", ranking.raw), (grid[1], "smoothed", ranking.smoothed)):
        axes = figure.add_subplot(place)
        axes.set_title(f"rank by {name} score", size=11, loc="left", pad=5)
        if highest > 8 * lowest:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_ylim(highest * 1.15, lowest / 1.15)
        else:
            whole_numbers(axes.yaxis)
            axes.set_ylim(highest + 1, lowest - 1)
        labels = []
        for token, position in enumerate(ranking.positions):
            line = [step[token] + 1 for step in ranks]
            shade = 0.55 + 0.45 * (token + 1) / len(ranking.positions)
            colour = tint(INK if kept[1][-1][token] else _LIMIT, shade)
            axes.plot(range(1, len(line) + 1), line, color=colour, linewidth=1.3, marker="." if len(line) < 4 else "")
            labels.append((line[-1], f"{position:,}", colour))
        axes.axhline(ranking.budget + 0.5, color="black", linewidth=1, linestyle="--")
        axes.set_xlabel("decode step")
        axes.set_xlim(0.5, len(ranks) + 0.5)
        whole_numbers(axes.xaxis)
        hide_frame(axes)
        if name == "raw":
            axes.set_ylabel("rank among the prompt's tokens")
            axes.text(
                0.01, ranking.budget + 0.5, f"budget: {ranking.budget:,}", va="bottom", size=10,
                transform=axes.get_yaxis_transform(), bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            )  # fmt: skip
        else:
            axes.tick_params(axis="y", which="both", labelleft=False)
            label_ends(axes, labels, size=9)
    return figure


def _divergence(report: ReportData) -> Any:
    steps, rows = report.steps, report.rows
    survival = report.survival()
    if len(rows) == 1:
        first = rows[0].first_divergence
        free = f"The first {first:,} generated tokens are the full cache's, the next one is not" if first else ""
        free = {
            None: f"All {steps + 1:,} generated tokens are the full cache's",
            0: "The first generated token is not the full cache's",
            1: "The first generated token is the full cache's, the next one is not",
        }.get(first, free)
    else:
        same = sum(row.first_divergence is None for row in rows)
        free = f"{same} of {len(rows)} rows say what the full cache says, to the end"
    wrong = mean_by_step((row.disagreement for row in rows), steps)
    kl = mean_by_step((row.kl for row in rows), steps)
    rate = list(wrong.values())[-1] / steps
    figure, panels = stacked_panels(
        report,
        f"{free}; teacher-forced, {share(rate)} of steps choose another token",
        f"Full cache against evicted, {plural(steps, 'decode step')}. Teacher-forced: both are given the full cache's"
        " tokens, so that one slip does not count again in later steps."
        + (" Grey: each row." if len(rows) > 1 else ""),
        [
            "S(t): still word for word what the full cache says",
            "teacher-forced: steps so far that choose another token",
            "teacher-forced: KL(full || evicted) of the next token",
        ],
        "decode step (0: the prompt's own next token)",
    )
    panels[0].fill_between(range(steps + 1), survival, step="mid", color=tint(INK, 0.2), linewidth=0)
    panels[0].step(range(steps + 1), survival, where="mid", color=INK)
    panels[0].set_ylim(0, 1.08)
    panels[0].set_ylabel("S(t)")
    label_ends(panels[0], [(survival[-1], f"{survival[-1]:.2g}", INK)])
    for axes, each, mean, least in (
        (panels[1], [row.disagreement for row in rows], wrong, 1.0),
        (panels[2], [row.kl for row in rows], kl, 1e-3),
    ):
        style = {"drawstyle": "steps-mid" if axes is panels[1] else "default", "marker": "." if steps < 4 else ""}
        for values in each if len(rows) > 1 else []:
            axes.plot(range(1, len(values) + 1), values, color="#d1d5db", linewidth=1, **style)
        axes.plot(*_xy(mean), color=INK, **style)
        axes.set_ylim(0, 1.1 * max(least, *map(max, each)))
    whole_numbers(panels[1].yaxis)
    panels[1].set_ylabel("steps")
    panels[2].set_ylabel("nats")
    last = list(wrong.values())[-1]
    label_ends(panels[1], [(last, f"{last:.3g} of {steps:,}", INK)])
    average = statistics.fmean(kl.values())
    panels[2].axhline(average, color=GREY, linewidth=1, linestyle="--")
    label_ends(panels[2], [(average, f"mean {average:.3g}", GREY)])
    for axes in panels:
        axes.set_xlim(-0.5, steps + 0.5)
        whole_numbers(axes.xaxis)
    return figure
