"""The report as pictures; one made up, so that every number in it is known."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import sys
import warnings

import pytest
from PIL import Image  # matplotlib needs it

from inertia_fx.verify.check import figures, plots
from inertia_fx.verify.check.report import Report
from inertia_fx.verify.check.report_data import Ranking
from tests.common.reports import fake, row, unwrapped

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
