"""A decoder of your own, in plain torch: three calls to a SlotCache, and torch.compile with our backend.

    python examples/own_decoder.py

While the budget does not bind, the compiled step computes what the decoder computes without any cache. Then it does:
a quarter of the tokens stays, chosen by how much they were attended to.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from inertia_fx import Config
from inertia_fx.cache import SlotCache

HEADS, KV_HEADS, WIDTH, VOCABULARY = 4, 2, 16, 100


class Block(nn.Module):
    """The projections of one attention layer with grouped queries."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * WIDTH, (HEADS + 2 * KV_HEADS) * WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """[B, T, size] -> query [B, HEADS, T, WIDTH], key and value [B, KV_HEADS, T, WIDTH]."""
        heads = self.qkv(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2)
        return heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def merge(self, attended: Tensor) -> Tensor:
        """[B, HEADS, T, WIDTH] -> [B, T, size]."""
        return self.out(attended.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Embedding, attention blocks and a head. `text` is its definition, `prompt` and `step` are the same with a cache."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HEADS * WIDTH)
        self.places = nn.Embedding(1000, HEADS * WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.head = nn.Linear(HEADS * WIDTH, VOCABULARY)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(positions)

    def text(self, tokens: Tensor) -> Tensor:
        """The last token's logits without any cache: tokens [B, T] -> [B, VOCABULARY]."""
        x = self.embed(tokens, torch.arange(tokens.shape[1]))
        for block in self.blocks:
            query, key, value = block.project(x)
            x = x + block.merge(scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True))
        return self.head(x[:, -1])

    def prompt(self, tokens: Tensor, cache: SlotCache) -> Tensor:
        """As `text`, and every layer's keys and values go into the cache. Call it inside `cache.prompt`."""
        x = self.embed(tokens, torch.arange(tokens.shape[1]))
        for layer, block in enumerate(self.blocks):
            query, key, value = block.project(x)
            keys, values = cache.update(key, value, layer)
            x = x + block.merge(scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=True))
        return self.head(x[:, -1])

    def step(self, token: Tensor, position: Tensor, cache: SlotCache) -> Tensor:
        """One decode step, to be compiled: token and its position [B, 1] -> [B, VOCABULARY]."""
        entry = cache.enter()  # the new token gets its slot
        live = entry.live[:, None, None, :]
        x = self.embed(token, position)
        for layer, block in enumerate(self.blocks):
            query, key, value = block.project(x)
            keys, values = cache.update(key, value, layer)  # all slots: [B, KV_HEADS, slots, WIDTH]
            x = x + block.merge(scaled_dot_product_attention(query, keys, values, attn_mask=live, enable_gqa=True))
        cache.leave(entry)  # the marker that the passes look for
        return self.head(x[:, -1])


@torch.no_grad()
def largest_difference(model: Decoder, config: Config, text: Tensor, prompt: int) -> tuple[SlotCache, list[float]]:
    """Decode `text` [B, T] after its first `prompt` tokens: the cache, and each step's largest error of the logits."""
    # How much to keep is the cache's business, how the momentum moves is compiled into the step: one Config for both.
    options = config.graph_options(score=True) | {"backend": "eager"}  # leave "backend" out for Inductor
    step = torch.compile(model.step, backend="inertia_fx", options=options)
    cache = SlotCache(config)
    rows = len(text)
    with cache.prompt(rows, prompt):
        model.prompt(text[:, :prompt], cache)
    differences = []
    for place in range(prompt, text.shape[1]):
        position = torch.full((rows, 1), place)  # where the token stands in the text, wherever its slot is
        with cache.step(rows):
            logits = step(text[:, place : place + 1], position, cache)
        without_cache = model.text(text[:, : place + 1])
        differences.append((logits - without_cache).abs().max().item())
    return cache, differences


def main() -> None:
    torch.manual_seed(0)
    model, text = Decoder().eval(), torch.randint(VOCABULARY, (2, 160))

    cache, differences = largest_difference(model, Config(budget=1000), text, prompt=120)
    print(f"room for 1,000 tokens: {len(cache.retained_positions()[0])} kept after 40 steps")
    print(f"  largest difference from the decoder without a cache: {max(differences):.1e}")
    assert max(differences) < 1e-4, "nothing was evicted, so the outputs are the same but for rounding"
    assert all(kept.tolist() == list(range(160)) for kept in cache.retained_positions())

    cache, differences = largest_difference(model, Config(ratio=0.75, min_budget=8), text, prompt=120)
    kept = cache.retained_positions()
    print(f"a quarter of 120 tokens: {len(kept[0])} kept after 40 steps, of {cache.seen} seen")
    print(f"  at step 1: {differences[0]:.1e}, it still sees all; at step 40: {differences[-1]:.1e}")
    assert cache.budget == [30, 30] == [len(row) for row in kept]
    assert differences[0] < 1e-4 < differences[-1], "step 1 reads every token and evicts afterwards"


if __name__ == "__main__":
    main()
