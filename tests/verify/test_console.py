"""The report on the terminal, as pictures and as JSON; one made up here, so that every number in it is known."""

from __future__ import annotations

import dataclasses
import importlib
import io
import itertools
import json
import pathlib
import random
import sys
import warnings

import pytest
from PIL import Image  # matplotlib needs it
from rich.console import Console

import inertia_fx
from inertia_fx.errors import ConfigError
from inertia_fx.verify.check import console, figures, plots
from inertia_fx.verify.check.report import Report
from inertia_fx.verify.check.report_data import Finding, Ranking, RowReport, Stability

ASSUMPTION = (
    "Broken here: a token's score depends on the one before (correlation 0.57, independent scores: -0.02) and tokens'"
    " scores move together (median |correlation| 0.35, independent scores: 0.10). The bound describes this model, it"
    " does not certify it."
)
FINDINGS = [
    Finding("retained sets are the reference's", "invariant 2, D7", True, "the same positions in all 64 steps"),
    Finding("momentum is the reference's", "recurrence, D2, D4, D8", True, "off by at most 3.7e-07 of the largest"),
    Finding("every row keeps its budget", "invariant 1, D5, D6, D10", True, "tokens kept: 100"),
    Finding("evicted tokens never return", "one decode step", True, "none did"),
]
VIOLATION = Finding(
    "at most one token leaves per step",
    "invariant 8",
    False,
    "row 0, step 17: 3 tokens left in one step; graph node scaled_dot_product_attention_" + "x" * 60 + " (the end)",
)


