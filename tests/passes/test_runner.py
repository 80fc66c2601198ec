"""The list of passes: what may be left out, what of the user's may be put in, and what is said of a pass that fails."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx import debug, errors
from inertia_fx.backend import inertia
from inertia_fx.passes import OPTIONAL, PASSES, name_of, record_match, run_passes
from inertia_fx.passes.prove_attention import prove_attention_pass
from tests.common import models, spellings
from tests.common.graphs import count, fresh_dynamo, options_of, prompted, run_all, steps, traced  # noqa: F401

NEEDED = [name_of(run) for run in PASSES if name_of(run) not in OPTIONAL]


def test_each_pass_is_a_named_function() -> None:
    for run in PASSES:
        assert run.__name__ == f"{name_of(run)}_pass"  # type: ignore[attr-defined]
        assert run.__module__ == f"inertia_fx.passes.{name_of(run)}"
    assert set(OPTIONAL) < {name_of(run) for run in PASSES}
    assert name_of(functools.partial(functools.partial(prove_attention_pass), options=None)) == "prove_attention"


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("disabled", [(name,) for name in OPTIONAL] + [OPTIONAL], ids=str)
def test_optional_passes_change_nothing(disabled: tuple[str, ...], backend: str) -> None:
    model = spellings.TinyDecoder(layers=3)
    expect = steps(model, prompted(model, 12, 2), 6)
    torch._dynamo.reset()
    with debug.record() as seen:
        assert steps(model, prompted(model, 12, 2), 6, backend=backend, disable_passes=disabled) == expect
    for name in disabled:
        assert [record.detail for record in seen[0].result(name).skipped] == ["switched off (disable_passes)"]
        assert seen[0].result(name).matched == ()


def test_a_model_is_compiled_without_optional_passes() -> None:
    model = inertia_fx.compile(models.llama(), backend="aot_eager", disable_passes=["outline_layers"])
    ids = torch.tensor([models.prompt(20)])
    with debug.record() as seen:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    assert [record.detail for record in seen[0].result("outline_layers").skipped] == ["switched off (disable_passes)"]


@pytest.mark.parametrize("name", NEEDED)
def test_a_needed_pass_is_not_left_out(name: str) -> None:
    for arguments in ({"disable_passes": [name]}, {"passes": [run for run in PASSES if name_of(run) != name]}):
        with pytest.raises(errors.ConfigError, match=f"{name}.*needs to be right"):
            inertia(traced(), [], options=arguments)
    with pytest.raises(errors.ConfigError, match="needs to be right"):
        inertia_fx.compile(models.cached_llama(2, 4, 2), disable_passes=[name])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disable_passes": ["outline_layer"]}, "'outline_layer', which is no pass: there are inline_regions, "),
        ({"disable_passes": "lower"}, "is not a list of names"),
        ({"disable_passes": [3]}, "is not a list of names"),
        ({"passes": [*PASSES, 3]}, "has 3 in it, which is not a function"),
        ({"passes": PASSES[::-1]}, "in another order"),
        ({"passes": [*PASSES, PASSES[0]]}, "or one twice"),
        ({"passes": []}, "passes lacks inline_regions, find_attention, prove_attention"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else None,
)
def test_bad_lists(options: dict[str, Any], message: str) -> None:
    gm = traced()
    before = str(gm.graph)
    with pytest.raises(errors.ConfigError, match=message):
        inertia(gm, [], options={"backend": "eager"} | options)
    assert str(gm.graph) == before


# ---------------------------------------------------------------------- passes of the user's


def double_the_logits_pass(gm: torch.fx.GraphModule, example_inputs: Any, *, options: Any) -> torch.fx.GraphModule:
    output = gm.graph.output_node()
    (logits,) = output.args[0]  # type: ignore[misc]
    with gm.graph.inserting_before(output):
        doubled = gm.graph.call_function(torch.mul, (logits, 2))  # type: ignore[arg-type]
    output.replace_input_with(logits, doubled)  # type: ignore[arg-type]
    record_match(gm, "twice the logits", node=logits.name)  # type: ignore[union-attr]
    return gm


def test_a_pass_of_the_users_runs_among_ours() -> None:
    model = spellings.TinyDecoder()
    cache, other = prompted(model), prompted(model)
    passes = (*PASSES[:-1], double_the_logits_pass, PASSES[-1])
    plain = torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"}, fullgraph=True)
    with torch.no_grad(), cache.step(1):
        expect = plain(torch.tensor([[1]]), cache)
    torch._dynamo.reset()
    step = torch.compile(
        model.step, backend="inertia_fx", options={"backend": "eager", "passes": passes}, fullgraph=True
    )
    with debug.record() as seen, torch.no_grad(), other.step(1):
        got = step(torch.tensor([[1]]), other)
    torch.testing.assert_close(got, 2 * expect)
    result = seen[0].result("double_the_logits")
    assert [record.detail for record in result.matched] == ["twice the logits"]
    assert result.before != result.after


def uses_a_later_node_pass(gm: Any, example_inputs: Any, *, options: Any) -> Any:
    first = next(node for node in gm.graph.nodes if node.op == "call_function")
    first.update_arg(0, gm.graph.output_node().args[0][0])
    return gm


def forgets_to_return_pass(gm: Any, example_inputs: Any, *, options: Any) -> Any:
    return None


def raises_pass(gm: Any, example_inputs: Any, *, options: Any) -> Any:
    return 1 / 0


def keeps_the_marker_pass(gm: Any, example_inputs: Any, *, options: Any) -> Any:
    (state, *_) = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_before(gm.graph.output_node()):
        gm.graph.call_function(torch.ops.inertia_fx.commit_step.default, (state,) * 6 + ([], [], 0, 0))
    return gm


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (
            uses_a_later_node_pass,
            "'uses_a_later_node' did not work: it left a broken graph: .*before it has been defined",
        ),
        (forgets_to_return_pass, "'forgets_to_return' did not work: it returned NoneType instead of the graph module"),
        (raises_pass, "'raises' did not work: it raised ZeroDivisionError: division by zero"),
        (keeps_the_marker_pass, "the marker is still in the graph"),
    ],
)
def test_a_pass_that_breaks_the_graph_is_named(run: Any, reason: str) -> None:
    gm = traced()
    with pytest.raises(errors.PassError, match=f"(?s){reason}") as caught:
        run_passes(gm, [], options=options_of(), passes=(*PASSES[:-1], run))
    assert "What to do" in str(caught.value)
    assert caught.value.name in (name_of(run), "the passes")


def test_a_broken_pass_reaches_the_user_and_changes_nothing() -> None:
    model = spellings.TinyDecoder()
    cache = prompted(model)
    before = [positions.tolist() for positions in cache.retained_positions()]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        steps(model, cache, 1, passes=(*PASSES, raises_pass))
    assert isinstance(caught.value.inner_exception, errors.PassError)
    assert [positions.tolist() for positions in cache.retained_positions()] == before


def test_the_graph_is_shown_around_every_pass(tmp_path: Any) -> None:
    with debug.record() as seen:
        run_passes(traced(), [], options=options_of())
    folder = seen[0].dump(tmp_path / "graphs")
    files = sorted(path.name for path in (folder / "passes").iterdir())
    assert files == [f"{number:02}_{name_of(run)}.py" for number, run in enumerate(PASSES, 1)]
    text = (folder / "passes" / "05_emit_scores.py").read_text()
    assert "scored_attention" in text
    assert "blend" not in text
    with pytest.raises(KeyError, match="find_attentoin was not run; there are inline_regions"):
        seen[0].result("find_attentoin")


def test_a_lowered_operator_is_needed_by_nobody() -> None:
    """Without `lower` our operators stay, and run as they are defined."""
    gm = traced()
    run_all(gm, disable_passes=["lower"])
    assert count(gm)[torch.ops.inertia_fx.scored_attention.default] == 2
