"""Attention written at random: spelling, views, writes, casts, masks, group layouts. Each is right or refused.

What is drawn is mostly wrong somewhere. The one demand is that a graph that is not refused computes what it computed as
traced, on a cache of ten tokens and on one of several hundred.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor

from inertia_fx.errors import UnsupportedAttentionError
from tests.common.graphs import Step

HEADS, KV_HEADS, WIDTH = 4, 2, 8
SCALE = 1 / math.sqrt(WIDTH)

Change = Callable[[Tensor], Tensor]


def _expanded(x: Tensor) -> Tensor:
    rows, heads, slots, width = x.shape
    return x[:, :, None].expand(rows, heads, HEADS // heads, slots, width).reshape(rows, HEADS, slots, width)


GROUPS: dict[str, Change] = {
    "expand": _expanded,
    "interleave": lambda x: x.repeat_interleave(2, dim=1),
    "named interleave": lambda x: torch.repeat_interleave(input=x, repeats=2, dim=-3),
    "unsqueeze": lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1, 2),
    "tile": lambda x: x.repeat(1, 2, 1, 1),
    "uneven": lambda x: x.repeat_interleave(torch.tensor([3, 1]), dim=1, output_size=4),
    "reversed": lambda x: _expanded(x.flip(1)),
}
LOGITS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "@": lambda q, k: q @ k.mT,
    "matmul": lambda q, k: torch.matmul(q, k.transpose(-1, -2)),
    "named": lambda q, k: torch.matmul(input=q, other=k.permute(0, 1, 3, 2)),
    "einsum": lambda q, k: torch.einsum("xhid,xhjd->xhij", q, k),
    "sum": lambda q, k: (q.unsqueeze(3) * k.unsqueeze(2)).sum(-1),
}
SCALES: dict[str, Change] = {
    "mul": lambda x: x * SCALE,
    "commuted": lambda x: SCALE * x,
    "div": lambda x: x / math.sqrt(WIDTH),
    "named": lambda x: torch.mul(input=x, other=SCALE),
    "twice": lambda x: (x * 0.5) / 1.5,
    "none": lambda x: x,
    "floor": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "negative": lambda x: x * -SCALE,
    "clamped": lambda x: (x * SCALE).clamp(-1, 1),
}
MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, live: x + torch.where(live, 0.0, torch.finfo(torch.float32).min),
    "commuted": lambda x, live: torch.where(live, 0.0, -1e9) + x,
    "masked_fill": lambda x, live: x.masked_fill(~live, -math.inf),
    "where": lambda x, live: torch.where(live, x, -1e30),
    "none": lambda x, live: x,
    "weak": lambda x, live: x.masked_fill(~live, 0.0),
    "window": lambda x, live: x.masked_fill(~(live & (torch.arange(x.shape[3]) >= x.shape[3] - 20)), -math.inf),
    "biased": lambda x, live: x + torch.where(live, 0.01 * torch.arange(x.shape[3]), -1e9),
    "inverted": lambda x, live: x.masked_fill(live, -math.inf),
}
SOFTMAX: dict[str, Change] = {
    "function": lambda x: F.softmax(x, -1),
    "named": lambda x: torch.softmax(input=x, dim=3),
    "fp32": lambda x: F.softmax(x, dim=-1, dtype=torch.float32),
    "method": lambda x: x.softmax(-1),
    "bf16": lambda x: F.softmax(x, dim=-1, dtype=torch.bfloat16).float(),
    "other dim": lambda x: F.softmax(x, 1),
    "squared": lambda x: F.softmax(x, -1) ** 2,
    "dropout": lambda x: F.dropout(F.softmax(x, -1), 0.5, training=False),
}
CASTS: dict[str, Change] = {
    "none": lambda x: x,
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.contiguous(),
    "float": lambda x: x.float(),
    "fp8": lambda x: x.to(torch.float8_e4m3fn).to(torch.float32),
    "half": lambda x: x.half().float(),
    "double": lambda x: x.double().float(),
    "int": lambda x: x.to(torch.int16).float(),
}
VIEWS: dict[str, Change] = {
    "whole": lambda x: x,
    "select": lambda x: torch.select(x, 1, 0),
    "method": lambda x: x.narrow(1, 1, 1),
    "mT": lambda x: x.mT,
    "chunk": lambda x: torch.chunk(x, 2, 1)[0],
    "movedim": lambda x: torch.movedim(x, 1, 0)[0],
    "index": lambda x: x[..., :1],
    "diagonal": lambda x: torch.diagonal(x, 0, 1, 2),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(0.5),
    "overload": lambda x: torch.ops.aten.mul_.Scalar(x, 0.5),
    "out": lambda x: torch.mul(x, 0.5, out=x),
    "foreach": lambda x: torch._foreach_mul_([x], 0.5),
    "relu": lambda x: F.relu(x, inplace=True),
    "copy": lambda x: x.copy_(x * 0.9),
    "nothing": lambda x: x.mul_(1.0),
}
PLACES = ("query", "key", "value", "logits", "masked", "weights", "live")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """One attention; `writes` are (tensor, view, write, the stage after which it happens)."""

    groups: str
    value_groups: str
    logits: str
    scale: str
    mask: str
    softmax: str
    casts: tuple[str, str, str, str]
    writes: tuple[tuple[str, str, str, str], ...]
    sdpa: bool

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, live: Tensor, extra: Any) -> Tensor:
        held: dict[str, Tensor] = {"query": q, "key": k, "value": v, "live": live}

        def reached(stage: str) -> None:
            for place, view, write, when in self.writes:
                if when == stage and place in held:
                    WRITES[write](VIEWS[view](held[place]))

        held["query"] = q = CASTS[self.casts[0]](q)
        k, v = CASTS[self.casts[1]](k), CASTS[self.casts[2]](v)
        reached("begin")
        k, v = GROUPS[self.groups](k), GROUPS[self.value_groups](v)
        reached("groups")
        if self.sdpa:
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=live)
            reached("end")
            return output
        held["logits"] = SCALES[self.scale](LOGITS[self.logits](q, k))
        reached("logits")
        held["masked"] = MASKS[self.mask](held["logits"], live)
        reached("masked")
        held["weights"] = CASTS[self.casts[3]](SOFTMAX[self.softmax](held["masked"]))
        reached("weights")
        return held["weights"] @ v


def _mostly(draw: Any, choices: dict[str, Any]) -> str:
    """The first choices, which are right, more often than the last ones."""
    names = list(choices)
    return draw(st.one_of(st.sampled_from(names[: max(1, len(names) // 2)]), st.sampled_from(names)))


@st.composite
def recipes(draw: Any) -> Recipe:
    groups = _mostly(draw, GROUPS)
    write = st.tuples(
        st.sampled_from(PLACES), st.sampled_from(list(VIEWS)), st.sampled_from(list(WRITES)),
        st.sampled_from(["begin", "groups", "logits", "masked", "weights", "end"]),
    )  # fmt: skip
    return Recipe(
        groups=groups,
        value_groups=groups if draw(st.integers(0, 4)) else _mostly(draw, GROUPS),
        logits=_mostly(draw, LOGITS),
        scale=_mostly(draw, SCALES),
        mask=_mostly(draw, MASKS),
        softmax=_mostly(draw, SOFTMAX),
        casts=tuple(_mostly(draw, CASTS) for _ in range(4)),  # type: ignore[arg-type]
        writes=tuple(draw(st.lists(write, max_size=2))) if draw(st.booleans()) else (),
        sdpa=draw(st.integers(0, 3)) == 0,
    )


def outcome(recipe: Recipe) -> str:
    """Rewrite and compare: matched, refused, or untraceable, if torch.compile or the attention itself does not take it."""
    try:
        step = Step(recipe)
    except (torch._dynamo.exc.TorchDynamoException, RuntimeError):
        return "untraceable"
    try:
        gm = step.rewritten()
    except UnsupportedAttentionError:
        return "refused"
    difference = step.difference(gm)
    assert difference < 1e-4, f"rewritten to something else: off by {difference:.2g}"
    return "matched"


@settings(max_examples=60)
@given(recipe=recipes())
def test_what_is_not_refused_is_right(recipe: Recipe) -> None:
    event(outcome(recipe))


def test_the_recipes_are_of_both_kinds() -> None:
    """The right choices alone are matched; each wrong one alone is refused, or changes nothing."""
    right = Recipe("expand", "expand", "@", "mul", "add", "function", ("none",) * 4, (), sdpa=False)
    assert outcome(right) == "matched"
    wrong: dict[str, Any] = {"scale": "floor", "mask": "window", "softmax": "squared", "groups": "uneven"}
    for field, choice in wrong.items():
        assert outcome(dataclasses.replace(right, **{field: choice})) == "refused", (field, choice)
    assert outcome(dataclasses.replace(right, casts=("none", "none", "none", "half"))) == "refused"
    assert outcome(dataclasses.replace(right, writes=(("logits", "mT", "overload", "logits"),))) == "refused"
    assert outcome(dataclasses.replace(right, writes=(("key", "select", "mul_", "weights"),))) == "refused"


if __name__ == "__main__":  # many more, without hypothesis: python -m tests.passes.test_generated_attention 5000
    import sys

    generator = random.Random(0)
    seen: collections.Counter[str] = collections.Counter()
    for number in range(int(sys.argv[1])):

        def pick(choices: Any, generator: random.Random = generator) -> Any:
            names = list(choices)
            return generator.choice(names[: max(1, len(names) // 2)] if generator.random() < 0.6 else names)

        groups = pick(GROUPS)
        stages = ["begin", "groups", "logits", "masked", "weights", "end"]
        writes = tuple(
            (generator.choice(PLACES), generator.choice(list(VIEWS)), generator.choice(list(WRITES)), generator.choice(stages))
            for _ in range(generator.choice([0, 0, 0, 1, 1, 2]))
        )  # fmt: skip
        drawn = Recipe(
            groups, groups if generator.random() < 0.8 else pick(GROUPS), pick(LOGITS), pick(SCALES), pick(MASKS),
            pick(SOFTMAX), tuple(pick(CASTS) for _ in range(4)), writes, generator.random() < 0.25,  # type: ignore[arg-type]
        )  # fmt: skip
        try:
            seen[outcome(drawn)] += 1
        except AssertionError as failure:
            seen["WRONG"] += 1
            print(failure, drawn, flush=True)
        if number % 100 == 99:
            print(dict(seen), flush=True)