def row(seed: int = 0, steps: int = 64, prompt: int = 1000, budget: int = 100) -> RowReport:
    """A row as a real model's looks: one eviction down to the budget, then one token per step."""
    draw = random.Random(seed)
    kept = sorted(draw.sample(range(prompt), min(prompt, budget)))
    retained = []
    for step in range(steps):
        kept = [*kept, prompt + step]
        while len(kept) > budget:
            del kept[int(len(kept) * draw.random() ** 2)]
        retained.append(list(kept))
    shown = 12 if budget < prompt else 0
    smoothed = [[max(0, budget - 6 + token + draw.randint(-3, 3)) for token in range(shown)] for _ in range(steps)]
    raw = [[min(prompt - 1, int(rank * draw.lognormvariate(0, 1))) for rank in step] for step in smoothed]
    return RowReport(
        prompt_tokens=prompt,
        budget=budget,
        tokens=list(range(steps + 1)),
        full_tokens=[token if token < 12 + seed else 0 for token in range(steps + 1)],
        first_divergence=12 + seed if steps >= 12 + seed else None,
        first_set_difference=None,
        set_jaccard=[1.0] * steps,
        ties=[],
        momentum_error=3.7e-7,
        logits_error=1.74e-6,
        disagreement=[step // 16 for step in range(1, steps + 1)],
        kl=[0.0 if step == 0 else draw.lognormvariate(-4, 1.5) for step in range(steps)],
        output_error=[draw.uniform(0.01, 0.2) for _ in range(steps)],
        retained=retained,
        evicted_mass=[0.123] + [0.0004] * (steps - 1) if budget < prompt else [0.0] * steps,
        churn=[draw.choice([0.0, 2 / (budget + 1)]) for _ in range(steps - 1)] if budget < prompt else [],
        churn_ceiling=2 / (budget + 1),
        scorer_spearman={"attention/vnorm": 0.991, "attention/entropy": 0.9972},
        scorer_jaccard={"attention/vnorm": 0.889, "attention/entropy": 0.958},
        raw_churn=[draw.uniform(0.1, 0.4) for _ in range(steps - 1)],
        smoothed_churn=[draw.uniform(0.02, 0.08) for _ in range(steps - 1)],
        ranking=Ranking(draw.sample(range(prompt), shown), budget, raw, smoothed) if shown else None,
        stability=Stability(30, 0.00124, 8.98, 0.1036, steps, 130_816, 0.144, 0.876, 0.02, 0.572, -0.0156, 0.354, ASSUMPTION),
        why_no_stability=None,
    )  # fmt: skip


def fake(*rows: RowReport, findings: list[Finding] | None = None) -> Report:
    rows = rows or (row(),)
    return Report(
        model="LlamaForCausalLM, 134.5 M parameters",
        dtype="float32",
        backend="inductor",
        settings="Config(ratio=0.9 (evicted), evict_after=4, pool_width=5, alpha_time=0.9, alpha_layer=0.95)",
        steps=len(rows[0].retained),
        findings=FINDINGS if findings is None else findings,
        rows=list(rows),
        seconds={"full cache: prompt of 1,000 tokens": 4.36, "compiled model: first step (compiles)": 31.5},
        versions={"torch": "2.13.0", "transformers": "5.24.0", "inertia_fx": "0.1.0"},
    )


def printed(report: Report, width: int = 80, encoding: str = "utf-8") -> str:
    """What the console's bytes are; one that cannot encode something raises."""
    raw = io.BytesIO()
    with io.TextIOWrapper(raw, encoding, write_through=True) as stream:
        report.print(Console(file=stream, width=width))
        return raw.getvalue().decode(encoding)


def cells(text: str, label: str) -> list[str]:
    """What stands to the right of a label."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(label)]
    assert len(lines) == 1, (label, lines)
    return [cell.strip() for cell in lines[0].removeprefix(label).split("  ") if cell.strip()]


def unwrapped(text: str) -> str:
    return " ".join(text.split())


# ---------------------------------------------------------------------- print


def test_every_measure_of_one_row_is_printed() -> None:
    one = row()
    text = printed(fake(one))
    for label, said in {
        "prompt, tokens": "1,000",
        "budget B, tokens": "100",
        "first step that keeps other tokens": "never",
        "Jaccard of the kept sets, min": "1",
        "steps that differ by rounded ties": "0",
        "momentum, largest relative error": "3.7e-07",
        "logits, largest relative error": "1.74e-06",
        "first other token, index of 65": "12",
        "other token chosen, of 64 steps": "4 (6.25 %)",
        "KL(full || evicted), mean, nats": f"{sum(one.kl) / 64:.3g}",
        "KL(full || evicted), max, nats": f"{max(one.kl):.3g}",
        "|logits - full| / |full|, mean": f"{100 * sum(one.output_error) / 64:.3g} %",
        "|logits - full| / |full|, max": f"{100 * max(one.output_error):.3g} %",
        "attention mass, first eviction": "12.3 %",
        "attention mass, later evictions, mean": "0.04 %",
        "churn of the kept set, mean": f"{sum(one.churn) / 63:.3g}",
        "churn of the kept set, max": "0.0198",
        "... its ceiling, 2/(B+1)": "0.0198",
        "top-B churn, raw scores, mean": f"{sum(one.raw_churn) / 63:.3g}",
        "top-B churn, smoothed scores, mean": f"{sum(one.smoothed_churn) / 63:.3g}",
        "attention/vnorm: Spearman": "0.991",
        "attention/entropy: top-B Jaccard": "0.958",
        "misranked pairs, observed": "14.4 %",
        "misranked pairs, bound": "87.6 %",
        "pairs above their own bound": "2 %",
        "pairs compared": "130,816",
        "effective layers, of 30": "8.98",
        "half-life of a score, steps": "0.104",
        "autocorrelation of a token's scores": "0.572",
        "... if they were independent": "-0.0156",
        "|correlation| between tokens": "0.354",
        "full cache: prompt of 1,000 tokens": "4.4",
        "in all": "35.9",
    }.items():
        assert cells(text, label) == [said], label
    said = unwrapped(text)
    assert f"Proposition 1. {ASSUMPTION}" in said
    assert "LlamaForCausalLM, 134.5 M parameters, float32, backend inductor" in said
    assert "settings Config(ratio=0.9 (evicted), evict_after=4, pool_width=5, alpha_time=0.9, alpha_layer=0.95)" in said
    assert "run 64 decode steps, 1 row" in said
    assert "torch 2.13.0, transformers 5.24.0, inertia_fx 0.1.0" in said
    assert text.splitlines()[-1].rstrip() == "✓ No violation of the contract: 4 clauses checked."


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 9])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_nothing_is_wider_than_the_console(rows: int, encoding: str) -> None:
    report = fake(*(row(seed, prompt=900 + seed) for seed in range(rows)), findings=[*FINDINGS, VIOLATION])
    assert max(len(line.rstrip()) for line in printed(report, 80, encoding).splitlines()) <= 80


def test_violations_come_first_and_whole() -> None:
    text = printed(fake(findings=[*FINDINGS, VIOLATION]))
    lines = text.splitlines()
    heading = next(index for index, line in enumerate(lines) if line.split() == ["claim", "clause", "detail"])
    assert lines[heading + 1].startswith("✗  at most one token leaves")
    assert [line[0] for line in lines[heading + 1 :] if line[:1] in ("✓", "✗")] == [*"✗✓✓✓✓", "✗"]
    end = text.index("✓")
    column = lines[heading].index("detail")
    detail = "".join(line[column:80].ljust(80 - column) for line in text[text.index("✗") : end].splitlines())
    assert "".join(detail.split()) == "".join(VIOLATION.detail.split())
    assert lines[-1].rstrip() == "✗ The contract is violated: 1 of 5 clauses."


def test_violations_are_red_on_a_terminal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=80, force_terminal=True, color_system="standard")
    fake(findings=[*FINDINGS, VIOLATION]).print(console)
    red = [line for line in stream.getvalue().splitlines() if "\x1b[31m" in line]
    assert "at most one token" in red[0]
    assert not any("reference's" in line for line in red)


def test_ascii_console_gets_words_for_marks() -> None:
    odd = Finding("α is read", "D5", False, "row 0: α ≤ 1 [bold]not markup[/bold]")
    text = printed(fake(findings=[*FINDINGS, odd]), encoding="ascii")
    assert text.isascii()
    assert "FAIL  \\u03b1 is read" in text
    assert r"row 0: \u03b1 \u2264 1 [bold]not markup[/bold]" in unwrapped(text)
    assert "\nok    retained sets" in text
    assert text.splitlines()[-1].rstrip() == "FAIL The contract is violated: 1 of 5 clauses."


def test_up_to_four_rows_stand_side_by_side() -> None:
    apart = dataclasses.replace(row(2), first_set_difference=17, ties=[17, 20, *range(30, 42)])
    text = printed(fake(row(0), row(1, prompt=700, budget=70), apart))
    assert cells(text, "prompt, tokens") == ["1,000", "700", "1,000"]
    assert cells(text, "first other token, index of 65") == ["12", "13", "14"]
    assert cells(text, "first step that keeps other tokens") == ["never", "never", "17"]
    assert cells(text, "steps that differ by rounded ties") == ["0", "0", "14"]
    said = unwrapped(text)
    assert "row 2 Ties: at steps 17, 20, 30, 31, 32, 33, 34, 35, 36, 37 and 4 more the kept sets differ" in said
    assert "all rows Proposition 1." in said


def test_more_rows_are_summed_up_by_median_and_worst() -> None:
    rows = [dataclasses.replace(row(seed, prompt=900 + seed), kl=[0.1 * seed] * 64) for seed in range(6)]
    rows[4] = dataclasses.replace(rows[4], set_jaccard=[1.0] * 63 + [0.5], first_set_difference=64)
    assert rows[5].stability is not None
    rows[5].stability = dataclasses.replace(rows[5].stability, exceeded=0.3, assumption="This row is the odd one.")
    text = printed(fake(*rows))
    assert cells(text, "prompt, tokens") == ["902.5", "900 to 905"]
    assert cells(text, "budget B, tokens") == ["100"]
    assert cells(text, "KL(full || evicted), mean, nats") == ["0.25", "0.5, row 5"]
    assert cells(text, "Jaccard of the kept sets, min") == ["1", "0.5, row 4"]
    assert cells(text, "first step that keeps other tokens") == ["never", "64, row 4"]
    assert cells(text, "first other token, index of 65") == ["14.5", "12, row 0"]
    assert cells(text, "attention/vnorm: Spearman") == ["0.991", "all alike"]
    said = unwrapped(text)
    assert f"5 rows Proposition 1. {ASSUMPTION} row 5 Proposition 1. This row is the odd one." in said


def test_of_many_different_sentences_the_worst_rows_is_printed() -> None:
    rows = [row(seed) for seed in range(6)]
    for index, one in enumerate(rows):
        assert one.stability is not None
        one.stability = dataclasses.replace(one.stability, exceeded=index % 4, assumption=f"Sentence {index}.")
    said = printed(fake(*rows))
    assert "row 3  Proposition 1. Sentence 3." in said
    assert said.count("Sentence") == 1


def test_what_does_not_apply_is_said() -> None:
    why = "a sum of scores has no stationary spread, so no bound"
    short = row(steps=20, prompt=50, budget=80)
    text = printed(fake(dataclasses.replace(short, stability=None, why_no_stability=why)))
    assert f"Proposition 1 says nothing here: {why}" in unwrapped(text)
    assert "misranked" not in text
    for label in ("attention mass, first eviction", "churn of the kept set, mean", "churn of the kept set, max"):
        assert cells(text, label) == ["-"], label
    assert short.stability is not None
    endless = dataclasses.replace(short, stability=dataclasses.replace(short.stability, half_life=None))
    assert cells(printed(fake(endless)), "half-life of a score, steps") == ["never"]


def test_one_step() -> None:
    text = printed(fake(row(steps=1)))
    assert "run       1 decode step, 1 row" in text
    assert cells(text, "first other token, index of 2") == ["never"]
    assert cells(text, "other token chosen, of 1 step") == ["0 (0 %)"]
    for label in (
        "attention mass, later evictions, mean",
        "churn of the kept set, max",
        "top-B churn, raw scores, mean",
    ):
        assert cells(text, label) == ["-"], label


def test_of_many_stages_the_longest_are_shown() -> None:
    report = fake()
    report.seconds = {f"stage {index}": float(index) for index in range(20)}
    text = printed(report)
    assert cells(text, "stage 19") == ["19.0"]
    assert "stage 7 " not in text
    assert cells(text, "8 shorter stages") == [f"{sum(range(8)):.1f}"]
    assert cells(text, "in all") == [f"{sum(range(20)):.1f}"]
    report.seconds = {}
    assert cells(printed(report), "in all") == ["0.0"]


# ---------------------------------------------------------------------- pictures

NAMES = ["retention.png", "churn.png", "ranking.png", "divergence.png"]


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(fake(), id="usual"),
        pytest.param(fake(*(row(seed, prompt=900 + 20 * seed, budget=90 + seed) for seed in range(5))), id="many rows"),
        pytest.param(fake(row(steps=1, prompt=40_000, budget=4_000)), id="one step after a long prompt"),
        pytest.param(
            fake(dataclasses.replace(row(steps=2, prompt=1, budget=200), stability=None, why_no_stability="short")),
            id="one token and nothing evicted",
        ),
    ],
)
def test_four_pictures_without_a_warning(report: Report, tmp_path: pathlib.Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        paths = report.plot(tmp_path / "new" / "folder")
    assert paths == [tmp_path / "new" / "folder" / name for name in NAMES]
    for path in paths:
        with Image.open(path) as image:
            assert image.size == (1100, 650)
    assert "matplotlib.pyplot" not in sys.modules


def words(report: Report, draw: str) -> str:
    """Every text of a picture. Fails if one reaches beyond the picture's edge."""
    from matplotlib.text import Text

    figure = getattr(plots, draw)(report)
    figure.draw_without_rendering()
    ticks = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
    labels = {axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)}
    said = [text for text in figure.findobj(Text) if text.get_text() and (text not in ticks or text in labels)]
    for text in said:
        box = text.get_window_extent()
        inside = box.x0 >= 0 and box.y0 >= 0 and box.x1 <= 1100 and box.y1 <= 650
        assert inside, f"{text.get_text()!r} is cut off"
    return unwrapped(" ".join(text.get_text() for text in said))


