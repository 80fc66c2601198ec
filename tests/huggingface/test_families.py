"""Every supported family of models, under both attentions, beside the reference."""

from __future__ import annotations

import pytest
import torch

import inertia_fx
from inertia_fx.verify import reference
from tests.common import models
from tests.common.generating import SETTINGS, generate

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
