"""Rewrites prove themselves: what reads like attention and is something else is refused, whatever its names are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx import errors
from inertia_fx.passes import attention_sites, find_attention, prove_attention
from inertia_fx.passes.contract import SITE, take_matches
from tests.common import spellings
from tests.common.graphs import OtherwiseInOneLayer, Step, fresh_dynamo, options_of, run_until, traced  # noqa: F401
from tests.passes import hostile

FORMS = [pytest.param(form, id=f"{kind}: {form.__name__}") for kind, forms in hostile.KINDS.items() for form in forms]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_something_else_is_refused(form: Any) -> None:
    gm = traced(form, layers=1)
    before = str(gm.graph)
    with pytest.raises(errors.UnsupportedAttentionError) as caught:
        run_until(gm, "prove_attention")
    error = caught.value
    assert error.layer == 0
    assert error.node in {node.name for node in gm.graph.nodes}
    assert "hostile.py" in str(error.user_line)
    assert str(gm.graph) == before


@pytest.mark.parametrize("form", hostile.SPELLINGS, ids=lambda form: form.__name__)
def test_what_is_right_is_matched_however_it_is_spelled(form: Any) -> None:
    step = Step(form)
    gm = step.rewritten()
    assert step.difference(gm) < 1e-5
    assert not gm.graph.find_nodes(op="call_function", target=torch.ops.inertia_fx.commit_step)


def test_every_kind_has_neighbours() -> None:
    assert len(hostile.KINDS) == 6
    assert all(len(forms) >= 4 for forms in hostile.KINDS.values())


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (hostile.query_zeroed, "its output differs from that of what would replace it"),
        (hostile.keys_through_fp8, "tried on a small state (7 slots, float64)"),
        (hostile.uneven_groups, "its output differs"),
    ],
)
def test_the_error_says_by_how_much(form: Any, reason: str) -> None:
    with pytest.raises(errors.UnsupportedAttentionError, match=r"by \d.*relative") as caught:
        run_until(traced(form, layers=1), "prove_attention")
    assert reason in caught.value.reason


# ---------------------------------------------------------------------- each check by itself


def found(attention: Any, monkeypatch: pytest.MonkeyPatch, layers: int = 1) -> Any:
    """The graph of an attention with its sites found, structure alone deciding."""
    monkeypatch.setattr(find_attention, "_check_unwritten", lambda *arguments: None)
    monkeypatch.setattr(find_attention, "check_mask", lambda *arguments: None)
    return run_until(traced(attention, layers=layers), "find_attention")


def refusal(gm: Any, **options: Any) -> str:
    with pytest.raises(errors.UnsupportedAttentionError) as caught:
        prove_attention.prove_attention_pass(gm, [], options=options_of(**options))
    return caught.value.reason


@pytest.mark.parametrize(
    "form",
    [form for form in hostile.KINDS["written through a view"] if "weights" not in form.__name__ and "mask" not in form.__name__]
    + list(hostile.KINDS["written by what does not look like it"][:5]),
    ids=lambda form: form.__name__,
)  # fmt: skip
def test_running_it_sees_writes_that_nobody_looked_for(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "its output differs" in refusal(found(form, monkeypatch))


def test_every_layer_is_proved_not_the_first_one_alone() -> None:
    gm = traced(decoder=OtherwiseInOneLayer.attending(hostile.keys_through_fp8, 2), layers=4)
    with pytest.raises(errors.UnsupportedAttentionError) as caught:
        run_until(gm, "prove_attention")
    assert caught.value.layer == 2


def test_layers_that_read_alike_are_proved_once() -> None:
    gm = run_until(traced(layers=5), "prove_attention")
    details = [record.detail for record in take_matches(gm)][5:]
    assert details[0].startswith("proved on 3 states")
    assert details[1:] == ["reads like layer 0"] * 4


def test_a_value_that_scales_with_itself_is_no_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not linear in V: the values' own size comes in a second time, where only running it shows it."""

    def quadratic(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        return F.softmax(hostile.logits_of(q, k, live), -1) @ hostile.repeat(v)

    gm = found(quadratic, monkeypatch)
    (site,) = attention_sites(gm.graph)
    graph = gm.graph
    with graph.inserting_after(site.output):
        squared = graph.call_function(torch.mul, (site.output, site.output))
    squared.meta = dict(site.output.meta)
    site.output.replace_all_uses_with(squared, delete_user_cb=lambda user: user is not squared)
    del site.output.meta[SITE]
    squared.meta[SITE] = type(site)(**{**vars(site), "output": squared})
    assert "its output differs" in refusal(gm)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"scale": 0.36}, "its output differs"),
        ({"mask": None}, "its output differs"),
        ({"mask_kind": "hide"}, "its output differs"),
        ({"kv_heads": 1, "groups": 4}, "would replace it"),
    ],
    ids=str,
)
def test_a_site_that_was_misread_is_refused(change: dict[str, Any], reason: str) -> None:
    gm = run_until(traced(spellings.sdpa_gqa, layers=1), "find_attention")
    (site,) = attention_sites(gm.graph)
    fields = {name: getattr(site, name) for name in site.__dataclass_fields__} | change
    site.output.meta[SITE] = type(site)(**fields)
    assert reason in refusal(gm)


def test_scores_are_proved_against_the_weights_that_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the replacement's scores are of the first head alone, its output is right."""
    from inertia_fx.kernels import reference

    real = reference.scored_attention

    def first_head(*arguments: Any) -> Any:
        output, _ = real(*arguments)
        weights = reference.attention_probabilities(arguments[0], arguments[1], *arguments[3:4], *arguments[5:7])
        return output, weights[:, 0, 0]

    monkeypatch.setattr(reference, "scored_attention", first_head)
    for scorer in ("attention", "vnorm", "entropy"):
        gm = run_until(traced(layers=1), "find_attention")
        assert "its weights are not its scores" in refusal(gm, scorer=scorer)


def test_the_global_random_state_is_left_alone() -> None:
    gm = run_until(traced(layers=1), "find_attention")
    before = torch.get_rng_state()
    prove_attention.prove_attention_pass(gm, [], options=options_of())
    assert torch.equal(torch.get_rng_state(), before)


def test_what_cannot_be_run_is_refused_by_name() -> None:
    with torch.library._scoped_library("inertia_fx_test", "DEF") as library:  # type: ignore[attr-defined]
        library.define("nowhere(Tensor x) -> Tensor")
        library.impl("nowhere", torch.empty_like, "Meta")

        def of_the_query(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
            return hostile.sdpa(torch.ops.inertia_fx_test.nowhere(q), k, v, live)

        def of_the_mask(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
            return hostile.sdpa(q, k, v, torch.ops.inertia_fx_test.nowhere(live))

        run_until(traced(of_the_query, runs=False), "prove_attention")  # how a query is made is no part of the slice
        with pytest.raises(errors.UnsupportedAttentionError, match="cannot be tried out, as nowhere"):
            run_until(traced(of_the_mask, runs=False), "prove_attention")


def test_an_operator_that_does_not_say_what_it_writes_is_taken_to_write() -> None:
    """A higher-order operator has no schema."""
    gm = run_until(traced(layers=1), "inline_regions")
    (attention,) = gm.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    with gm.graph.inserting_before(attention):
        gm.graph.call_function(torch.ops.higher_order.cond, (True, None, None, (attention.args[0],)))
    with pytest.raises(errors.UnsupportedAttentionError, match="it has no schema that says what it writes"):
        run_until(gm, "prove_attention")
