"""The report on the terminal; one made up, so that every number in it is known."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from inertia_fx.verify.check.report import Report
from inertia_fx.verify.check.report_data import Finding
from tests.common.reports import ASSUMPTION, FINDINGS, VIOLATION, fake, row, unwrapped


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


def test_a_clause_that_could_not_be_decided_is_neither_held_nor_violated() -> None:
    report = fake(
        row(), findings=[Finding("held", "D1", True, "yes"), Finding("open", "D2", None, "rounding may do this")]
    )
    text = printed(report)
    assert report.ok
    assert text.splitlines()[-1].rstrip() == "✓ No violation of the contract: 2 clauses checked, 1 of them undecided."
    (line,) = [line for line in text.splitlines() if line.startswith("?")]
    assert line.split() == ["?", "open", "D2", "rounding", "may", "do", "this"]
