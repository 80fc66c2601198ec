"""`benchmarks/gpu_check.py`, whose full run needs a GPU, at a tiny size on a CPU: so that it does not rot."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = pathlib.Path(__file__).parents[1] / "benchmarks" / "gpu_check.py"


def run(out: pathlib.Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=environment, timeout=300)
    return done, json.loads(out.read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    only = "kernels,bookkeeping,attention,decode 160 x 1,splits,tiles"
    return run(tmp_path_factory.mktemp("gpu_check") / "report.json", "--only", only)


def results(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (section,) = (section for section in report["sections"] if section["name"] == name)
    assert section["status"] == "ok", section["error"]
    return {row["what"]: row["figures"] for row in section["results"]}


def test_it_runs_through(tiny: Any) -> None:
    done, report = tiny
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["tiny"]
    assert len(report["sections"]) == 6
    assert all(row["is_right"] for section in report["sections"] for row in section["results"])
    assert "decode 160 x 1: ok" in done.stdout


def test_kernels_are_compared_with_their_definition(tiny: Any) -> None:
    found = results(tiny[1], "kernels")
    exact = found["float32 2x8/2x90x64 vnorm softcap sink"]
    assert 0 < exact["output error"] < 2e-5
    assert 0 < exact["score error"] < 5e-4
    assert 1e-4 < found["bfloat16 1x32/8x90x128 attention"]["output error"] < 2e-2, "rounding to bf16 must be seen"
    equal = results(tiny[1], "bookkeeping")
    assert all(figures == {"equal": True} for figures in equal.values())
    assert {"enter 3x33", "evict 3x33 protect (4, 4)", "gather bfloat16 128"} <= equal.keys()


def test_attention_and_decode_steps_are_timed(tiny: Any) -> None:
    attention = results(tiny[1], "attention")
    figures = attention["60 slots x 1"]
    assert figures["of copy"] == pytest.approx(
        2 * 8 * 60 * 128 * 2 / (figures["scored us"] * 1e-6) / (attention["copy"]["TB/s"] * 1e12)
    )
    decode = results(tiny[1], "decode 160 x 1")
    full, free = decode["full refresh"], decode["Score-Free"]
    # 64 tokens survive, in 65 slots; 2 layers, 2 KV heads of width 16, keys and values, bf16.
    assert full["K/V GiB"] * 2**30 == 65 * 2 * 2 * 16 * 2 * 2
    assert decode["full cache, compiled (StaticCache)"]["K/V GiB"] > 2 * full["K/V GiB"]
    assert full["tokens/s"] == pytest.approx(1e3 / full["ms"])
    assert decode["scoring, of a full-refresh step"]["share"] == pytest.approx(1 - free["ms"] / full["ms"])


def test_what_does_not_fit_the_budget_is_skipped_by_name(tmp_path: pathlib.Path) -> None:
    done, report = run(tmp_path / "report.json", "--budget-seconds", "0")
    assert done.returncode == 0
    assert len(report["sections"]) == 12
    assert all(section["status"].startswith("skipped") for section in report["sections"])
    assert "decode 160 x 2: skipped" in done.stdout


def test_a_section_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path: pathlib.Path) -> None:
    """In a process of its own: the script's modules are found beside it, and it sets an alarm."""
    code = f"""
import sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import gpu_check, torch
from gpu_check_report import Row, Setting

def broken(setting):
    yield Row("before", {{}})
    raise ValueError("broken")

def slow(setting):
    yield Row("before", {{}})
    time.sleep(60)

def wrong(setting):
    yield Row("error", {{"size": 3.0}}, is_right=False)

written = []
chosen = [gpu_check.Section("broken", broken, 1), gpu_check.Section("slow", slow, 1, most=0.3),
          gpu_check.Section("wrong", wrong, 1), gpu_check.Section("fine", lambda _: iter([Row("all", {{}})]), 1)]
gpu_check.run(chosen, Setting(torch.device("cpu"), True), time.monotonic() + 30, lambda: written.append(1))
assert [section.status for section in chosen] == ["failed", "out of time", "wrong", "ok"], chosen
assert "ValueError: broken" in chosen[0].error
assert [len(section.results) for section in chosen] == [1, 1, 1, 1]
assert len(written) == 4
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
