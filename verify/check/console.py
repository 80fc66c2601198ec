"""Print a report on the terminal with rich, an optional package, imported where it is used.

A table row is a :class:`_Measure`: up to four rows of the batch are shown side by side, more of them by their median and
their worst.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ...optional import require
from .report_data import ReportData, RowReport, Stability
from .wording import plural, share

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

ROWS_SHOWN = 4
"""More rows than these are summarised."""
STAGES_SHOWN = 12
"""The longest ones."""


# ---------------------------------------------------------------------- what is measured


class _Measure(NamedTuple):
    """`of` a row is ``None`` where it does not apply and infinite for what never happens; `worst` picks one of many."""

    label: str
    of: Callable[[RowReport], float | None]
    show: Callable[[float], str]
    worst: Callable[[Iterable[float]], float] | None = max


def _count(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:,.1f}".removesuffix(".0")


def _decimal(value: float) -> str:
    return "never" if math.isinf(value) else f"{value:.3g}"


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _largest(values: Sequence[float]) -> float | None:
    return max(values, default=None)


def _first_eviction(row: RowReport) -> int | None:
    """Index of the first step after which a token is missing."""
    lengths = enumerate(map(len, row.retained))
    return next((index for index, kept in lengths if kept < row.prompt_tokens + index + 1), None)


def _lost(row: RowReport, *, first: bool) -> float | None:
    at = _first_eviction(row)
    if at is None:
        return None
    return row.evicted_mass[at] if first else _mean(row.evicted_mass[at + 1 :])


def _measures(report: ReportData) -> dict[str, list[_Measure]]:
    steps = report.steps

    def never(at: int | None) -> float:
        return math.inf if at is None else at

    def scorers(pair: str) -> list[_Measure]:
        return [
            _Measure(f"{pair}: Spearman", lambda row: row.scorer_spearman.get(pair), _decimal, min),
            _Measure(f"{pair}: top-B Jaccard", lambda row: row.scorer_jaccard.get(pair), _decimal, min),
        ]

    def stability(of: Callable[[Stability], float]) -> Callable[[RowReport], float | None]:
        return lambda row: None if row.stability is None else of(row.stability)

    def half_life(found: Stability) -> float:
        return math.inf if found.half_life is None else found.half_life

    pairs = list(dict.fromkeys(pair for row in report.rows for pair in row.scorer_spearman))
    stable = next((row.stability for row in report.rows if row.stability is not None), None)
    groups = {
        "Size": [
            _Measure("prompt, tokens", lambda row: row.prompt_tokens, _count, None),
            _Measure("budget B, tokens", lambda row: row.budget, _count, None),
        ],
        "Against the reference, step by step": [
            _Measure("first step that keeps other tokens", lambda row: never(row.first_set_difference), _count, min),
            _Measure("Jaccard of the kept sets, min", lambda row: min(row.set_jaccard, default=None), _decimal, min),
            _Measure("Jaccard of the kept sets, mean", lambda row: _mean(row.set_jaccard), _decimal, min),
            _Measure("steps that differ by rounded ties", lambda row: len(row.ties), _count),
            _Measure("momentum, largest relative error", lambda row: row.momentum_error, _decimal),
            _Measure("logits, largest relative error", lambda row: row.logits_error, _decimal),
        ],
        "Generated freely, against the full cache": [
            _Measure(f"first other token, index of {steps + 1}", lambda row: never(row.first_divergence), _count, min),
        ],
        "Teacher-forced on the full cache's tokens": [
            _Measure(
                f"other token chosen, of {plural(steps, 'step')}",
                lambda row: row.disagreement[-1] if row.disagreement else None,
                lambda value: f"{_count(value)} ({share(value / steps)})",
            ),
            _Measure("KL(full || evicted), mean, nats", lambda row: _mean(row.kl), _decimal),
            _Measure("KL(full || evicted), max, nats", lambda row: _largest(row.kl), _decimal),
            _Measure("|logits - full| / |full|, mean", lambda row: _mean(row.output_error), share),
            _Measure("|logits - full| / |full|, max", lambda row: _largest(row.output_error), share),
        ],
        "What is evicted, per step": [
            _Measure("attention mass, first eviction", lambda row: _lost(row, first=True), share),
            _Measure("attention mass, later evictions, mean", lambda row: _lost(row, first=False), share),
            _Measure("churn of the kept set, mean", lambda row: _mean(row.churn), _decimal),
            _Measure("churn of the kept set, max", lambda row: _largest(row.churn), _decimal),
            _Measure("... its ceiling, 2/(B+1)", lambda row: row.churn_ceiling, _decimal, None),
        ],
        "Best B of the prompt, full cache": [
            _Measure("top-B churn, raw scores, mean", lambda row: _mean(row.raw_churn), _decimal),
            _Measure("top-B churn, smoothed scores, mean", lambda row: _mean(row.smoothed_churn), _decimal),
        ],
        "Scorers compared, full cache": [measure for pair in pairs for measure in scorers(pair)],
    }
    if stable is not None:
        groups["Rank stability (Proposition 1), full cache"] = [
            _Measure("misranked pairs, observed", stability(lambda found: found.observed), share),
            _Measure("misranked pairs, bound", stability(lambda found: found.bound), share),
            _Measure("pairs above their own bound", stability(lambda found: found.exceeded), share),
            _Measure("pairs compared", stability(lambda found: found.pairs), _count, None),
            _Measure("refreshes observed", stability(lambda found: found.refreshes), _count, None),
            _Measure(
                f"effective layers, of {stable.layers}", stability(lambda found: found.effective_layers), _decimal, None
            ),
            _Measure("half-life of a score, steps", stability(half_life), _decimal, None),
            _Measure("old momentum's weight per refresh", stability(lambda found: found.time_weight), _decimal, None),
            _Measure("autocorrelation of a token's scores", stability(lambda found: found.autocorrelation), _decimal),
            _Measure("... if they were independent", stability(lambda found: found.independent), _decimal, None),
            _Measure("|correlation| between tokens", stability(lambda found: found.cross_correlation), _decimal),
        ]
    return {title: measures for title, measures in groups.items() if measures}


def _cells(measure: _Measure, rows: Sequence[RowReport]) -> list[str]:
    """What stands beside the label: one cell per row, or median and worst."""
    values = [measure.of(row) for row in rows]
    if len(rows) <= ROWS_SHOWN:
        return ["-" if value is None else measure.show(value) for value in values]
    known = [value for value in values if value is not None]
    if not known:
        return ["-", "-"]
    median = measure.show(statistics.median(known))
    if measure.worst is None:
        lowest, highest = measure.show(min(known)), measure.show(max(known))
        return [median, "" if lowest == highest else f"{lowest} to {highest}"]
    worst = measure.worst(known)
    return [median, f"{measure.show(worst)}, row {values.index(worst)}" if min(known) < max(known) else "all alike"]


def _notes(rows: Sequence[RowReport]) -> list[tuple[str, str]]:
    """(whose, sentence), whole sentences for what is no number."""
    sentences: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.ties and len(rows) <= ROWS_SHOWN:
            steps = ", ".join(map(str, row.ties[:10])) + (f" and {len(row.ties) - 10} more" if row.ties[10:] else "")
            tie = f"Ties: at steps {steps} the kept sets differ by tokens whose momenta agree within rounding."
            sentences.setdefault(tie, []).append(index)
        said = f"Proposition 1 says nothing here: {row.why_no_stability}"
        if row.stability is not None:
            said = f"Proposition 1. {row.stability.assumption}"
        sentences.setdefault(said, []).append(index)
    if len(sentences) > ROWS_SHOWN:
        measured = [(row.stability.exceeded, index) for index, row in enumerate(rows) if row.stability is not None]
        worst = max(measured)[1] if measured else 0
        sentences = {said: indices for said, indices in sentences.items() if worst in indices}

    def of(indices: list[int]) -> str:
        if len(indices) == len(rows):
            return "all rows" if len(rows) > 1 else ""
        return f"row {', '.join(map(str, indices))}" if len(indices) <= ROWS_SHOWN else plural(len(indices), "row")

    return [(of(indices), said) for said, indices in sentences.items()]


# ---------------------------------------------------------------------- print


def print_report(report: ReportData, console: Console | None = None) -> None:
    """Print the contract, clause by clause, what was measured, and the verdict as the last line.

    Raises:
        ConfigError: rich is not installed.
    """
    require("rich", extra="verify", purpose="Showing a report")
    from rich.console import Console, RenderableType
    from rich.padding import Padding
    from rich.text import Text

    console = Console() if console is None else console
    width = min(console.width, 100)
    unicode = console.encoding.lower().startswith("utf")

    def say(what: RenderableType = "") -> None:
        console.print(what, width=width)

    def safe(said: str, style: str = "") -> Text:
        """What the console cannot encode is spelled out."""
        return Text(said.encode(console.encoding, "backslashreplace").decode(console.encoding), style=style)

    header = {
        "model": f"{report.model}, {report.dtype}, backend {report.backend}",
        "settings": report.settings,
        "run": f"{plural(report.steps, 'decode step')}, {plural(len(report.rows), 'row')}",
        "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
    }
    table = _table("", "")
    for label, said in header.items():
        table.add_row(safe(label, "bold"), safe(said))
    say(table)

    violated = [finding for finding in report.findings if finding.passed is False]
    open_ones = [finding for finding in report.findings if finding.passed is None]
    marks = ("✓", "✗", "?") if unicode else ("ok", "FAIL", "?")
    table = _table("", "claim", "clause", "detail")
    table.columns[1].max_width, table.columns[2].max_width = 27, 14
    for finding in [*violated, *open_ones, *(finding for finding in report.findings if finding.passed)]:
        colour = {True: "", False: "red", None: "yellow"}[finding.passed]
        mark = Text(marks[0], style="green") if finding.passed else Text(marks[2 if finding.passed is None else 1])
        cells = [safe(said) for said in (finding.name, finding.clause, finding.detail)]
        table.add_row(mark, *cells, style=colour)
    say()
    say(table)

    many = len(report.rows) > ROWS_SHOWN
    names = ["median", "worst or range"] if many else [f"row {index}" for index in range(len(report.rows))]
    table = _table("", *names) if len(names) > 1 else _table("", "")
    for column in table.columns[1:]:
        column.justify = "right"
    for title, measures in _measures(report).items():
        table.add_row(Text(title, style="bold"))
        for measure in measures:
            table.add_row(Padding(safe(measure.label), (0, 0, 0, 2)), *map(Text, _cells(measure, report.rows)))
    say()
    say(table)

    table = _table("", "")
    for whose, said in _notes(report.rows):
        table.add_row(safe(whose, "bold"), safe(said))
    if table.rows:
        say()
        say(table)

    table = _table("seconds", "")
    table.columns[1].justify = "right"
    longest = sorted(report.seconds, key=report.seconds.__getitem__, reverse=True)[:STAGES_SHOWN]
    shown = {stage: seconds for stage, seconds in report.seconds.items() if stage in longest}
    if len(shown) < len(report.seconds):
        shown[f"{len(report.seconds) - len(shown)} shorter stages"] = sum(report.seconds.values()) - sum(shown.values())
    for stage, seconds in (shown | {"in all": sum(report.seconds.values())}).items():
        table.add_row(safe(f"  {stage}"), f"{seconds:,.1f}")
    say()
    say(table)
    say()
    clauses = plural(len(report.findings), "clause")
    if report.ok:
        undecided = f", {len(open_ones)} of them undecided" if open_ones else ""
        say(Text(f"{marks[0]} No violation of the contract: {clauses} checked{undecided}.", style="bold green"))
    else:
        say(Text(f"{marks[1]} The contract is violated: {len(violated)} of {clauses}.", style="bold red"))


def _table(*headings: str) -> Table:
    """Without lines, so that it reads the same in ASCII. Cells wrap, they are never cut."""
    from rich.table import Table

    table = Table(box=None, show_header=any(headings), padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
