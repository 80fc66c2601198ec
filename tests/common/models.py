"""Make tiny decoders for the tests, and decode with a compiled one."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch
import transformers
from torch import Tensor

import inertia_fx
from inertia_fx.verify.testing import decoders

VOCABULARY = 128

_UNSUPPORTED = {
    "bloom": ("Bloom", {"hidden_size": 64, "n_head": 4, "n_layer": 2}),
    "gemma3_text": ("Gemma3", {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16, "num_hidden_layers": 2}),
    "mamba": ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}),
}


def llama(
    layers: int = 2, heads: int = 4, kv_heads: int = 2, *, attention: str = "sdpa", seed: int = 0
) -> transformers.LlamaForCausalLM:
    """Make a random Llama with attention sharp enough that tokens differ in use."""
    return tiny(
        "llama", num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads,
        attn_implementation=attention, seed=seed,
    )  # fmt: skip


def tiny(family: str, *, seed: int = 0, **settings: Any) -> Any:
    """Make a random two-layer decoder of a family, in evaluation mode."""
    if family in decoders.FAMILIES:
        return decoders.language_model(family, vocabulary=VOCABULARY, seed=seed, **settings)
    name, base = _UNSUPPORTED[family]
    configuration = transformers.AutoConfig.for_model(family, vocab_size=VOCABULARY, **(base | settings))
    torch.manual_seed(seed)
    return getattr(transformers, name + "ForCausalLM")(configuration).eval()


@functools.cache
def cached_llama(layers: int, heads: int, kv_heads: int) -> transformers.LlamaForCausalLM:
    """Return what :func:`llama` makes, one instance for all tests that only read it."""
    return llama(layers, heads, kv_heads)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Return random token ids without 0, which the tests pad with."""
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()


def pad(rows: list[list[int]], side: str = "left") -> dict[str, Tensor]:
    """Pad rows of token ids to a batch: input_ids and attention_mask, [B, longest]."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
    return {"input_ids": ids, "attention_mask": mask}


@dataclasses.dataclass
class Run:
    """Run of a compiled model's rows; the fields are those of `verify.reference.DecodeRecord`, one entry per row."""

    tokens: list[list[int]]
    retained: list[list[list[int]]]
    momentum: list[list[Tensor]]
    logits: list[list[Tensor]]
    cache: inertia_fx.InertiaCache


@torch.no_grad()
def decode(model: Any, rows: list[list[int]], steps: int, cache: inertia_fx.InertiaCache | None = None) -> Run:
    """Decode greedily in a hand-written loop over `model(...)`: a left-padded prompt, then `steps` decode steps."""
    cache = inertia_fx.InertiaCache() if cache is None else cache
    batch = pad(rows)
    mask, width = batch["attention_mask"], batch["input_ids"].shape[1]
    seen = cache.get_seq_length()
    if seen:
        mask = torch.cat([torch.ones(len(rows), seen, dtype=torch.int64), mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(
        batch["input_ids"], attention_mask=mask, position_ids=positions[:, -width:], past_key_values=cache
    ).logits[:, -1]
    run = Run([[] for _ in rows], [[] for _ in rows], [[] for _ in rows], [[] for _ in rows], cache)
    next_position = positions[:, -1:]
    for step in range(steps + 1):
        tokens = logits.argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            run.tokens[row].append(token)
        if step == steps:
            break
        next_position = next_position + 1
        logits = model(tokens[:, None], position_ids=next_position, past_key_values=cache).logits[:, -1]
        for row, (kept, momentum) in enumerate(zip(cache.retained_positions(), cache.momentum, strict=True)):
            run.retained[row].append(kept.tolist())
            run.momentum[row].append(momentum)
            run.logits[row].append(logits[row].clone())
    return run
