"""`torch.compile(step, backend="inertia_fx")` on decoders that know nothing of transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx import debug, errors
from inertia_fx.backend import inertia
from inertia_fx.cache import SlotCache
from tests.common import spellings
from tests.common.graphs import fresh_dynamo, prompted, steps, traced  # noqa: F401


@pytest.mark.parametrize("form", spellings.MATCHED)
def test_every_form_decodes_alike(form: str) -> None:
    expect = steps(spellings.TinyDecoder(spellings.sdpa_gqa), prompted(spellings.TinyDecoder()), 12)
    assert steps(spellings.TinyDecoder(spellings.MATCHED[form]), prompted(spellings.TinyDecoder()), 12) == expect


def test_compiled_equals_eager_and_the_state_moves() -> None:
    model = spellings.TinyDecoder()
    runs = [steps(model, prompted(model, 12, 2), 10, backend=backend) for backend in ("eager", "aot_eager")]
    assert runs[0] == runs[1]
    retained = runs[0][1]
    assert all(len(row) == 6 for rows in retained for row in rows)
    assert len({tuple(rows[0]) for rows in retained}) > 1


def test_without_passes_the_step_decodes_and_forgets_the_oldest() -> None:
    model = spellings.TinyDecoder()
    _, retained = steps(model, prompted(model), 6, passes=False)
    assert retained == [[list(range(position - 4, position + 1))] for position in range(10, 16)]


def test_two_models_share_a_compile_and_no_state() -> None:
    models = [spellings.TinyDecoder(), spellings.TinyDecoder()]
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
    model = spellings.TinyDecoder()

    def two(tokens: Any, cache: SlotCache) -> Any:
        return model.step(model.step(tokens, cache).argmax(-1, keepdim=True), cache)

    cache = prompted(model)
    with pytest.raises(Exception, match="2 decode steps in one graph"), torch.no_grad(), cache.step(1):
        torch.compile(two, backend="inertia_fx", options={"backend": "eager"})(torch.tensor([[1]]), cache)


def test_record_and_dump(tmp_path: Any) -> None:
    model = spellings.TinyDecoder()
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
