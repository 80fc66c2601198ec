"""Every script in examples/ runs, finds what it asserts, and prints lines that fit into 80 columns.

In this process, so that torch is imported once; `make examples` runs them as a reader would.
"""

from __future__ import annotations

import pathlib
import runpy

import pytest

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples"

PRINTS = {
    "hugging_face.py": "turn 2: 339 tokens seen, 75 kept, ",
    "own_decoder.py": "a quarter of 120 tokens: 30 kept after 40 steps, of 160 seen",
    "inside_torch_compile.py": "traced:    77 operators, 3 x scaled_dot_product_attention",
    "pass_pipeline.py": "refused: disable_passes names 'evict', which the step needs to be right",
    "debugging.py": "refused: UnsupportedAttentionError, layer 0, graph node ",
}
"""The beginning of a line of each script's output."""


@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)  # as if it were run as a script: examples may import each other
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(PRINTS[name]) for line in lines), lines
    assert max(map(len, lines)) <= 80


def test_every_example_is_run() -> None:
    assert {path.name for path in FOLDER.glob("*.py")} == PRINTS.keys()
