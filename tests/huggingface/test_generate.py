"""Everything `generate`, pipelines and hand-written loops do with a compiled model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx import errors
from inertia_fx.verify import reference
from tests.common import models

SETTINGS: dict[str, Any] = {"ratio": 0.7, "min_budget": 5}


@pytest.fixture(scope="module")
def model() -> Any:
    return models.llama()


@pytest.fixture(scope="module")
def compiled(model: Any) -> Any:
    return inertia_fx.compile(model, **SETTINGS, backend="eager")


def generate(model: Any, inputs: dict[str, Any], tokens: int = 16, **settings: Any) -> Any:
    return model.generate(**inputs, **{"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0} | settings)


def test_greedy_is_the_reference(model: Any, compiled: Any) -> None:
    row = models.prompt(40)
    got = generate(compiled, models.pad([row]), 30)
    assert got[0, 40:].tolist() == reference.decode(model, row, 29, **SETTINGS).tokens


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


# ---------------------------------------------------------------------- the model as a model


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


# ---------------------------------------------------------------------- families and attention forms


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "olmo2", "granite", "gpt_neox", "gpt2")


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        *((family, "sdpa") for family in FAMILIES),
        *((family, "eager") for family in ("llama", "phi3", "gpt_neox", "gpt2")),
    ],
)
def test_families(family: str, attention: str) -> None:
    layers = {"n_layer" if family == "gpt2" else "num_hidden_layers": 1}
    model = models.tiny(family, attn_implementation=attention, **layers)
    compiled = inertia_fx.compile(model, **SETTINGS, backend="eager")
    row = models.prompt(40)
    cache = inertia_fx.InertiaCache()
    got = generate(compiled, models.pad([row]), 24, past_key_values=cache)[0, 40:].tolist()
    expect = reference.decode(model, row, 23, **SETTINGS)
    assert got == expect.tokens[: len(got)]  # a random model may emit its end-of-sequence token
    assert cache.retained_positions()[0].tolist() == expect.retained[len(got) - 2]


def test_grouped_query_attention_with_one_kv_head_in_bf16() -> None:
    model = models.llama(heads=8, kv_heads=1).to(torch.bfloat16)
    cache = inertia_fx.InertiaCache()
    generate(
        inertia_fx.compile(model, **SETTINGS, backend="aot_eager"),
        models.pad([models.prompt(40)]),
        20,
        past_key_values=cache,
    )
    assert cache.slots == 13
    assert cache.nbytes == 2 * 2 * 1 * 13 * 8 * 2  # layers, K and V, KV heads, slots, width, bytes


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
