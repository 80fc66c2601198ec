"""A compiled model as a model: class, weights, copies, files, forwards that do not decode."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx.verify import reference
from tests.common import models
from tests.common.generating import SETTINGS, generate


def test_same_class_shared_weights_and_the_original_is_untouched(model: Any) -> None:
    before = generate(model, models.pad([models.prompt(20)]))
    attributes = set(model.__dict__)
    compiled = inertia_fx.compile(model, **SETTINGS, backend="eager")
    assert isinstance(compiled, transformers.LlamaForCausalLM)
    assert type(compiled).__name__ == "LlamaForCausalLM"
    assert type(model) is transformers.LlamaForCausalLM
    assert set(model.__dict__) == attributes
    assert compiled.lm_head.weight is model.lm_head.weight
    assert list(compiled.state_dict()) == list(model.state_dict())
    compiled.generation_config.max_new_tokens = 3
    assert model.generation_config.max_new_tokens != 3
    assert torch.equal(generate(model, models.pad([models.prompt(20)])), before)


def test_save_pretrained_round_trip(compiled: Any, tmp_path: Any) -> None:
    compiled.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is transformers.LlamaForCausalLM
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    again = inertia_fx.compile(loaded, **SETTINGS, backend="eager")
    inputs = models.pad([models.prompt(30)])
    assert torch.equal(generate(again, inputs), generate(compiled, inputs))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_run_their_own_weights(compiled: Any, clone: Any) -> None:
    inputs = models.pad([models.prompt(30)])
    before = generate(compiled, inputs)
    twin = clone(compiled)
    assert torch.equal(generate(twin, inputs), before)
    with torch.no_grad():
        twin.lm_head.weight.neg_()
    assert not torch.equal(generate(twin, inputs), before)
    assert torch.equal(generate(compiled, inputs), before)


def test_to_dtype_and_eval() -> None:
    compiled = inertia_fx.compile(models.llama(), **SETTINGS, backend="eager")
    inputs = models.pad([models.prompt(30)])
    assert generate(compiled, inputs).shape == (1, 46)
    half = compiled.to(torch.bfloat16).eval()
    assert half is compiled
    cache = inertia_fx.InertiaCache()
    assert generate(compiled, inputs, past_key_values=cache).shape == (1, 46)
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.state.momentum.dtype == torch.float32


def test_compiling_again_replaces_the_settings(model: Any, compiled: Any) -> None:
    again = inertia_fx.compile(compiled, ratio=0.5, min_budget=1, backend="eager")
    assert again._inertia.config.ratio == 0.5
    wrapped = inertia_fx.compile(torch.compile(model), ratio=0.5, min_budget=1, backend="eager")
    inputs = models.pad([models.prompt(30)])
    assert torch.equal(generate(again, inputs), generate(wrapped, inputs))


def test_forwards_that_do_not_decode_are_the_originals(model: Any, compiled: Any) -> None:
    ids = torch.tensor([models.prompt(12)])
    with_labels = compiled(ids, labels=ids)
    torch.testing.assert_close(with_labels.loss, model(ids, labels=ids).loss)
    assert type(with_labels.past_key_values) is transformers.DynamicCache
    assert compiled(ids, use_cache=False).past_key_values is None
    assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    hidden = compiled(ids, output_hidden_states=True)
    assert len(hidden.hidden_states) == 3
    twin = inertia_fx.compile(models.llama(), backend="eager").train()
    loss = twin(ids, labels=ids).loss
    loss.backward()
    assert twin.lm_head.weight.grad.abs().sum() > 0
    assert torch.equal(
        generate(compiled, models.pad([models.prompt(12)]), use_cache=False),
        generate(model, models.pad([models.prompt(12)]), use_cache=False),
    )


def test_interleaved_sequences_do_not_see_each_other(model: Any, compiled: Any) -> None:
    rows = [models.prompt(40, 0), models.prompt(25, 1)]
    caches = [inertia_fx.InertiaCache() for _ in rows]
    tokens: list[list[int]] = [[], []]
    with torch.no_grad():
        feeds = [torch.tensor([row]) for row in rows]
        for _ in range(20):
            for index, cache in enumerate(caches):
                logits = compiled(feeds[index], past_key_values=cache).logits
                tokens[index].append(int(logits[0, -1].argmax()))
                feeds[index] = torch.tensor([tokens[index][-1:]])
    for index, row in enumerate(rows):
        expect = reference.decode(model, row, 19, **SETTINGS)
        assert tokens[index] == expect.tokens
        assert caches[index].retained_positions()[0].tolist() == expect.retained[-1]


def test_a_cache_can_be_saved_and_restored_in_the_middle(compiled: Any) -> None:
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(40)])
    token = torch.tensor([[7]])
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        compiled(token, past_key_values=cache)
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        copies = [copy.deepcopy(cache), torch.load(file, weights_only=False)]
        for _ in range(5):
            expect = compiled(token, past_key_values=cache).logits
            for other in copies:
                assert torch.equal(compiled(token, past_key_values=other).logits, expect)
                assert torch.equal(other.retained_positions()[0], cache.retained_positions()[0])