def test_retention_says_what_is_kept_and_of_which_row() -> None:
    one = row()
    generated = sum(position >= 1000 for position in one.retained[-1])
    title = f"fter 64 decode steps 100 of 1,064 tokens are kept: {100 - generated} of the prompt, {generated} generated"
    assert f"A{title}" in words(fake(one), "_retention")
    assert f"Row 0 of 3: a{title}" in words(fake(one, row(1), row(2)), "_retention")
    assert "(96.8 per column)" in words(fake(row(prompt=60_000, steps=16, budget=600)), "_retention")
    assert "per column" not in words(fake(row(prompt=200, steps=16, budget=20)), "_retention")


def test_retention_map_is_dark_where_a_token_is_kept() -> None:
    left, right = plots._retention(
        fake(dataclasses.replace(row(steps=2, prompt=20, budget=5), retained=[[0, 3, 20], [3, 20, 21]]))
    ).axes
    dark = {kind: figures.tint(colour, 1.0) for kind, colour in plots._KEPT.items()}
    image = left.images[0].get_array()
    assert image.shape == (3, 22, 3)
    kept = [
        [
            at
            for at in range(22)
            if tuple(image[step, at].tolist()) == pytest.approx(dark["prompt" if at < 20 else "generated"])
        ]
        for step in range(3)
    ]
    assert kept == [list(range(20)), [0, 3, 20], [3, 20, 21]]
    assert right.images[0].get_extent()[:2] == [3.5, 21.5]


