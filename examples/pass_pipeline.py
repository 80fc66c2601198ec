"""Our passes and one of yours, in one pipeline: through our backend, and through a backend of your own.

    python examples/pass_pipeline.py

A pass is a function (gm, example_inputs, *, options) -> gm over the graph of one decode step. passes/README.md says what
it may rely on and what it must leave.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from own_decoder import Decoder
from torch import Tensor, fx

from inertia_fx import Config, debug, errors
from inertia_fx.cache import SlotCache
from inertia_fx.passes import PASSES, PassOptions, attention_sites, marker_in, record_match, run_passes
from inertia_fx.passes.aliasing import Memory
from inertia_fx.passes.metadata import fill_metadata

CONFIG = Config(ratio=0.75, min_budget=8)
OPTIONS = CONFIG.graph_options(score=True) | {"backend": "eager"}


def share_comparisons_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Compute `x >= number` once for each x that nothing writes into."""
    fill_metadata(gm.graph)  # what the passes before made has no example values, and nobody knows what it writes
    memory = Memory(gm.graph)
    first: dict[object, fx.Node] = {}
    for node in list(gm.graph.find_nodes(op="call_function", target=operator.ge)):
        if memory.writers(node.args[0]):
            continue  # it may hold something else the second time
        kept = first.setdefault(node.args, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            gm.graph.erase_node(node)
            record_match(gm, "the same comparison", node=node.name, into=kept.name)
    return gm


@torch.no_grad()
def write(model: Decoder, backend: str | Callable[..., object], options: dict[str, object] | None) -> list[int]:
    """Continue a prompt of 100 tokens by 30, of which the cache keeps a quarter."""
    torch._dynamo.reset()  # each call compiles its own step
    step = torch.compile(model.step, backend=backend, options=options, fullgraph=True)
    prompt = torch.arange(100)[None] * 7 % 100
    cache = SlotCache(CONFIG)
    with cache.prompt(*prompt.shape):
        token = model.prompt(prompt, cache).argmax(-1, keepdim=True)
    text = [token.item()]
    for place in range(100, 129):
        with cache.step(rows=1):
            token = step(token, torch.tensor([[place]]), cache).argmax(-1, keepdim=True)
        text.append(token.item())
    return text


def own_backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
    """A backend of torch.compile: our whole list, then a pass, then a compiler (here none: the graph runs as it is)."""
    if marker_in(gm) is None:
        return gm.forward  # no decode step
    options = PassOptions(**OPTIONS)
    example_inputs = list(example_inputs)  # passes may replace some of them
    gm = run_passes(gm, example_inputs, options=options)
    gm = share_comparisons_pass(gm, example_inputs, options=options)
    gm.recompile()
    return gm.forward


def looking_backend(gm: fx.GraphModule, example_inputs: list[Tensor]) -> Callable[..., object]:
    """Single passes: the first three find and prove each attention, and leave the step as it was traced."""
    code = gm.code
    for run in PASSES[:3]:
        gm = run(gm, example_inputs, options=PassOptions(**OPTIONS))
    sites = attention_sites(gm.graph)
    print(f"found and proved {len(sites)} attentions: {sites[0]}")
    assert len(sites) == 3, "one per layer"
    gm.recompile()
    assert gm.code == code
    return gm.forward


def main() -> None:
    torch.manual_seed(0)
    model = Decoder().eval()
    plain = write(model, "inertia_fx", OPTIONS)
    print(f"our passes:            {plain[:12]}...")

    # Your pass, in our list: behind the last one that changes the graph.
    passes = (*PASSES[:-1], share_comparisons_pass, PASSES[-1])
    with debug.record() as seen:
        text = write(model, "inertia_fx", OPTIONS | {"passes": passes})
    result = seen[0].result("share_comparisons")
    print(f"with one of ours more: {text[:12]}...")
    print(result)
    assert text == plain
    assert len(result.matched) == 3
    left = seen[0].after_graph.find_nodes(op="call_function", target=operator.ge)
    assert len(left) == 2, "of the positions before the step, which it writes into in the end, and of those after it"

    # Our list, or single passes of it, in a backend of yours.
    text = write(model, own_backend, None)
    print(f"a backend of our own:  {text[:12]}...")
    assert text == plain
    write(model, looking_backend, None)

    # What the step does not need to be right can be left out; what it needs is refused, by name.
    with debug.record() as seen:
        assert write(model, "inertia_fx", OPTIONS | {"disable_passes": ["lower"]}) == plain
    assert "scored_attention" in seen[0].after, "our operators, which `lower` would have replaced"
    print(seen[0].result("lower"))
    try:
        write(model, "inertia_fx", OPTIONS | {"disable_passes": ["evict"]})
    except torch._dynamo.exc.BackendCompilerFailed as failure:  # torch.compile wraps what a backend raises
        refusal = failure.inner_exception
        assert isinstance(refusal, errors.ConfigError)
        print(f"refused: {str(refusal).split(':')[0]}")
    else:
        raise AssertionError("a step without its eviction must be refused")


if __name__ == "__main__":
    main()
