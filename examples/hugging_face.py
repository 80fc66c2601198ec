"""A Hugging Face model: compile it, generate, and go on in a second turn with the same cache.

    python examples/hugging_face.py

The model is a tiny Llama with random weights, so nothing is downloaded and what it says means nothing. With
`AutoModelForCausalLM.from_pretrained(...)` in its place, the rest stays as it is.
"""

from __future__ import annotations

import warnings

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import inertia_fx

# From transformers 5.24 on, `cache` is the new name of `past_key_values`, which works in every version that we support.
warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)


def tiny_llama() -> LlamaForCausalLM:
    """Return a random two-layer decoder; no token ends its text, so that the counts below are always the same."""
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    torch.manual_seed(0)
    original = tiny_llama()
    text = torch.randint(2, 128, (1, 200))

    # Three quarters of the prompt's cached tokens are evicted. backend="eager" runs the rewritten step as it is; without
    # it, Inductor compiles the step.
    model = inertia_fx.compile(original, ratio=0.75, min_budget=8, backend="eager")

    cache = inertia_fx.InertiaCache()
    first = model.generate(text, past_key_values=cache, max_new_tokens=20, do_sample=False)
    kept = cache.retained_positions()[0].tolist()  # one tensor per row of the batch
    print(f"turn 1: {cache.get_seq_length()} tokens seen, {len(kept)} kept, {cache.nbytes:,} bytes")
    print(f"        the newest that are kept: {kept[-8:]}")
    assert cache.budget == [len(kept)] == [50], "a quarter of the 200 tokens of the prompt"

    # The second turn: `generate` wants the whole text and feeds what the cache has not seen. That is 101 tokens: the
    # question, and the last token of turn 1, which no step has read yet. A quarter of them is added to the budget.
    question = torch.randint(2, 128, (1, 100))
    model.generate(torch.cat([first, question], dim=1), past_key_values=cache, max_new_tokens=20, do_sample=False)
    kept_later = cache.retained_positions()[0].tolist()
    survivors = set(kept_later) & set(kept)
    print(f"turn 2: {cache.get_seq_length()} tokens seen, {len(kept_later)} kept, {len(survivors)} of them from turn 1")
    assert cache.budget == [len(kept_later)] == [75], "a quarter of 200 + 101, rounded down"
    assert {position for position in kept_later if position < 219} <= set(kept), "what was evicted never returns"

    # The original model is as it was: its cache keeps every token.
    full = DynamicCache()
    original.generate(text, past_key_values=full, max_new_tokens=20, do_sample=False)
    print(f"the original model keeps {full.get_seq_length()} tokens of turn 1")
    assert full.get_seq_length() == 219


if __name__ == "__main__":
    main()
