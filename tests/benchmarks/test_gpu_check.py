"""`benchmarks/gpu_check`, whose full run needs a GPU, at a tiny size on a CPU: so that it does not rot."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.xdist_group("gpu_check")  # one run for all that read its report

SCRIPT = pathlib.Path(__file__).parents[2] / "benchmarks" / "gpu_check"


def run(out: pathlib.Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(SCRIPT), "--tiny", "--out", str(out), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=out.parent, env=environment, timeout=300)
    return done, json.loads(out.read_text())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    return run(tmp_path_factory.mktemp("gpu_check") / "report.json", "--budget-seconds", "600")


def results(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    (section,) = (section for section in report["sections"] if section["name"] == name)
    assert section["status"] == "ok", section["error"]
    return {row["what"]: row["figures"] for row in section["results"]}


def test_it_runs_through(tiny: Any) -> None:
    done, report = tiny
    assert done.returncode == 0, done.stdout + done.stderr
    assert report["tiny"]
    assert len(report["sections"]) == 14
    assert {section["status"] for section in report["sections"]} == {"ok"}
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


def test_compiled_steps_are_compared_with_plain_ones(tiny: Any) -> None:
    found = results(tiny[1], "steps")
    assert list(found) == ["full refresh", "Lazy4, pooled", "Score-Free"]
    for figures in found.values():
        assert figures["steps with the same tokens retained"] == "24 of 24"
        assert figures["logits error"] < 1e-5
        assert figures["momentum error"] < 1e-5


def test_attention_and_decode_steps_are_timed(tiny: Any) -> None:
    attention = results(tiny[1], "attention")
    figures = attention["60 slots x 1"]
    assert figures["of copy"] == pytest.approx(
        2 * 8 * 60 * 128 * 2 / (figures["scored us"] * 1e-6) / (attention["copy"]["TB/s"] * 1e12)
    )
    assert {"vnorm us", "entropy us", "unscored us", "sdpa us"} <= figures.keys()
    assert set(results(tiny[1], "times of bookkeeping")["90 slots x 2"]) == {"enter us", "evict us"}
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
    assert len(report["sections"]) == 14
    assert all(section["status"].startswith("skipped") for section in report["sections"])
    assert "decode 160 x 2: skipped" in done.stdout


def test_a_section_that_fails_or_takes_too_long_does_not_stop_the_others(tmp_path: pathlib.Path) -> None:
    """In a process of its own: the script's modules are found beside it, and it sets an alarm."""
    code = f"""
import sys, time
sys.path.insert(0, {str(SCRIPT.parent)!r})
import torch
from gpu_check import command
from gpu_check.report import Row, Setting

def broken(setting):
    yield Row("before", {{}})
    raise ValueError("broken")

def slow(setting):
    yield Row("before", {{}})
    time.sleep(60)

def wrong(setting):
    yield Row("error", {{"size": 3.0}}, is_right=False)

def wrong_and_slow(setting):
    yield from wrong(setting)
    yield from slow(setting)

def compiles(setting):
    yield Row("before", {{}})
    try:
        time.sleep(60)
    except Exception:  # as compilers do
        pass

def compiler_fails(setting):
    def backend(gm, inputs):
        raise ValueError("inside")
    yield Row("never", {{"got": torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))}})

class Faulty(Setting):
    def free_memory(self):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

Section = command.Section
chosen = [Section("broken", broken, 1), Section("slow", slow, 1, most=0.3), Section("wrong", wrong, 1),
          Section("wrong and slow", wrong_and_slow, 1, most=0.3), Section("compiles", compiles, 1, most=0.3, proves=True),
          Section("compiler fails", compiler_fails, 1), Section("fine", lambda _: iter([Row("all", {{}})]), 1)]
written = []
command.run(chosen, Faulty(torch.device("cpu"), True), time.monotonic() + 30, lambda: written.append(1))
statuses = ["failed", "out of time", "wrong", "wrong, and out of time", "out of time", "failed", "ok"]
assert [section.status for section in chosen] == statuses, chosen
assert [command.is_proven(section) for section in chosen] == [False, True, False, False, False, False, True]
assert "ValueError: broken" in chosen[0].error
assert chosen[0].reason == "ValueError: broken"
assert chosen[5].reason == "ValueError: inside"
assert [len(section.results) for section in chosen] == [1, 1, 1, 2, 1, 0, 1]
assert len(written) == 7
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
