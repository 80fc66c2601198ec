"""Every pass by itself: what it must match, what it must not, and the operators before and after."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import inertia_fx
from inertia_fx import debug, errors
from inertia_fx.backend import BackendOptions, inertia
from inertia_fx.cache import SlotCache
from inertia_fx.passes import PASSES, PassResult, Rewrite, find_marker, run_passes
from tests.common import spellings as plain

CONFIG = inertia_fx.Config(ratio=0.5, min_budget=2)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """All decoders here share the code object of `PlainDecoder.step`, and with it Dynamo's recompile limit."""
    torch._dynamo.reset()


def prompted(model: plain.PlainDecoder, length: int = 10, rows: int = 1, config: Any = CONFIG) -> SlotCache:
    cache = SlotCache(config)
    model.prompt(torch.arange(rows * length).reshape(rows, length) % 50, cache)
    return cache


def traced(attention: Any = plain.sdpa_gqa, layers: int = 2) -> torch.fx.GraphModule:
    """The decode step's graph as Dynamo hands it to a backend."""
    graphs = []

    def catch(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    model = plain.PlainDecoder(attention, layers)
    cache = prompted(model)
    with torch.no_grad(), cache.step(1):
        torch.compile(model.step, backend=catch, fullgraph=True)(torch.tensor([[1]]), cache)
    assert len(graphs) == 1
    return graphs[0]


def rewrite_of(gm: torch.fx.GraphModule, **options: Any) -> Rewrite:
    marker = find_marker(gm.graph)
    assert marker is not None
    return Rewrite(gm, marker, BackendOptions(**({"backend": "eager"} | options)))


def by_name(results: tuple[PassResult, ...]) -> dict[str, PassResult]:
    return {result.name: result for result in results}


def count(gm: torch.fx.GraphModule) -> collections.Counter[Any]:
    return collections.Counter(node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method"))


def steps(model: plain.PlainDecoder, cache: SlotCache, number: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Greedy steps through `torch.compile(step, backend="inertia_fx")`: tokens and retained positions."""
    step = torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"} | options, fullgraph=True)
    tokens, retained = [torch.full((cache.rows, 1), 3)], []
    with torch.no_grad():
        for _ in range(number):
            with cache.step(cache.rows):
                tokens.append(step(tokens[-1], cache).argmax(-1, keepdim=True))
            retained.append([row.tolist() for row in cache.retained_positions()])
    return [token.tolist() for token in tokens], retained


# ---------------------------------------------------------------------- find_attention


@pytest.mark.parametrize("form", plain.MATCHED)
def test_find_attention_matches(form: str) -> None:
    rewrite = rewrite_of(traced(plain.MATCHED[form]))
    result = PASSES[0](rewrite)
    assert len(result.matched) == 2
    assert result.skipped == ()
    for layer, site in enumerate(rewrite.sites):
        assert site.layer == layer
        assert site.form == ("softmax" if "softmax" in form else "sdpa")
        assert (site.kv_heads, site.groups) == (plain.KV_HEADS, plain.HEADS // plain.KV_HEADS)
        assert site.scale == pytest.approx(plain.SCALE)
        assert site.key is rewrite.marker.keys[layer]
        assert site.value is rewrite.marker.values[layer]


@pytest.mark.parametrize("form", plain.REFUSED)
def test_find_attention_refuses_by_name(form: str) -> None:
    attention, reason = plain.REFUSED[form]
    rewrite = rewrite_of(traced(attention, layers=1))
    before = str(rewrite.graph)
    with pytest.raises(errors.UnsupportedAttentionError) as caught:
        PASSES[0](rewrite)
    error = caught.value
    assert reason in error.reason
    assert error.layer == 0
    assert error.node is not None
    assert error.node in {node.name for node in rewrite.graph.nodes}
    assert "spellings.py" in str(error.user_line)
    assert "layer 0" in str(error)
    assert "What to do" in str(error)
    assert isinstance(error, errors.PositionBiasError) == (form == "alibi")
    assert str(rewrite.graph) == before


def test_a_refusal_reaches_the_user_and_changes_nothing() -> None:
    model = plain.PlainDecoder(plain.alibi)
    cache = prompted(model)
    before = [positions.tolist() for positions in cache.retained_positions()]
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        steps(model, cache, 1)
    assert isinstance(caught.value.inner_exception, errors.PositionBiasError)
    assert [positions.tolist() for positions in cache.retained_positions()] == before
    assert cache.seen == 10
    model.attention = plain.sdpa_gqa
    _, retained = steps(model, cache, 1)
    _, expect = steps(model, prompted(model), 1)
    assert retained == expect


def test_other_attention_in_the_graph_is_left_alone_and_reported() -> None:
    def with_router(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
        gate = F.softmax(q.sum(-1, keepdim=True), dim=1)
        other = F.scaled_dot_product_attention(q, q, q)
        return plain.sdpa_gqa(q, k, v, live, extra) * gate + other

    gm = traced(with_router)
    rewrite = rewrite_of(gm)
    result = PASSES[0](rewrite)
    assert len(result.matched) == 2
    assert len(result.skipped) == 4
    assert all("are not a slot buffer" in line or "does not run over" in line for line in result.skipped)
    for run in PASSES[1:]:
        run(rewrite)
    assert count(gm)[F.scaled_dot_product_attention] == 2


# ---------------------------------------------------------------------- emit_scores, update_momentum, evict, lower


def test_operators_before_and_after() -> None:
    gm = traced()
    retain = torch.ops.inertia_fx.retain.default
    packet = torch.ops.inertia_fx.retain
    scored, plain_op = torch.ops.inertia_fx.scored_attention.default, torch.ops.inertia_fx.slot_attention.default
    rewrite = rewrite_of(gm)
    assert count(gm)[F.scaled_dot_product_attention] == 2
    assert count(gm)[retain] + count(gm)[packet] == 1
    PASSES[0](rewrite)
    PASSES[1](rewrite)
    assert count(gm)[F.scaled_dot_product_attention] == 0
    assert count(gm)[scored] == 2
    assert len(rewrite.scores) == 2
    assert PASSES[2](rewrite).matched == ("2 of 2 layers: m = 0.8 m + 0.2 s per layer",)
    PASSES[3](rewrite)
    assert count(gm)[retain] + count(gm)[packet] == 0
    assert count(gm)["copy_"] == 3
    assert len(PASSES[4](rewrite).matched) == 2
    assert PASSES[5](rewrite).matched == ()  # the inner compiler 'eager' takes the graph as it stands
    assert count(gm)[scored] == count(gm)[plain_op] == 0
    assert count(gm)[torch.softmax] == 2
    gm.graph.lint()


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
    rewrite = rewrite_of(traced(), **options)
    results = run_passes(rewrite)
    assert len(rewrite.scores) == scored
    assert rule in str(results[2])
    assert len(results[1].matched) == scored
    assert len(results[1].skipped) == 2 - scored


def test_repeated_keys_are_not_expanded_any_more() -> None:
    gm = traced(plain.sdpa_repeat)
    assert count(gm)["expand"] == 4
    run_passes(rewrite_of(gm))
    assert count(gm)["expand"] == 0


def test_the_lowered_form_follows_the_inner_compiler() -> None:
    assert "inductor_cpu" in str(by_name(run_passes(rewrite_of(traced(), backend="inductor")))["lower"])
    assert "reference" in str(by_name(run_passes(rewrite_of(traced(), backend="aot_eager")))["lower"])


def test_reports_name_every_pass() -> None:
    results = run_passes(rewrite_of(traced()))
    assert [result.name for result in results] == [run.__name__ for run in PASSES]
    assert all(result.matched for result in results[:-1])
    assert results[-1].skipped == ("the inner compiler takes the graph as it stands",)


# ---------------------------------------------------------------------- the backend


@pytest.mark.parametrize("form", plain.MATCHED)
def test_every_form_decodes_alike(form: str) -> None:
    expect = steps(plain.PlainDecoder(plain.sdpa_gqa), prompted(plain.PlainDecoder()), 12)
    assert steps(plain.PlainDecoder(plain.MATCHED[form]), prompted(plain.PlainDecoder()), 12) == expect


def test_compiled_equals_eager_and_the_state_moves() -> None:
    model = plain.PlainDecoder()
    runs = [steps(model, prompted(model, 12, 2), 10, backend=backend) for backend in ("eager", "aot_eager")]
    assert runs[0] == runs[1]
    retained = runs[0][1]
    assert all(len(row) == 6 for rows in retained for row in rows)
    assert len({tuple(rows[0]) for rows in retained}) > 1


def test_without_passes_the_step_decodes_and_forgets_the_oldest() -> None:
    model = plain.PlainDecoder()
    _, retained = steps(model, prompted(model), 6, passes=False)
    assert retained == [[list(range(position - 4, position + 1))] for position in range(10, 16)]


def test_two_models_share_a_compile_and_no_state() -> None:
    models = [plain.PlainDecoder(), plain.PlainDecoder()]
    with torch.no_grad():
        models[1].embed.weight.copy_(models[1].embed.weight.flip(0))
    alone = [steps(model, prompted(model), 8) for model in models]
    caches = [prompted(model) for model in models]
    compiled = [
        torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"}, fullgraph=True)
        for model in models
    ]
    tokens = [torch.full((1, 1), 3), torch.full((1, 1), 3)]
    with torch.no_grad():
        for step in range(8):
            for index, cache in enumerate(caches):
                with cache.step(1):
                    tokens[index] = compiled[index](tokens[index], cache).argmax(-1, keepdim=True)
                assert [row.tolist() for row in cache.retained_positions()] == alone[index][1][step]


def test_a_graph_without_the_marker_passes_through() -> None:
    function = torch.compile(lambda x: F.softmax(x, -1) * 2, backend="inertia_fx", options={"backend": "eager"})
    x = torch.randn(3, 4)
    with debug.record() as seen:
        torch.testing.assert_close(function(x), F.softmax(x, -1) * 2)
    assert seen == []


def test_two_steps_in_one_graph_are_refused() -> None:
    model = plain.PlainDecoder()

    def two(tokens: Any, cache: SlotCache) -> Any:
        return model.step(model.step(tokens, cache).argmax(-1, keepdim=True), cache)

    cache = prompted(model)
    with pytest.raises(Exception, match="2 decode steps in one graph"), torch.no_grad(), cache.step(1):
        torch.compile(two, backend="inertia_fx", options={"backend": "eager"})(torch.tensor([[1]]), cache)


def test_record_and_dump(tmp_path: Any) -> None:
    model = plain.PlainDecoder()
    with debug.record() as seen:
        steps(model, prompted(model), 2)
    assert len(seen) == 1
    folder = seen[0].dump(tmp_path / "graphs")
    assert "find_attention: 2 matched" in (folder / "report.txt").read_text()
    assert (folder / "before.py").read_text().count("_nn.scaled_dot_product_attention(") == 2
    assert "_nn.scaled_dot_product_attention(" not in (folder / "after.py").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ratio": 0.9}, "decided by the cache"),
        ({"aplha": 0.9}, "no option 'aplha'"),
        ({"alpha": 1.0}, r"alpha=1.0 is outside \[0, 1\)"),
        ({"scorer": "value"}, "scorer='value' is unknown"),
        ({"backend": "inertia_fx"}, "inside themselves"),
        ({"backend": "indcutor"}, "backend='indcutor' is unknown"),
        ({"backend": 3}, "neither a name nor a callable"),
        ({"backend": "eager", "mode": "max-autotune"}, "Inductor's"),
        ({"mode": "fast"}, "mode='fast' is unknown"),
        ({"mode": "default", "options": {"freezing": True}}, "exclude each other"),
        ({"options": {"frezing": True}}, "not an Inductor setting"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        inertia(traced(), [], options=options)
