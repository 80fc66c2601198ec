"""What `generate`, pipelines and hand-written loops do with a compiled model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx import errors
from inertia_fx.verify import reference
from tests.common import models
from tests.common.generating import SETTINGS, generate


def test_greedy_is_the_reference(model: Any, compiled: Any) -> None:
    row = models.prompt(40)
    got = generate(compiled, models.pad([row]), 30)
    assert got[0, 40:].tolist() == reference.decode(model, row, 29, **SETTINGS).tokens


def test_sampling_is_reproducible_and_rows_differ(compiled: Any) -> None:
    inputs = models.pad([models.prompt(30)])
    outputs = []
    for _ in range(2):
        torch.manual_seed(3)
        outputs.append(generate(compiled, inputs, 12, do_sample=True, num_return_sequences=3, temperature=2.0))
    assert torch.equal(*outputs)
    assert outputs[0].shape == (3, 42)
    assert not torch.equal(outputs[0][0], outputs[0][1])


def test_beam_search_without_eviction_is_the_original(model: Any, compiled: Any) -> None:
    inputs = models.pad([models.prompt(20, 0), models.prompt(20, 1)])
    free = inertia_fx.compile(model, budget=1000, backend="eager")
    options = {"num_beams": 3, "num_return_sequences": 2}
    assert torch.equal(generate(free, inputs, 12, **options), generate(model, inputs, 12, **options))


def test_beam_search_carries_momentum_and_positions_with_its_rows(compiled: Any) -> None:
    """The winning beam, replayed alone with its own tokens, retains what the beam retained."""
    row = models.prompt(30)
    cache = inertia_fx.InertiaCache()
    output = generate(compiled, models.pad([row]), 14, num_beams=3, past_key_values=cache, length_penalty=0.0,
                      min_new_tokens=14, num_return_sequences=3)  # fmt: skip
    replays = []
    for sequence in output[:, 30:-1].tolist():
        alone = inertia_fx.InertiaCache()
        with torch.no_grad():
            compiled(torch.tensor([row]), past_key_values=alone)
            for token in sequence:
                compiled(torch.tensor([[token]]), past_key_values=alone)
        replays.append(alone.retained_positions()[0].tolist())
    held = [positions.tolist() for positions in cache.retained_positions()]
    # After its last forward beam search picks continuations without reordering the cache once more.
    assert any(replay in held for replay in replays)


def test_streamer_and_stopping_criteria(compiled: Any) -> None:
    class Streamer(transformers.generation.BaseStreamer):
        def __init__(self) -> None:
            self.tokens: list[int] = []

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.tokens.append(-1)

    class Stop(transformers.StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 37)

    streamer = Streamer()
    output = generate(compiled, models.pad([models.prompt(30)]), 20, streamer=streamer, stopping_criteria=[Stop()])
    assert output.shape == (1, 37)
    assert streamer.tokens == [*output[0].tolist(), -1]


def test_inputs_embeds(model: Any, compiled: Any) -> None:
    row = models.prompt(30)
    embeds = model.get_input_embeddings()(torch.tensor([row])).detach()
    got = generate(compiled, {"inputs_embeds": embeds}, 10)
    assert got[0].tolist() == generate(compiled, models.pad([row]), 10)[0, 30:].tolist()


def test_loop_over_outputs(compiled: Any) -> None:
    """The cache comes back in the output, under both of its names, as from any model; gradients may be on."""
    row = models.prompt(40)
    output = compiled(torch.tensor([row]))
    tokens = []
    for _ in range(8):
        assert isinstance(output.past_key_values, inertia_fx.InertiaCache)
        tokens.append(int(output.logits[0, -1].argmax()))
        output = compiled(torch.tensor([tokens[-1:]]), past_key_values=output.past_key_values)
    assert tokens == generate(compiled, models.pad([row]), 8)[0, 40:].tolist()


def test_inference_mode_and_out_of_it_again(model: Any) -> None:
    compiled = inertia_fx.compile(model, **SETTINGS, backend="eager")  # its own: each kind of tensor is a graph
    row = models.prompt(40)
    expect = reference.decode(model, row, 6, **SETTINGS).tokens
    for inside in ([True, False] * 4, [True, True, False, True, False, False, True]):
        cache, tokens, feed = inertia_fx.InertiaCache(), [], torch.tensor([row])
        for step in range(7):
            with torch.inference_mode(inside[step]), torch.no_grad():
                logits = compiled(feed, past_key_values=cache).logits
                tokens.append(int(logits[0, -1].argmax()))
                feed = torch.tensor([tokens[-1:]])
            cache.reorder_cache(torch.tensor([0]))
        assert tokens == expect


def test_pipeline(compiled: Any, tmp_path: Any) -> None:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as token_models

    words = {f"w{number}": number for number in range(models.VOCABULARY)}
    backend = Tokenizer(token_models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w0", padding_side="left")
    run = transformers.pipeline("text-generation", model=compiled, tokenizer=tokenizer)
    rows = [models.prompt(20, 0), models.prompt(33, 1)]
    texts = [" ".join(f"w{token}" for token in row) for row in rows]
    options = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}
    for text, (result,), row in zip(texts, run(texts, batch_size=2, **options), rows, strict=True):
        alone = generate(compiled, models.pad([row]), 10)[0, len(row) :].tolist()
        assert result["generated_text"].split() == [f"w{token}" for token in alone], text


def test_errors_of_generate(compiled: Any, model: Any) -> None:
    inputs = models.pad([models.prompt(20)])
    with pytest.raises(errors.UndoError, match="undone"):
        generate(compiled, inputs, prompt_lookup_num_tokens=3)
    with pytest.raises(errors.UndoError, match="undone"):
        generate(compiled, inputs, assistant_model=model)
    with pytest.raises(errors.ConfigError, match="cache_implementation"):
        generate(compiled, inputs, cache_implementation="static")
    with pytest.raises(errors.CacheError, match="DynamicCache"):
        generate(compiled, inputs, past_key_values=transformers.DynamicCache())
