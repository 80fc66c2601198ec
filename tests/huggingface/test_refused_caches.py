"""Caches and masks that a compiled model does not take; what it refuses changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx import errors
from tests.common import models


def test_caches_of_another_kind(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    ids = torch.tensor([models.prompt(8)])
    filled = model(ids).past_key_values
    for cache in (filled, transformers.DynamicCache(), ((None, None),)):
        with pytest.raises(errors.CacheError, match="keeps its tokens in an InertiaCache"):
            compiled(ids, past_key_values=cache)
    assert filled.get_seq_length() == 8


def test_a_cache_of_another_model_batch_or_outside(model: Any) -> None:
    first, second = (inertia_fx.compile(model, backend="eager") for _ in range(2))
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        first(ids, past_key_values=cache)
        with pytest.raises(errors.CacheError, match="filled by another model"):
            second(ids[:, :1], past_key_values=cache)
        with pytest.raises(errors.CacheError, match=r"holds 1 sequence\(s\) and the forward has 2"):
            first(ids[:, :1].repeat(2, 1), past_key_values=cache)
        with pytest.raises(errors.CacheError, match=r"holds 1 sequence\(s\) and the forward has 2"):
            first(ids.repeat(2, 1), past_key_values=cache)
        with pytest.raises(errors.CacheError, match="does not drive it"):
            model(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 8
        first(ids[:, :1], past_key_values=cache)
        assert cache.get_seq_length() == 9
        cache.reset()
        assert (cache.get_seq_length(), cache.nbytes, cache.budget, cache.retained_positions()) == (0, 0, [], [])
        second(ids.repeat(2, 1), past_key_values=cache)
        assert cache.rows == 2


def test_undoing_is_refused() -> None:
    cache = inertia_fx.InertiaCache()
    for count in (-1, -7, 3):
        with pytest.raises(errors.UndoError, match="cannot be undone"):
            cache.crop(count)
    assert cache.crop(0) is None
    assert not cache.is_croppable
    assert not cache.is_compileable


def test_cache_takes_a_config_only() -> None:
    with pytest.raises(errors.ConfigError, match=r"not an inertia_fx\.Config"):
        inertia_fx.InertiaCache(transformers.LlamaConfig())  # type: ignore[arg-type]


def test_masks_that_hide_what_is_padding(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with pytest.raises(errors.CacheError, match="must be 2-D"):
        compiled(ids, attention_mask=torch.ones(1, 1, 8, 8, dtype=torch.bool), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="covers 5 tokens, but 0 are cached and 8 are new: pass 8"):
        compiled(ids, attention_mask=torch.ones(1, 5), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="has 2 rows and the forward 1"):
        compiled(ids, attention_mask=torch.ones(2, 8), past_key_values=cache)
    with pytest.raises(errors.CacheError, match="A prompt without tokens"):
        compiled(ids[:, :0], past_key_values=cache)
    with pytest.raises(errors.CacheError, match="Neither input_ids nor inputs_embeds"):
        compiled(past_key_values=cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        compiled(ids.repeat(2, 1), attention_mask=torch.tensor([[1] * 8, [0] * 8]), past_key_values=cache)
        with pytest.raises(errors.CacheError, match="Row 1 of the prompt was padding alone"):
            compiled(ids[:, :1].repeat(2, 1), past_key_values=cache)
    cache.reset()
    other = inertia_fx.compile(model, backend="eager")
    with torch.no_grad():
        other(ids, past_key_values=cache)  # what was refused left no owner behind
        with pytest.raises(errors.CacheError, match="covers 3 tokens, but 8 are cached and 1 are new: pass 9"):
            other(ids[:, :1], attention_mask=torch.ones(1, 3), past_key_values=cache)


def test_generate_with_the_new_question_alone_says_what_is_wanted(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "past_key_values": cache}
    compiled.generate(**models.pad([models.prompt(20)]), **options)
    with pytest.raises(errors.CacheError, match="wants the whole text"):
        compiled.generate(**models.pad([models.prompt(5)]), **options)
    assert cache.get_seq_length() == 22


def test_a_model_that_changes_its_dtype_needs_a_new_cache() -> None:
    compiled = inertia_fx.compile(models.llama(), backend="eager")
    ids = torch.tensor([models.prompt(8)])
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        compiled.to(torch.bfloat16)
        with pytest.raises(errors.CacheError, match=r"has become torch\.bfloat16"):
            compiled(ids[:, :1], past_key_values=cache)
        cache.reset()
        compiled(ids, past_key_values=cache)
        compiled(ids[:, :1], past_key_values=cache)


def test_reset_forgets_the_first_models_settings(model: Any) -> None:
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(40)])
    with torch.no_grad():
        for ratio, budget in ((0.7, 12), (0.5, 20)):
            inertia_fx.compile(model, ratio=ratio, min_budget=1, backend="eager")(ids, past_key_values=cache)
            assert cache.budget == [budget]
            cache.reset()


def test_many_batch_sizes_share_a_compile(model: Any) -> None:
    compiled = inertia_fx.compile(model, backend="eager")
    with torch.no_grad():
        for rows in range(1, 13):
            cache = inertia_fx.InertiaCache()
            ids = torch.tensor([models.prompt(8)] * rows)
            compiled(ids, past_key_values=cache)
            compiled(ids[:, :1], past_key_values=cache)
            assert [row.tolist() for row in cache.retained_positions()] == [list(range(9))] * rows
