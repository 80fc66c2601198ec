"""What the passes did to a step, and what it looks like when they refuse one.

    python examples/debugging.py

`debug.record()` collects a record of every decode step that is compiled inside it: what each pass matched and skipped,
and the graph before and after. `dump` writes it into a folder that you can read, compare and send to somebody.
"""

from __future__ import annotations

import pathlib
import tempfile
import textwrap

import torch
from own_decoder import Decoder
from torch import Tensor

from inertia_fx import Config, debug, errors
from inertia_fx.cache import SlotCache


class SoftCapped(Decoder):
    """A decoder whose attention is none that the passes know: its logits are squashed before the softmax."""

    def step(self, token: Tensor, position: Tensor, cache: SlotCache) -> Tensor:
        entry = cache.enter()
        mask = torch.where(entry.live[:, None, None, :], 0.0, float("-inf"))
        x = self.embed(token, position)
        for layer, block in enumerate(self.blocks):
            query, key, value = block.project(x)
            keys, values = (part.repeat_interleave(2, dim=1) for part in cache.update(key, value, layer))
            logits = 20 * torch.tanh(query @ keys.mT / 80)
            weights = (logits + mask).softmax(-1)
            x = x + block.merge(weights @ values)
        cache.leave(entry)
        return self.head(x[:, -1])


@torch.no_grad()
def decode_once(model: Decoder) -> SlotCache:
    """A prompt of 40 tokens and one compiled step."""
    config = Config(ratio=0.5, min_budget=8)
    cache = SlotCache(config)
    # backend="eager" runs the rewritten graph without a compiler behind it: the first thing to try when something looks
    # wrong. "passes": False is the second: the step as it was traced.
    options = config.graph_options(score=True) | {"backend": "eager"}
    step = torch.compile(model.step, backend="inertia_fx", options=options, fullgraph=True)
    with cache.prompt(1, 40):
        model.prompt(torch.arange(40)[None], cache)
    with cache.step(1):
        step(torch.tensor([[1]]), torch.tensor([[40]]), cache)
    return cache


def indented(text: str) -> str:
    return textwrap.fill(text, 80, initial_indent="    ", subsequent_indent="    ")


def main() -> None:
    torch.manual_seed(0)
    with debug.record() as seen:
        decode_once(Decoder().eval())
    record = seen[0]
    assert len(seen) == 1, "one step was compiled"
    for result in record.results:
        print(f"{result.name}: {len(result.matched)} matched, {len(result.skipped)} skipped")
        for line in (*result.matched[:1], *result.skipped[:1]):
            print(indented(str(line)))
    found = next(result for result in record.results if result.name == "find_attention")
    assert len(found.matched) == 3, "every layer's attention was found"

    with tempfile.TemporaryDirectory() as folder:
        record.dump(folder)
        for file in sorted(path for path in pathlib.Path(folder).rglob("*") if path.is_file()):
            print(f"{file.relative_to(folder)}: {len(file.read_text().splitlines())} lines")
    marker = "torch.ops.inertia_fx.commit_step"  # what `cache.leave` left in the traced graph
    assert marker in record.before
    assert marker not in record.after, "the eviction took its place"

    # Every refusal is a class of inertia_fx.errors that says what was wrong, where, and what to do. torch.compile wraps
    # what a backend raises; a model that came from inertia_fx.compile raises it unwrapped.
    try:
        decode_once(SoftCapped().eval())
    except torch._dynamo.exc.BackendCompilerFailed as failure:
        refusal = failure.inner_exception
        assert isinstance(refusal, errors.UnsupportedAttentionError)
        print(f"refused: {type(refusal).__name__}, layer {refusal.layer}, graph node {refusal.node}")
        print(indented(refusal.reason))
        assert refusal.layer == 0
        assert "debugging.py" in str(refusal), "it names the line that wrote the attention"
    else:
        raise AssertionError("an attention that the passes do not know must be refused")


if __name__ == "__main__":
    main()
