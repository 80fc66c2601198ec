"""What is read as an attention, what is refused and in which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx import errors
from inertia_fx.passes import attention_sites
from inertia_fx.passes.contract import take_matches
from tests.common import spellings
from tests.common.graphs import count, fresh_dynamo, marker_of, prompted, run_until, steps, traced  # noqa: F401


@pytest.mark.parametrize("form", spellings.MATCHED)
def test_every_known_form_is_matched(form: str) -> None:
    gm = run_until(traced(spellings.MATCHED[form]), "find_attention")
    marker, sites, records = marker_of(gm), attention_sites(gm.graph), take_matches(gm)
    assert [record.matched for record in records] == [True, True]
    assert [record.node for record in records] == [site.output.name for site in sites]
    for layer, site in enumerate(sites):
        assert site.layer == layer
        assert site.form == ("softmax" if "softmax" in form else "sdpa")
        assert (site.kv_heads, site.groups) == (spellings.KV_HEADS, spellings.HEADS // spellings.KV_HEADS)
        assert site.scale == pytest.approx(spellings.SCALE)
        assert site.key is marker.keys[layer]
        assert site.value is marker.values[layer]


@pytest.mark.parametrize("form", spellings.REFUSED)
def test_every_other_form_is_refused_by_name(form: str) -> None:
    attention, reason = spellings.REFUSED[form]
    gm = traced(attention, layers=1)
    before = str(gm.graph)
    with pytest.raises(errors.UnsupportedAttentionError) as caught:
        run_until(gm, "prove_attention")
    error = caught.value
    assert reason in error.reason
    assert error.layer == 0
    assert error.node is not None
    assert error.node in {node.name for node in gm.graph.nodes}
    assert "spellings.py" in str(error.user_line)
    assert "layer 0" in str(error)
    assert "What to do" in str(error)
    assert isinstance(error, errors.PositionBiasError) == (form == "alibi")
    assert str(gm.graph) == before


def test_a_refusal_reaches_the_user_and_changes_nothing() -> None:
    model = spellings.TinyDecoder(spellings.alibi)
    cache = prompted(model)
    before = [positions.tolist() for positions in cache.retained_positions()]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        steps(model, cache, 1)
    assert isinstance(caught.value.inner_exception, errors.PositionBiasError)
    assert [positions.tolist() for positions in cache.retained_positions()] == before
    assert cache.seen == 10
    model.attention = spellings.sdpa_gqa
    _, retained = steps(model, cache, 1)
    _, expect = steps(model, prompted(model), 1)
    assert retained == expect


def test_other_attention_in_the_graph_is_left_alone_and_reported() -> None:
    def with_router(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        gate = F.softmax(q.sum(-1, keepdim=True), dim=1)
        other = F.scaled_dot_product_attention(q, q, q)
        return spellings.sdpa_gqa(q, k, v, live, extra) * gate + other

    gm = run_until(traced(with_router), "find_attention")
    records = take_matches(gm)
    assert len([record for record in records if record.matched]) == 2
    skipped = [record.detail for record in records if not record.matched]
    assert len(skipped) == 4
    assert all("are not a slot buffer" in line or "does not run over" in line for line in skipped)
    gm = run_until(traced(with_router), "evict")
    assert count(gm)[F.scaled_dot_product_attention] == 2
