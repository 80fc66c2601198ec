"""`inertia-fx explain`: what it reports of the passes, which excerpts it shows, how it tells a refusal."""

from __future__ import annotations

import operator
import pathlib
import re

import pytest
import torch

import inertia_fx
from inertia_fx import debug
from inertia_fx.cli import explain
from inertia_fx.errors import PositionBiasError, UnsupportedAttentionError
from inertia_fx.passes import PASSES, MatchRecord, PassResult, find_marker, name_of, run_passes
from tests.common import spellings
from tests.common.commands import invoke, save_tiny
from tests.common.graphs import options_of, traced
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
    assert re.search(r"^find_attention: 2 matched, 0 skipped, \d+(\.\d)? ms$", report, re.MULTILINE)
    assert re.findall(r"^(\w+): \d+ matched", report, re.MULTILINE) == [name_of(run) for run in PASSES]
    assert "+ layer 0: 'attn_output" in report
    assert "+ layer 1: 'attn_output" in report
    before, _, rest = graphs.partition("# after: the first layer's attention")
    after, _, rest = rest.partition("# before: the end of the step")
    marker, _, end = rest.partition("# after: the end of the step")
    lines = before.strip().splitlines()
    assert re.match(r"l_cache_layers_0_keys\[\w+, :, l_cache_state_free\] = \w+$", lines[0]), (
        "from the write into the keys"
    )
    assert form in before
    assert "\nattn_output" in before
    assert "l_cache_layers_1_keys" not in before
    assert re.search(r"\[1, 2, 2, s\d+, 16\]", before)
    assert "scaled_dot_product_attention" not in after
    assert after.count("torch.softmax(") == 1
    assert ".mean(dim = (1, 2))" in after, "the scores"
    assert " * 0.8" in after, "the momentum"
    assert "l_cache_layers_1_keys" not in after
    assert marker.count("commit_step") == 2
    assert "l_cache_state_free.copy_(argmin)" in end
    assert "commit_step" not in end
    assert max(map(len, before.splitlines())) <= 80
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == [
        "after.py", "before.py", "passes", "report.txt",
    ]  # fmt: skip


def test_explain_can_cut_the_model_and_leave_out_the_graph(folder: str) -> None:
    result = invoke("explain", "--model", folder, "--layers", "1", "--no-graph")
    assert result.exit_code == 0, result.output
    assert "find_attention: 1 matched, 0 skipped" in result.stdout
    assert "#" not in result.stdout
    refused = invoke("explain", "--model", folder, "--layers", "3")
    assert refused.exit_code == 1
    assert "layers=3 is outside 1 ... 2" in refused.stderr


def records(number: int) -> tuple[MatchRecord, ...]:
    return tuple(MatchRecord(True, "sdpa", layer=index, node=f"attention_{index}") for index in range(number))


def test_long_reports_are_cut() -> None:
    result = PassResult("find_attention", records(30), (MatchRecord(False, "why"),), seconds=0.0421)
    assert explain.report(result).splitlines() == [
        "find_attention: 30 matched, 1 skipped, 42 ms",
        "  + layer 0: 'attention_0': sdpa",
        "  + layer 1: 'attention_1': sdpa",
        "  + layer 2: 'attention_2': sdpa",
        "  + ... 26 more like these ...",
        "  + layer 29: 'attention_29': sdpa",
        "  - why",
    ]
    whole = explain.report(PassResult("lower", records(6), seconds=0.00123))
    assert whole.splitlines()[0] == "lower: 6 matched, 0 skipped, 1.2 ms"
    assert len(whole.splitlines()) == 7


def test_reports_fit_the_terminal() -> None:
    record = MatchRecord(True, "proved on 3 states, output and scores off by at most 1e-15 in fp64", 0, "attn_output")
    lines = explain.report(PassResult("prove_attention", (record,)), width=50).splitlines()
    assert lines[1:] == [
        "  + layer 0: 'attn_output': proved on 3 states,",
        "      output and scores off by at most 1e-15 in",
        "      fp64",
    ]


def test_the_excerpts_are_nodes_of_the_graphs() -> None:
    gm = traced(spellings.MATCHED["sdpa_no_mask"], layers=9)
    with debug.record() as seen:
        run_passes(gm, [None] * len(gm.graph.find_nodes(op="placeholder")), options=options_of())  # type: ignore[list-item]
    titles = dict(explain.excerpts(seen[0]))
    assert list(titles) == [
        "before: the first layer's attention",
        "after: the first layer's attention, with its scores and momentum",
        "before: the end of the step",
        "after: the end of the step",
    ]
    marker = " ".join(titles["before: the end of the step"])
    assert "[l_cache_layers_0_keys, ..., l_cache_layers_8_keys]" in marker
    end = "\n".join(titles["after: the end of the step"])
    assert "[:, None, None, :]" not in end, "the mask, which a pass made too, is none of it"
    assert "l_cache_state_free.copy_(argmin)" in end
    before, after = seen[0].before_graph, seen[0].after_graph
    assert before is not None
    assert after is not None
    layer = explain.nodes_of_layer(after, 8)
    assert sum(node.target is torch.softmax for node in layer) == 1
    assert any(node.name == "l_cache_layers_8_values" for one in layer for node in one.all_input_nodes)
    found = find_marker(before)
    assert found is not None
    written = [node.args[0].name for node in explain.write_back(after, found) if node.target in ("copy_", "add_")]  # type: ignore[union-attr]
    assert sorted(written) == sorted(node.name for node in found.state)


def test_code_is_cut_and_broken_at_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    taken = graph.call_function(operator.getitem, (x, (slice(None), None)))
    joined = graph.call_function(torch.cat, ([(taken, x)],), {"dim": -1})
    last = graph.call_method("clamp", (joined,), {"min": 0})
    assert explain.code([taken, joined], width=30) == [
        "getitem = x[:, None]",
        "cat = torch.cat([(getitem,",
        "    x)], dim = -1)",
    ]
    monkeypatch.setattr(explain, "LONGEST_EXCERPT", 1)
    assert explain.code([taken, joined, last]) == ["getitem = x[:, None]", "... 2 more ..."]


def test_a_step_inside_a_region_has_no_excerpts() -> None:
    graph = torch.fx.Graph()
    assert explain.excerpts(debug.Explanation((), "", "", graph, graph)) == []


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
