"""The passes one after the other: operators before and after, what options change, what is reported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx.passes import PASSES, attention_sites, name_of
from inertia_fx.passes.contract import take_matches
from inertia_fx.passes.update_momentum import scores_of
from tests.common import spellings
from tests.common.graphs import count, fresh_dynamo, marker_of, options_of, run_all, run_until, traced  # noqa: F401


def test_operators_before_and_after() -> None:
    gm = traced()
    marker, packet = torch.ops.inertia_fx.commit_step.default, torch.ops.inertia_fx.commit_step
    scored, unscored = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default
    by_name = {name_of(run): run for run in PASSES}

    def run(name: str) -> tuple[Any, ...]:
        take_matches(gm)
        assert by_name[name](gm, [], options=options_of()) is gm
        gm.graph.lint()
        return take_matches(gm)

    run("inline_regions")
    assert count(gm)[F.scaled_dot_product_attention] == 2
    assert count(gm)[marker] + count(gm)[packet] == 1
    run("find_attention")
    before = str(gm.graph)
    assert len(attention_sites(gm.graph)) == 2
    proofs = run("prove_attention")
    assert str(gm.graph) == before
    assert "proved on 3 states" in proofs[0].detail
    assert proofs[1].detail == "reads like layer 0"
    entered = marker_of(gm).new_momentum
    run("emit_scores")
    assert attention_sites(gm.graph) == ()
    assert count(gm)[F.scaled_dot_product_attention] == 0
    assert count(gm)[scored] == 2
    assert len(scores_of(gm.graph)) == 2
    (rule,) = run("update_momentum")
    assert rule.detail == "2 of 2 layers: m = 0.8 m + 0.2 s per layer"
    assert marker_of(gm).new_momentum is not entered
    assert [record.matched for record in run("lower")] == [True, True]
    assert count(gm)[scored] == count(gm)[unscored] == count(gm)[torch.ops.inertia_fx.blend.default] == 0
    assert count(gm)[torch.softmax] == 2
    (outlined,) = run("outline_layers")
    assert (outlined.matched, outlined.detail) == (False, "the inner compiler takes the graph as it stands")
    assert count(gm)[marker] + count(gm)[packet] == 1
    run("evict")
    assert count(gm)[marker] + count(gm)[packet] == 0
    assert count(gm)["copy_"] == 3


@pytest.mark.parametrize(
    ("options", "scored", "rule"),
    [
        ({}, 2, "m = 0.8 m + 0.2 s per layer"),
        ({"alpha": 0.5}, 2, "m = 0.5 m + 0.5 s per layer"),
        ({"alpha": 0.0}, 1, "s of the last layer"),
        ({"aggregator": "single_step"}, 1, "s of the last layer"),
        ({"aggregator": "cumulative"}, 2, "m = m + s per layer"),
        ({"alpha_layer": 0.0, "alpha_time": 0.5}, 1, "m = 0.5 m + 0.5 s of the last layer"),
        ({"alpha_layer": 1.0}, 2, "layers weighted by 1^(K - l)"),
        ({"score": False}, 0, "frozen"),
    ],
)
def test_only_layers_that_count_are_scored(options: dict[str, Any], scored: int, rule: str) -> None:
    gm = run_until(traced(), "update_momentum", **options)
    assert len(scores_of(gm.graph)) == scored
    results = run_all(traced(), **options)
    assert rule in str(results["update_momentum"])
    assert len(results["emit_scores"].matched) == scored
    assert len(results["emit_scores"].skipped) == 2 - scored


def test_repeated_keys_are_not_expanded_any_more() -> None:
    gm = traced(spellings.sdpa_repeat)
    assert count(gm)["expand"] == 4
    run_all(gm)
    assert count(gm)["expand"] == 0


def test_the_lowered_form_follows_the_inner_compiler() -> None:
    for backend, target in (("inductor", "cpu"), ("aot_eager", "reference"), ("eager", "reference")):
        result = run_all(traced(), backend=backend)["lower"]
        assert [record.detail for record in result.matched] == [f"aten ({target})"] * 2


def test_reports_name_every_pass() -> None:
    results = run_all(traced())
    assert list(results) == [name_of(run) for run in PASSES]
    without = ("inline_regions", "lower_enter", "outline_layers", "share_symbols")
    assert [name for name, result in results.items() if not result.matched] == list(without)
    assert [str(record) for record in results["outline_layers"].skipped] == [
        "the inner compiler takes the graph as it stands"
    ]
    assert all(result.seconds > 0 for result in results.values())
    assert results["find_attention"].before == results["find_attention"].after != ""
    assert results["emit_scores"].before == results["prove_attention"].after
    assert "scored_attention" in results["emit_scores"].after
    assert "scored_attention" not in results["emit_scores"].before
