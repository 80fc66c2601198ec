"""Models that cannot be compiled correctly: refused by name, before anything changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import inertia_fx
from inertia_fx import errors
from tests.common import models


def test_not_a_model() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="Linear is not a transformers model"):
        inertia_fx.compile(torch.nn.Linear(2, 2))


def test_encoder_decoder() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    with pytest.raises(errors.UnsupportedModelError, match="encoder-decoder"):
        inertia_fx.compile(transformers.T5ForConditionalGeneration(config))


def test_no_attention() -> None:
    with pytest.raises(errors.UnsupportedModelError, match="nothing to evict"):
        inertia_fx.compile(models.tiny("mamba"))


def test_sliding_layers_are_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedModelError, match=r"layer 0 caches in a DynamicSlidingWindowLayer"):
        inertia_fx.compile(models.tiny("gemma3_text"))


@pytest.mark.parametrize("family", ["bloom"])
def test_alibi(family: str) -> None:
    with pytest.raises(errors.PositionBiasError, match="ALiBi"):
        inertia_fx.compile(models.tiny(family))


def test_falcon_with_alibi() -> None:
    config = transformers.FalconConfig(
        vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, alibi=True
    )
    with pytest.raises(errors.PositionBiasError, match="ALiBi"):
        inertia_fx.compile(transformers.FalconForCausalLM(config))


def test_attention_that_hides_its_probabilities() -> None:
    with pytest.raises(errors.UnsupportedAttentionError, match="attn_implementation='flex_attention' hides"):
        inertia_fx.compile(models.llama(attention="flex_attention"))


def test_a_replaced_forward(model: Any) -> None:
    patched = models.llama()
    patched.forward = patched.forward
    with pytest.raises(errors.UnsupportedModelError, match="replaced on the instance"):
        inertia_fx.compile(patched)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_latent_attention_is_refused_at_the_first_step_and_nothing_is_lost(attention: str) -> None:
    """DeepSeek caches latents, from which attention computes its keys: named with layer, node and reason."""
    config = transformers.DeepseekV3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, first_k_dense_replace=2, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8,
        qk_nope_head_dim=8, v_head_dim=8, attn_implementation=attention,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    compiled = inertia_fx.compile(model, backend="eager")
    cache = inertia_fx.InertiaCache()
    ids = torch.tensor([models.prompt(20)]) % 64
    with torch.no_grad():
        compiled(ids, past_key_values=cache)
        with pytest.raises(errors.UnsupportedAttentionError) as caught:
            compiled(ids[:, :1], past_key_values=cache)
    assert caught.value.layer == 0
    assert caught.value.node is not None
    assert cache.get_seq_length() == 20
    assert cache.retained_positions()[0].tolist() == list(range(20))


def test_messages_of_an_attention_refusal() -> None:
    error = errors.UnsupportedAttentionError(3, "softmax_3", "it is odd", "File x.py, line 1")
    assert str(error).startswith(
        "inertia_fx does not understand the attention of cache layer 3 at graph node 'softmax_3': it is odd."
    )
    assert "x.py" in str(error)
    assert "the decode graph" in str(errors.UnsupportedAttentionError(None, None, "it is odd"))
