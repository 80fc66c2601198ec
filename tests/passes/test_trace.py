"""torch's structured trace, which `tlparse` reads, has the graph before and after every pass."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import pytest

from inertia_fx.passes import PASSES, name_of

ROOT = pathlib.Path(__file__).resolve().parents[2]

COMPILE_ONE_STEP = """
from tests.common.graphs import prompted, steps
from tests.common import spellings

model = spellings.TinyDecoder()
steps(model, prompted(model), 1, disable_passes=("outline_layers",))
"""


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[dict[str, Any], str]]:
    """Name of an artifact of ours -> its entry in the trace, and its text.

    A process of its own, as torch reads TORCH_TRACE once, when it is imported.
    """
    folder = tmp_path_factory.mktemp("trace")
    environment = os.environ | {"TORCH_TRACE": str(folder), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", COMPILE_ONE_STEP], cwd=ROOT, env=environment, check=True)
    (log,) = folder.glob("dedicated_log_torch_trace_*.log")
    found: dict[str, tuple[dict[str, Any], str]] = {}
    name = None
    for line in log.read_text().splitlines():
        if line.startswith("\t"):  # of the payload that belongs to the entry above
            if name is not None:
                entry, text = found[name]
                found[name] = entry, text + line[1:] + "\n"
            continue
        entry = json.loads(line[line.index("{") :])
        name = entry.get("artifact", {}).get("name")
        name = name if name is not None and name.startswith("inertia_fx_") else None
        if name is not None:
            assert name not in found, "tlparse would show one of two artifacts of the same name"
            found[name] = entry, ""
    return found


def test_there_is_a_pair_for_every_pass_that_ran(artifacts: dict[str, tuple[dict[str, Any], str]]) -> None:
    expect = [
        f"inertia_fx_{number:02}_{name_of(run)}_{when}"
        for number, run in enumerate(PASSES, 1)
        for when in ("before", "after")
        if name_of(run) != "outline_layers"  # switched off
    ]
    assert list(artifacts) == expect
    assert expect[2:4] == ["inertia_fx_02_find_attention_before", "inertia_fx_02_find_attention_after"]


def test_tlparse_can_place_them(artifacts: dict[str, tuple[dict[str, Any], str]]) -> None:
    """It files artifacts under the compile that they belong to, and reads payloads where it is told of one."""
    for entry, _ in artifacts.values():
        assert entry["artifact"]["encoding"] == "string"
        assert (entry["frame_id"], entry["frame_compile_id"]) == (0, 0)
        assert "has_payload" in entry


def test_they_are_the_graphs(artifacts: dict[str, tuple[dict[str, Any], str]]) -> None:
    text = {name.removeprefix("inertia_fx_"): graph for name, (_, graph) in artifacts.items()}
    attention, ours, marker = (
        "_nn.scaled_dot_product_attention(",
        "ops.inertia_fx.scored_attention",
        "ops.inertia_fx.commit_step",
    )
    assert text["05_emit_scores_before"].count(attention) == 2
    assert text["05_emit_scores_before"].count(ours) == 0
    assert text["05_emit_scores_after"].count(attention) == 0
    assert text["05_emit_scores_after"].count(ours) == 2
    assert text["09_evict_before"].count(marker) == 1
    assert text["09_evict_after"].count(marker) == 0
    assert text["03_prove_attention_before"] == text["03_prove_attention_after"]
