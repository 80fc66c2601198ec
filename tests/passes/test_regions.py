"""Equal layers become one subgraph; regions that somebody marked are read like anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx import debug, errors
from inertia_fx.passes.contract import take_matches
from inertia_fx.passes.inline_regions import inline_regions_pass
from inertia_fx.passes.outline_layers import outline_layers_pass
from tests.common import spellings
from tests.common.graphs import (  # noqa: F401
    count,
    fresh_dynamo,
    lower_to_triton,
    marker_of,
    options_of,
    prompted,
    run_all,
    run_until,
    steps,
    traced,
)

CALL = torch.ops.higher_order.invoke_subgraph


def outlined(gm: torch.fx.GraphModule, **options: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was matched and what was skipped, as printed."""
    with torch.no_grad():
        result = run_all(gm, **({"backend": "aot_eager"} | options))["outline_layers"]
    return tuple(map(str, result.matched)), tuple(map(str, result.skipped))


def regions(gm: torch.fx.GraphModule) -> list[str]:
    """The name of the subgraph that each call in the graph runs."""
    return [node.args[1] for node in gm.graph.nodes if node.target is CALL]


@pytest.mark.parametrize("form", spellings.MATCHED)
def test_equal_layers_become_one_subgraph(form: str) -> None:
    gm = traced(spellings.MATCHED[form], layers=4)
    softmaxes = count(gm)[F.scaled_dot_product_attention] + count(gm)[F.softmax] + count(gm)["softmax"]
    assert softmaxes == 4
    assert outlined(gm) == (("'decoder_layer_0': layers 0 to 3 (4 of them)",), ())
    assert regions(gm) == ["decoder_layer_0"] * 4
    assert count(gm)[torch.softmax] == 0
    assert count(gm.decoder_layer_0)[torch.softmax] == 1
    gm.graph.lint()


@pytest.mark.parametrize(
    ("options", "matched", "skipped"),
    [
        ({"regions": False}, (), ("switched off (regions=False)",)),
        ({"backend": "eager"}, (), ("the inner compiler takes the graph as it stands",)),
        (
            {"alpha_layer": 1.0},  # Horner's scheme begins in layer 0, which is a node shorter
            ("'decoder_layer_2': layers 2, 3",),
            ("layer 0: like no other", "layer 1: like no other"),
        ),
        ({"aggregator": "single_step"}, ("'decoder_layer_1': layers 1, 2, 3",), ("layer 0: like no other",)),
        ({"score": False}, ("'decoder_layer_0': layers 0 to 3 (4 of them)",), ()),
    ],
)
def test_what_is_compiled_once(options: dict[str, Any], matched: tuple[str, ...], skipped: tuple[str, ...]) -> None:
    assert outlined(traced(layers=4), **options) == (matched, skipped)


def test_a_layer_of_another_width_is_left_as_it_is() -> None:
    """The same nodes, but other shapes: a subgraph is compiled for one set of shapes."""
    gm = traced(layers=4)
    weights = [node for node in gm.graph.nodes if node.op == "placeholder" and "weight" in node.name]
    of_layer_2 = next(node for node in weights if "_2_" in node.name)
    mode = of_layer_2.meta["example_value"].fake_mode
    with mode:
        of_layer_2.meta["example_value"] = torch.empty(1, *of_layer_2.meta["example_value"].shape)
    assert outlined(gm) == (("'decoder_layer_0': layers 0, 1, 3",), ("layer 2: like no other",))


@pytest.mark.parametrize("options", [{}, {"alpha_layer": 1.0}, {"aggregator": "single_step"}, {"scorer": "entropy"}])
def test_regions_change_nothing(options: dict[str, Any]) -> None:
    model = spellings.TinyDecoder(layers=4)
    runs = [
        steps(model, prompted(model, 12, 2), 10, backend=backend, regions=regions, **options)
        for backend, regions in (("eager", False), ("aot_eager", True))
    ]
    assert runs[0] == runs[1]
    assert len({tuple(rows[0]) for rows in runs[0][1]}) > 1


def test_layers_with_triton_kernels_stay_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch would call the operators of a region one by one, instead of compiling what they launch into the step."""
    pytest.importorskip("triton")
    lower_to_triton(monkeypatch)
    gm = traced(layers=4)
    matched, skipped = outlined(gm)
    assert matched == ()
    assert "triton: its operators" in skipped[0]
    assert regions(gm) == []
    assert count(gm)[torch.ops.inertia_fx.triton_blended_attention.default] == 4


def test_a_view_of_the_slots_from_outside_keeps_layers_apart() -> None:
    """In a region it would be a tensor of its own, which does not see the write."""
    with torch.no_grad():
        gm = run_until(traced(layers=4), "lower", backend="aot_eager")
        take_matches(gm)
        keys = marker_of(gm).keys
        softmaxes = gm.graph.find_nodes(op="call_function", target=torch.softmax)
        for key, softmax in zip(keys, softmaxes, strict=True):
            with gm.graph.inserting_after(list(gm.graph.find_nodes(op="placeholder"))[-1]):
                view = gm.graph.call_method("select", (key, 3, 0))
                view.meta["example_value"] = key.meta["example_value"].select(3, 0)
            with gm.graph.inserting_before(softmax):
                logits = gm.graph.call_function(torch.add, (softmax.args[0], gm.graph.call_method("sum", (view,))))
            softmax.update_arg(0, logits)
        outline_layers_pass(gm, [], options=options_of(backend="aot_eager"))
    (record,) = take_matches(gm)
    assert not record.matched
    assert record.detail == "layers 0 to 3 (4 of them): slots that it writes go into it a second time, as a view"
    gm.graph.lint()


# ---------------------------------------------------------------------- regions that are there already


class Marked(spellings.TinyDecoder):
    """Its attention is a nested compile region of its own."""

    def __init__(self, attention: Any = spellings.sdpa_gqa, layers: int = 2) -> None:
        super().__init__(torch.compiler.nested_compile_region(attention), layers)


def test_marked_regions_are_matched() -> None:
    expect = steps(spellings.TinyDecoder(layers=3), prompted(spellings.TinyDecoder(layers=3)), 8)
    for backend in ("eager", "aot_eager"):
        model = Marked(layers=3)
        with debug.record() as seen:
            assert steps(model, prompted(model), 8, backend=backend) == expect
        assert len(seen[0].result("inline_regions").matched) == 3
        assert len(seen[0].result("find_attention").matched) == 3
        assert "invoke_subgraph" in seen[0].before


def test_marked_regions_are_refused_by_name() -> None:
    model = Marked(spellings.alibi)
    cache = prompted(model)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        steps(model, cache, 1)
    error = caught.value.inner_exception
    assert isinstance(error, errors.PositionBiasError)
    assert error.layer == 0
    assert "spellings.py" in str(error.user_line)


def test_inlining_keeps_other_graphs() -> None:
    gm = traced(layers=1)
    before = str(gm.graph)
    inline_regions_pass(gm, [], options=options_of())
    assert str(gm.graph) == before
