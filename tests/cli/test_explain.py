"""`inertia-fx explain`: what it reports of the passes, which excerpts it shows, how it tells a refusal."""

from __future__ import annotations

import pathlib
import re

import pytest

import inertia_fx
from inertia_fx.cli import explain
from inertia_fx.errors import PositionBiasError, UnsupportedAttentionError
from inertia_fx.passes import PassResult
from tests.common.commands import invoke, save_tiny
from tests.common.models import tiny


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> str:
    return save_tiny(tmp_path / "tiny")


@pytest.mark.parametrize(("attention", "form"), [("sdpa", "scaled_dot_product_attention"), ("eager", "softmax")])
def test_explain_reports_every_layer_and_shows_the_first(
    folder: str, tmp_path: pathlib.Path, attention: str, form: str
) -> None:
    result = invoke("explain", "--model", folder, "--attn", attention, "--dump", str(tmp_path / "dump"))
    assert result.exit_code == 0, result.output
    report, _, graphs = result.stdout.partition("# before: the first layer's attention")
    assert f"LlamaForCausalLM, attention {attention}" in report
    assert "find_attention: 2 matched, 0 skipped" in report
    assert "+ layer 0: " in report
    assert "+ layer 1: " in report
    before, _, after = graphs.partition("# after: the first layer's attention")
    assert form in before
    assert "l_cache_layers_0_keys" in before
    assert "l_cache_layers_1_keys" not in before
    assert re.search(r"\[1, 2, 2, s\d+, 16\]", before)
    assert "scaled_dot_product_attention" not in after
    assert "argmin" in after
    assert "retain" not in after.partition("# after: the end of the step")[2]
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["after.py", "before.py", "report.txt"]


def test_explain_can_cut_the_model_and_leave_out_the_graph(folder: str) -> None:
    result = invoke("explain", "--model", folder, "--layers", "1", "--no-graph")
    assert result.exit_code == 0, result.output
    assert "find_attention: 1 matched, 0 skipped" in result.stdout
    assert "#" not in result.stdout
    refused = invoke("explain", "--model", folder, "--layers", "3")
    assert refused.exit_code == 1
    assert "layers=3 is outside 1 ... 2" in refused.stderr


def test_long_reports_are_cut() -> None:
    result = PassResult("find_attention", tuple(f"layer {index}" for index in range(30)), ("why",))
    assert explain.report(result).splitlines() == [
        "find_attention: 30 matched, 1 skipped",
        "  + layer 0",
        "  + layer 1",
        "  + layer 2",
        "  + ... 26 more like these ...",
        "  + layer 29",
        "  - why",
    ]


def test_explain_says_what_is_refused(tmp_path: pathlib.Path) -> None:
    tiny("bloom").save_pretrained(tmp_path)
    result = invoke("explain", "--model", str(tmp_path))
    assert result.exit_code == 1
    assert "refused: PositionBiasError" in result.stdout
    assert re.search(r"layer +\(the whole model\)\n +node +\(none\)\n +reason +BloomForCausalLM biases", result.stdout)


def test_refusal_names_layer_node_and_reason() -> None:
    lines = explain.refusal(UnsupportedAttentionError(3, "softmax_3", "it is odd", "model.py:7"))
    assert lines[:4] == [
        "refused: UnsupportedAttentionError",
        "  layer   3",
        "  node    softmax_3",
        "  reason  it is odd",
    ]
    assert "model.py:7" in lines[4]
    assert explain.refusal(PositionBiasError(None, None, "x"))[1] == "  layer   (the whole model)"
    assert explain.refusal(inertia_fx.errors.UnsupportedModelError("no cache"))[3] == "  reason  no cache"
