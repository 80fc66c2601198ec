"""Prompts of a compiled model: padded rows, chunks, second turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx.verify import reference
from tests.common import models
from tests.common.generating import SETTINGS, generate


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_row_gives_the_tokens_of_the_row_alone(compiled: Any, side: str) -> None:
    rows = [models.prompt(length, seed) for seed, length in enumerate((40, 17, 29))]
    cache = inertia_fx.InertiaCache()
    together = generate(compiled, models.pad(rows, side), 20, past_key_values=cache)
    assert cache.budget == [12, 5, 8]
    for index, row in enumerate(rows):
        alone_cache = inertia_fx.InertiaCache()
        alone = generate(compiled, models.pad([row]), 20, past_key_values=alone_cache)
        if side == "left":  # a right-padded row's first token is read off a pad, in the original model too
            assert together[index, 40:].tolist() == alone[0, len(row) :].tolist()
            assert cache.retained_positions()[index].tolist() == alone_cache.retained_positions()[0].tolist()
        assert len(cache.retained_positions()[index]) == cache.budget[index]


def test_right_padding_is_never_kept(model: Any, compiled: Any) -> None:
    """Teacher-forced, so that the pad under the first token does not matter: rows equal the rows alone."""
    rows = [models.prompt(40, 0), models.prompt(21, 1)]
    batch = models.pad(rows, "right")
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    cache = inertia_fx.InertiaCache()
    with torch.no_grad():
        compiled(**batch, position_ids=positions, past_key_values=cache)
        forced = torch.randint(1, models.VOCABULARY, (2, 10), generator=torch.Generator().manual_seed(5))
        where = positions[:, -1:]
        for step in range(10):
            where = where + 1
            compiled(forced[:, step : step + 1], position_ids=where, past_key_values=cache)
    for index, row in enumerate(rows):
        expect = reference.Reference(model, **SETTINGS)
        expect.prompt(row)
        for token in forced[index].tolist():
            expect.step(token)
        assert cache.retained_positions()[index].tolist() == expect.positions


@pytest.mark.parametrize("chunk", [7, 13, 39])
def test_chunked_prefill_is_prompt_whatever_the_chunks(compiled: Any, chunk: int) -> None:
    """40 = 39 + 1: a last chunk of one token is prompt too (SPEC D16)."""
    inputs = models.pad([models.prompt(40)])
    whole, pieces = inertia_fx.InertiaCache(), inertia_fx.InertiaCache()
    expect = generate(compiled, inputs, past_key_values=whole)
    got = generate(compiled, inputs, past_key_values=pieces, prefill_chunk_size=chunk)
    assert torch.equal(got, expect)
    assert pieces.budget == whole.budget == [12]
    assert torch.equal(pieces.retained_positions()[0], whole.retained_positions()[0])


def test_padded_chunked_prefill(compiled: Any) -> None:
    inputs = models.pad([models.prompt(40, 0), models.prompt(18, 1)])
    assert torch.equal(generate(compiled, inputs, prefill_chunk_size=9), generate(compiled, inputs))


def test_second_turn_of_generate(model: Any, compiled: Any) -> None:
    """The second call is given the whole text and feeds what is new: the last token and the second question."""
    cache = inertia_fx.InertiaCache()
    first = generate(compiled, models.pad([models.prompt(40)]), 12, past_key_values=cache)
    assert cache.get_seq_length() == 51
    text = torch.cat([first, torch.tensor([models.prompt(9, 7)])], dim=1)
    second = generate(compiled, {"input_ids": text, "attention_mask": torch.ones_like(text)}, 12, past_key_values=cache)
    assert cache.get_seq_length() == 72
    expect = reference.Reference(model, **SETTINGS)
    logits = expect.prompt(first[0, :40].tolist())
    for token in first[0, 40:51].tolist():
        assert int(logits.argmax()) == token
        logits = expect.step(token)
    logits = expect.prompt(text[0, 51:].tolist())
    for token in second[0, 61:-1].tolist():
        assert int(logits.argmax()) == token
        logits = expect.step(token)
    assert cache.retained_positions()[0].tolist() == expect.positions
    assert cache.budget == [expect.budget()] == [15]


def test_second_turn_of_a_padded_batch(model: Any, compiled: Any) -> None:
    """Rows of unequal length, then a second prompt of unequal length: each row as alone."""
    turns = [[models.prompt(40, 0), models.prompt(11, 1)], [models.prompt(5, 2), models.prompt(13, 3)]]
    cache = inertia_fx.InertiaCache()
    expects = [reference.Reference(model, **SETTINGS) for _ in range(2)]
    with torch.no_grad():
        lengths = torch.zeros(2, 1, dtype=torch.int64)
        mask = torch.zeros(2, 0, dtype=torch.int64)
        for rows in turns:
            batch = models.pad(rows)
            mask = torch.cat([mask, batch["attention_mask"]], dim=1)
            own = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)
            logits = compiled(
                batch["input_ids"], attention_mask=mask, position_ids=own + lengths, past_key_values=cache
            ).logits[:, -1]
            lengths = lengths + batch["attention_mask"].sum(-1, keepdim=True)
            wants = [expect.prompt(row) for expect, row in zip(expects, rows, strict=True)]
            for _ in range(15):
                torch.testing.assert_close(logits, torch.stack(wants), rtol=1e-3, atol=1e-3)
                tokens = logits.argmax(-1)
                logits = compiled(tokens[:, None], position_ids=lengths, past_key_values=cache).logits[:, -1]
                lengths, mask = lengths + 1, torch.cat([mask, mask.new_ones(2, 1)], dim=1)
                wants = [expect.step(token) for expect, token in zip(expects, tokens.tolist(), strict=True)]
                for index, expect in enumerate(expects):
                    assert cache.retained_positions()[index].tolist() == expect.positions
