"""Make tiny decoders for tests: pure torch in every attention form that the passes match, and transformers' own.

TinyDecoder       embedding, attention blocks and a head over a SlotCache, no transformers; its attention is one of FORMS
language_model()  a random Hugging Face decoder of a supported family
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...backend import inertia, own_code
from ...cache.slot_cache import SlotCache
from ...cache.storage import Entry
from ...errors import ConfigError

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(query [B, H, T, D], key [B, N, S, D], value, mask, what else the decoder knows) -> [B, H, T, D]."""


def repeat(x: Tensor, like: Tensor) -> Tensor:
    """Repeat [B, N, S, D] to [B, H, S, D], each KV head once per query head of its group."""
    rows, heads, slots, width = x.shape
    groups = like.shape[1] // heads
    return x[:, :, None, :, :].expand(rows, heads, groups, slots, width).reshape(rows, heads * groups, slots, width)


def minimum(live: Tensor) -> Tensor:
    """Return a boolean mask as an additive one, the way eager attention masks."""
    return torch.where(live, 0.0, torch.finfo(torch.float32).min)


def scale_of(query: Tensor) -> float:
    """Return 1 / sqrt of the head width."""
    return 1 / math.sqrt(query.shape[-1])


def sdpa_gqa(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live, enable_gqa=True)


def sdpa_repeat(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat(k, q), repeat(v, q), live, 0.0, False, scale=scale_of(q))


def sdpa_interleave(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), torch.repeat_interleave(v, groups, dim=1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=minimum(live), scale=scale_of(q))


