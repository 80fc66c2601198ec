"""The report as JSON, and what is said where a package is missing."""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
import sys

import pytest

import inertia_fx
from inertia_fx.errors import ConfigError
from inertia_fx.verify.check import console
from inertia_fx.verify.check.report import Report
from tests.common.reports import FINDINGS, VIOLATION, fake, row


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
