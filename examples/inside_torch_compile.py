"""The passes inside a torch.compile workflow of your own: your step, your compiler.

    python examples/inside_torch_compile.py

The compiled function is more than the model: it also chooses the next token. And the inner compiler is a function of
ours, which counts what is in the rewritten graph and then runs it. Yours may be any `backend` of torch.compile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from own_decoder import Decoder
from torch import Tensor, fx

import inertia_fx
from inertia_fx.cache import SlotCache

seen: list[Counter[str]] = []


def counting(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
    """A backend of torch.compile: (graph, inputs) -> a callable that computes the graph."""
    calls = [node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    seen.append(Counter(target if isinstance(target, str) else target.__name__ for target in calls))
    return gm.forward


def make_step(model: Decoder, options: dict[str, object]) -> Callable[..., Tensor]:
    """One decode step and the choice of the next token, compiled."""

    def step(token: Tensor, position: Tensor, cache: SlotCache, noise: Tensor) -> Tensor:
        logits = model.step(token, position, cache)
        return (logits / 0.7 + noise).argmax(-1, keepdim=True)  # Gumbel noise: a sample at temperature 0.7

    return torch.compile(step, backend="inertia_fx", options=options, fullgraph=True)


@torch.no_grad()
def write(model: Decoder, step: Callable[..., Tensor], cache: SlotCache, prompt: Tensor, tokens: int) -> list[int]:
    """Continue a prompt [1, T] by so many tokens."""
    with cache.prompt(*prompt.shape):
        token = model.prompt(prompt, cache).argmax(-1, keepdim=True)
    text = [token.item()]
    for _ in range(tokens - 1):
        position = torch.full((1, 1), cache.seen)
        noise = -torch.empty(1, model.head.out_features).exponential_().log()
        with cache.step(rows=1):
            token = step(token, position, cache, noise)
        text.append(token.item())
    return text


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    config = inertia_fx.Config(ratio=0.8, min_budget=8)
    scores = config.graph_options(score=True)

    step = make_step(model, scores | {"backend": counting})
    for length in (100, 60, 350):
        cache = SlotCache(config)
        text = write(model, step, cache, torch.randint(100, (1, length)), tokens=12)
        print(f"{length:4} tokens of prompt: wrote {text[:6]}..., kept {len(cache.retained_positions()[0])}")
        assert len(cache.retained_positions()[0]) == length // 5
    assert len(seen) == 1, "one graph serves every prompt length"

    # The same step as traced, without the passes: it decodes, and forgets by age as its momentum never moves.
    untouched = make_step(model, scores | {"backend": counting, "passes": False})
    write(model, untouched, SlotCache(config), torch.randint(100, (1, 100)), tokens=2)

    after, before = seen
    name = "scaled_dot_product_attention"
    print(f"traced:    {before.total()} operators, {before[name]} x {name}")
    print(f"rewritten: {after.total()} operators, {after[name]} x {name}, {after['softmax']} x softmax")
    assert before[name] == 3, "one per layer"
    assert after[name] == 0, "each one now says as well how much every token was attended to"


if __name__ == "__main__":
    main()