def test_churn_title_tells_a_violation() -> None:
    assert "At most one kept token changes per step: churn 0.0198 (ceiling 2/(B+1) = 0.0198)" in words(fake(), "_churn")
    broken = dataclasses.replace(row(), churn=[0.0198] * 62 + [0.06])
    assert "More than one kept token changes in a step: churn 0.06 (ceiling" in words(fake(broken), "_churn")
    assert "No step after a first eviction" in words(fake(row(steps=1)), "_churn")


def test_churn_is_drawn_beside_its_ceiling_and_the_full_cache() -> None:
    one = row()
    first, second = plots._churn(fake(one)).axes
    assert [segment[1][1] for segment in first.collections[0].get_segments()] == one.churn
    assert [segment[0][0] for segment in first.collections[0].get_segments()] == list(range(2, 65))
    assert set(first.lines[0].get_ydata()) == {one.churn_ceiling}
    raw, smoothed = second.lines
    assert (list(raw.get_ydata()), list(smoothed.get_ydata())) == (one.raw_churn, one.smoothed_churn)


def test_ranking_counts_the_crossings_of_the_budget() -> None:
    ranking = Ranking([7, 1234], 3, raw=[[2, 3], [3, 2], [2, 3]], smoothed=[[2, 3], [2, 3], [3, 2]])
    report = fake(dataclasses.replace(row(steps=3), ranking=ranking))
    said = words(report, "_ranking")
    assert "2 tokens around the budget cross it 4 times by raw score, 2 by smoothed score" in said
    assert "Pairs misranked: 14.4 %, bound 87.6 %." in said
    assert "budget: 3" in said
    assert "1,234" in said
    without = dataclasses.replace(report.rows[0], stability=None, why_no_stability="2 refreshes are too few")
    assert "No bound: 2 refreshes are too few." in words(fake(without), "_ranking")


