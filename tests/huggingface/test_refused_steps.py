"""Decode steps that are refused or fail in the middle: the cache stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx import errors
from tests.common import models


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_outputs_that_a_step_does_not_have(name: str) -> None:
    compiled = inertia_fx.compile(models.llama(attention="eager"), backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        prompt = compiled(ids, past_key_values=cache, **{name: True})
        assert len(prompt.attentions if name == "output_attentions" else prompt.hidden_states) >= 2
        with pytest.raises(errors.OutputError, match=f"{name}=True on a decode step"):
            compiled(ids[:, :1], past_key_values=cache, **{name: True})
        assert cache.get_seq_length() == 8
        setattr(compiled.config, name, True)
        with pytest.raises(errors.OutputError):
            compiled(ids[:, :1], past_key_values=cache)
        setattr(compiled.config, name, False)
        assert compiled(ids[:, :1], past_key_values=cache, **{name: False}).logits.shape == (1, 1, models.VOCABULARY)


def test_training_over_a_bounded_cache(model: Any) -> None:
    compiled = inertia_fx.compile(models.llama(), backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(8)])
    compiled(ids, past_key_values=cache)
    compiled.train()
    with pytest.raises(errors.TrainingError, match=r"model.eval\(\)"):
        compiled(ids[:, :1], past_key_values=cache)
    own = compiled(ids).past_key_values
    assert type(own) is transformers.DynamicCache
    compiled(ids[:, :1], past_key_values=own)
    assert own.get_seq_length() == 9


class Fragile:
    """An inner compiler that runs the graph node by node, and fails in the middle when told to."""

    fail_at: float | None = None
    """Fraction of the graph's nodes that still run."""

    def __call__(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        outer, position = self, {node: index for index, node in enumerate(gm.graph.nodes)}

        class Run(torch.fx.Interpreter):
            def run_node(self, node: torch.fx.Node) -> Any:
                if outer.fail_at is not None and position[node] >= outer.fail_at * len(position):
                    raise RuntimeError("out of memory")
                return super().run_node(node)

        return lambda *args: Run(gm).run(*args)


def test_an_exception_in_the_middle_leaves_the_cache_as_it_was() -> None:
    inner = Fragile()
    compiled = inertia_fx.compile(models.llama(), ratio=0.7, min_budget=5, backend=inner)
    ids, token = torch.tensor([models.prompt(40)]), torch.tensor([[9]])

    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory")

    def run(fail_at: float | None) -> list[Any]:
        cache = inertia_fx.InertiaCache()
        trace = []
        for feed in (ids, token, token, token, ids[:, :7], token, token):
            if fail_at is not None:
                inner.fail_at = fail_at
                handle = compiled.model.layers[1].mlp.register_forward_pre_hook(broken)
                with pytest.raises(RuntimeError, match="out of memory"):
                    compiled(feed, past_key_values=cache)
                handle.remove()
                inner.fail_at = None
            logits = compiled(feed, past_key_values=cache).logits[0, -1].tolist()
            trace.append((logits, cache.get_seq_length(), cache.budget, cache.retained_positions()[0].tolist()))
        return trace

    with torch.no_grad():
        expect = run(None)
        for fail_at in (0.2, 0.5, 0.8, 0.95):
            assert run(fail_at) == expect


def test_a_disabled_torch_compile_is_an_error_not_another_eviction(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(8)])
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        with torch.compiler.set_stance("force_eager"), pytest.raises(errors.CompileDisabledError, match="switched off"):
            compiled(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 8
        compiled(ids[:, :1], past_key_values=cache)
        assert cache.retained_positions()[0].tolist() == list(range(9))


def test_recompile_limit_is_an_error_of_ours(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
        for rows in (1, 2):
            cache = inertia_fx.InertiaCache()
            ids = torch.tensor([models.prompt(8)] * rows)
            compiled(ids, past_key_values=cache)
            if rows == 1:
                compiled(ids[:, :1], past_key_values=cache)
            else:
                with pytest.raises(errors.RecompileError, match="so many batch sizes"):
                    compiled(ids[:, :1], past_key_values=cache)