def sdpa_no_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    """Dead slots are masked by the pass."""
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def softmax_chain(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = torch.matmul(q, repeat(k, q).transpose(2, 3)) * scale_of(q)
    weights = F.softmax(logits + minimum(live), dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=0.1, training=False)
    return torch.matmul(weights, repeat(v, q))


def softmax_divided(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    logits = minimum(live) + (q @ repeat(k, q).mT) / math.sqrt(q.shape[-1])
    return logits.float().softmax(-1).type_as(v) @ repeat(v, q)


def softmax_no_mask(q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
    return F.softmax(torch.matmul(q, repeat(k, q).mT) * scale_of(q), dim=-1) @ repeat(v, q)


FORMS: dict[str, Attention] = {
    function.__name__: function
    for function in (
        sdpa_gqa,
        sdpa_repeat,
        sdpa_interleave,
        sdpa_no_mask,
        softmax_chain,
        softmax_divided,
        softmax_no_mask,
    )
}
"""Every way to write attention over the slots that `find_attention` matches."""


def require_groups(heads: int, kv_heads: int) -> None:
    """Raise :class:`ConfigError` unless every KV head serves the same number of query heads."""
    if heads % kv_heads:
        raise ConfigError(f"{heads} query heads cannot share {kv_heads} KV heads: the first must be a multiple.")


class TinyDecoder(nn.Module):
    """Decoder in pure torch: embedding, `layers` attention blocks with residuals, and a head.

    It has no positions: attention is by content alone.

    Args:
        attention: one of :data:`FORMS`, or one of your own.
        heads, kv_heads, width: query heads, KV heads (a divisor of them), head width.
    """

    def __init__(
        self,
        attention: Attention = sdpa_gqa,
        layers: int = 2,
        vocabulary: int = 50,
        heads: int = 4,
        kv_heads: int = 2,
        width: int = 8,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_groups(heads, kv_heads)
        self.heads, self.kv_heads, self.width = heads, kv_heads, width
        torch.manual_seed(seed)
        size = heads * width
        self.attention = attention
        self.embed = nn.Embedding(vocabulary, size)
        self.qkv = nn.ModuleList(nn.Linear(size, (heads + 2 * kv_heads) * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(size, size) for _ in range(layers))
        self.head = nn.Linear(size, vocabulary)
        self.slope = nn.Parameter(torch.tensor(-0.1))
        self.up = nn.Parameter(torch.eye(width))

    def blocks(self, tokens: Tensor, attend: Callable[..., Tensor], cache: SlotCache) -> Tensor:
        """Map [B, T] tokens to [B, T, vocabulary], keys and values cached layer by layer."""
        x = self.embed(tokens) * 2
        for layer, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            heads = qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
            keys, values = cache.update(k, v, layer)
            x = x + out(attend(q, keys, values).transpose(1, 2).flatten(2))
        return self.head(x)

    @torch.no_grad()
    def prompt(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """Prefill [B, T] tokens. Returns [B, vocabulary], the last token's logits."""

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - q.shape[2])
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

        with cache.prompt(*tokens.shape):
            return self.blocks(tokens, attend, cache)[:, -1]

    def step(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """Run one decode step, as a user would hand it to torch.compile: [B, 1] tokens -> [B, vocabulary]."""
        entry: Entry = cache.enter()
        live = entry.live[:, None, None, :]
        extra = {
            "slope": self.slope,
            "up": self.up,
            "not_dead": entry.momentum > -math.inf,
            "positions": entry.positions,
        }
        logits = self.blocks(tokens, lambda q, k, v: self.attention(q, k, v, live, extra), cache)[:, -1]
        cache.leave(entry)
        return logits


def compile_step(step: Any, **options: Any) -> Any:
    """Compile a step, as `torch.compile(step, backend="inertia_fx")` does, on a code object of its own.

    Dynamo keeps graphs and its recompile limit per code object, so many decoders of one class would share both.

    Args:
        step: a function or a bound method.
        options: of the backend, for example ``**config.graph_options(score=True), backend="eager"``.
    """
    twin: Any = own_code(getattr(step, "__func__", step))
    bound = twin.__get__(step.__self__) if hasattr(step, "__self__") else twin
    return torch.compile(bound, backend=inertia, options=options, fullgraph=True)


# ---------------------------------------------------------------------- transformers

_SMALL = {"max_position_embeddings": 4096, "initializer_range": 0.3, "hidden_size": 64, "intermediate_size": 64}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", _SMALL),
    "qwen2": ("Qwen2ForCausalLM", _SMALL),
    "qwen3": ("Qwen3ForCausalLM", _SMALL | {"head_dim": 16}),
    "mistral": ("MistralForCausalLM", _SMALL | {"sliding_window": None}),
    "phi3": ("Phi3ForCausalLM", _SMALL | {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}),
    "olmo2": ("Olmo2ForCausalLM", _SMALL),
    "granite": ("GraniteForCausalLM", _SMALL),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL),
    "gpt2": ("GPT2LMHeadModel", {"n_positions": 4096, "n_embd": 64, "initializer_range": 0.3}),
}
"""Supported Hugging Face families: class, and what makes a tiny one with attention sharp enough that tokens differ in use."""


def language_model(
    family: str = "llama",
    *,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    attention: str = "sdpa",
    vocabulary: int = 128,
    seed: int = 0,
    **settings: Any,
) -> Any:
    """Make a random tiny decoder in evaluation mode.

    Args:
        family: one of :data:`FAMILIES`.
        attention: ``attn_implementation``, "sdpa" or "eager".
        settings: further arguments of the family's configuration.

    Raises:
        ConfigError: an unknown family.
    """
    import transformers

    if family not in FAMILIES:
        raise ConfigError(f"family={family!r} is unknown: choose one of {', '.join(FAMILIES)}.")
    name, base = FAMILIES[family]
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if family == "gpt2":
        shape = {"n_layer": layers, "n_head": heads}
    elif family == "gpt_neox":
        shape.pop("num_key_value_heads")
    given = base | shape | {"vocab_size": vocabulary, "attn_implementation": attention} | settings
    configuration = transformers.AutoConfig.for_model(family, **given)
    torch.manual_seed(seed)
    return getattr(transformers, name)(configuration).eval()