def test_labels_of_tokens_with_the_same_rank_do_not_overlap() -> None:
    together = Ranking(list(range(12)), 100, raw=[[100] * 12] * 64, smoothed=[[100] * 12] * 64)
    _, smoothed = plots._ranking(fake(dataclasses.replace(row(), ranking=together))).axes
    boxes = sorted((text.get_window_extent() for text in smoothed.texts), key=lambda box: box.y0)
    assert len(boxes) == 12
    assert all(below.y1 <= above.y0 for below, above in itertools.pairwise(boxes))
    line = smoothed.transData.transform((64, 101))[1]
    assert (boxes[0].y0 + boxes[-1].y1) / 2 == pytest.approx(line, abs=2)


def test_ranking_of_the_first_row_that_has_one_or_why_there_is_none() -> None:
    short = row(prompt=50, budget=64)
    assert "Row 1 of 2: 12 tokens around the budget" in words(fake(short, row(1)), "_ranking")
    assert "The budget of 64 tokens holds the whole prompt of 50." in words(fake(short), "_ranking")
    unknown = dataclasses.replace(row(), ranking=None, stability=None, why_no_stability="it was not recorded")
    assert "it was not recorded" in words(fake(unknown), "_ranking")


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (None, "All 65 generated tokens are the full cache's"),
        (0, "The first generated token is not the full cache's"),
        (1, "The first generated token is the full cache's, the next one is not"),
        (12, "The first 12 generated tokens are the full cache's, the next one is not"),
    ],
)
def test_divergence_says_how_far_the_answers_agree(first: int | None, said: str) -> None:
    text = words(fake(dataclasses.replace(row(), first_divergence=first)), "_divergence")
    assert f"{said}; teacher-forced, 6.25 % of steps choose another token" in text
    assert "4 of 64" in text


def test_divergence_of_several_rows() -> None:
    rows = [dataclasses.replace(row(), first_divergence=first) for first in (None, 3, 10)]
    rows[0] = dataclasses.replace(rows[0], kl=[3.0] * 64, disagreement=[64] * 64)
    assert "1 of 3 rows say what the full cache says, to the end" in words(fake(*rows), "_divergence")
    survival, disagreement, kl = plots._divergence(fake(*rows)).axes
    assert list(survival.lines[0].get_ydata()) == fake(*rows).survival()
    assert disagreement.lines[-1].get_ydata()[-1] == pytest.approx((64 + 4 + 4) / 3)
    means = [sum(at) / 3 for at in zip(*(one.kl for one in rows), strict=True)]
    assert list(kl.lines[3].get_ydata()) == pytest.approx(means)


# ---------------------------------------------------------------------- data


def test_json_and_back() -> None:
    report = fake(row(), dataclasses.replace(row(1), ranking=None, stability=None, why_no_stability="α"))
    assert Report.from_json(report.to_json()) == report
    report.rows[1].kl[3] = float("nan")
    with pytest.raises(ValueError, match="JSON"):
        report.to_json()


def test_saved_report_says_whether_it_is_ok(tmp_path: pathlib.Path) -> None:
    for findings, ok in ((FINDINGS, True), ([*FINDINGS, VIOLATION], False)):
        fake(findings=findings).save(tmp_path / "report.json")
        assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["ok"] is ok


def test_survival_counts_rows_that_still_agree() -> None:
    rows = [dataclasses.replace(row(steps=4), first_divergence=first) for first in (None, 0, 2, 4)]
    assert fake(*rows).survival() == [0.75, 0.75, 0.5, 0.5, 0.25]


# ---------------------------------------------------------------------- missing packages


def test_without_rich_or_matplotlib_an_error_of_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    report = fake()
    for name in ("rich", "matplotlib"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now raises
    with pytest.raises(ConfigError, match=r'needs rich: pip install "inertia_fx\[verify\]"'):
        report.print()
    with pytest.raises(ConfigError, match=r'needs matplotlib: pip install "inertia_fx\[verify\]"'):
        report.plot(tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()


def test_verify_imports_without_the_optional_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inertia_fx, "verify", inertia_fx.verify)  # put back afterwards, as are the modules
    for name in [name for name in sys.modules if f"{name}.".startswith("inertia_fx.verify.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("rich", "matplotlib", "scipy", "hypothesis"):
        monkeypatch.setitem(sys.modules, name, None)
    again = importlib.import_module("inertia_fx.verify.check.console")
    assert again is not console


def test_a_clause_that_could_not_be_decided_is_neither_held_nor_violated() -> None:
    report = fake(
        row(), findings=[Finding("held", "D1", True, "yes"), Finding("open", "D2", None, "rounding may do this")]
    )
    text = printed(report)
    assert report.ok
    assert text.splitlines()[-1].rstrip() == "✓ No violation of the contract: 2 clauses checked, 1 of them undecided."
    (line,) = [line for line in text.splitlines() if line.startswith("?")]
    assert line.split() == ["?", "open", "D2", "rounding", "may", "do", "this"]
