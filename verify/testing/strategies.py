"""Generate scores of every kind, retention states, cache geometries, prompts, settings and tiny decoders with hypothesis.

    from inertia_fx.verify.testing import strategies

    @given(strategies.geometries(), strategies.seeds())
    def test_mine(geometry, seed): ...

Bulk numbers come from a drawn seed, so that drawing costs nothing; what decides the shape of a case (lengths, settings,
kinds) is drawn by hypothesis itself and shrinks.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...cache.storage import CLOSED, DEAD, RetentionState
from ...config import Config
from ...errors import ConfigError
from ...kernels.reference import NO_POSITION
from .decoders import FAMILIES, FORMS, TinyDecoder, language_model

KINDS = ("uniform", "heavy_tailed", "near_ties", "exact_ties", "drift")
"""Kinds of scores:

uniform       independent, between 0 and 1
heavy_tailed  independent, log-normal with sigma 2: few tokens get nearly all
near_ties     all alike but for a few parts in a million
exact_ties    three distinct values
drift         an AR(1) process over the steps (correlation 0.95), where Proposition 1's independence does not hold
"""


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds for torch.Generator."""
    return st.integers(0, 2**31 - 1)


def draw_scores(kind: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return positive fp32 scores of one of :data:`KINDS`; the first dimension is time.

    Raises:
        ConfigError: an unknown kind.
    """
    generator = torch.Generator().manual_seed(seed)
    if kind == "heavy_tailed":
        return torch.randn(*shape, generator=generator).mul(2).exp().clamp(min=1e-4)
    if kind == "near_ties":
        return 1 + 1e-6 * torch.randint(0, 5, tuple(shape), generator=generator)
    if kind == "exact_ties":
        return 2.0 ** torch.randint(0, 3, tuple(shape), generator=generator).float()
    if kind == "drift":
        noise = torch.randn(*shape, generator=generator)
        state = [noise[0]]
        for innovation in noise[1:]:
            state.append(0.95 * state[-1] + math.sqrt(1 - 0.95**2) * innovation)
        return torch.sigmoid(torch.stack(state)).clamp(min=1e-4)
    if kind != "uniform":
        raise ConfigError(f"kind={kind!r} is unknown: choose one of {', '.join(KINDS)}.")
    return torch.rand(*shape, generator=generator).clamp(min=1e-4)


@st.composite
def scores(
    draw: Any, *, steps: int, layers: int = 1, rows: int = 1, heads: int = 1, positions: int = 64, kinds: Any = KINDS
) -> Tensor:
    """Draw positive fp32 [steps, layers, rows, heads, positions]: scores for a :class:`.synthetic.SyntheticRun`."""
    return draw_scores(draw(st.sampled_from(kinds)), (steps, layers, rows, heads, positions), draw(seeds()))


@st.composite
def momenta(draw: Any, *, rows: int = 4, slots: int = 40) -> RetentionState:
    """Draw a state as it is between two decode steps: live tokens in any slot order, dead and closed slots, ties.

    Up to `rows` rows and `slots` slots; at least one token of each row is live, and `free` is a dead slot if there is one.
    """
    batch, size = draw(st.integers(1, rows)), draw(st.integers(1, slots))
    generator = torch.Generator().manual_seed(draw(seeds()))
    values = draw(st.sampled_from(("distinct", "ties", "equal")))
    momentum = torch.empty(batch, size)
    positions = torch.full((batch, size), NO_POSITION)
    free = torch.zeros(batch, dtype=torch.int64)
    length = torch.zeros(batch, dtype=torch.int64)
    for row in range(batch):
        live = draw(st.integers(1, size))
        dead = draw(st.integers(0, size - live))
        length[row] = live + draw(st.integers(0, 50))
        order = torch.randperm(size, generator=generator)
        momentum[row] = CLOSED
        momentum[row, order[live : live + dead]] = DEAD
        drawn = torch.rand(live, generator=generator)
        if values != "distinct":
            drawn = (drawn * (3 if values == "ties" else 0)).floor() / 4
        momentum[row, order[:live]] = drawn
        taken = torch.randperm(int(length[row]), generator=generator)[:live]
        positions[row, order[:live]] = taken
        if dead:
            free[row] = order[live + draw(st.integers(0, dead - 1))]
        else:  # the token to go: of the smallest momentum, the oldest
            held = [(float(momentum[row, slot]), int(positions[row, slot]), int(slot)) for slot in order[:live]]
            free[row] = min(held)[2]
    return RetentionState(momentum, positions, free, length)


@st.composite
def configs(draw: Any, *, longest: int = 40, **fixed: Any) -> Config:
    """Draw settings of every kind that fit texts of up to `longest` tokens; `fixed` ones are taken as they are.

    What would contradict a fixed setting is not drawn.
    """
    drawn: dict[str, Any] = {
        "alpha": draw(st.sampled_from((0.0, 0.3, 0.8, 0.95))),
        "refresh_every": draw(st.sampled_from((1, 1, 2, 3, 4, None))),
        "evict_after": draw(st.integers(1, 4)),
        "pool_width": draw(st.sampled_from((1, 1, 3, 5))),
        "aggregator": draw(st.sampled_from(("ema", "ema", "ema", "cumulative", "single_step"))),
        "scorer": draw(st.sampled_from(("attention", "attention", "vnorm", "entropy"))),
        "protect_first": draw(st.sampled_from((0, 0, 1))),
        "protect_recent": draw(st.sampled_from((0, 0, 1, 2))),
    }
    by_ratio = fixed.get("budget") is None and ({"ratio", "min_budget"} & fixed.keys() or draw(st.booleans()))
    if by_ratio:
        drawn |= {"ratio": draw(st.sampled_from((0.0, 0.3, 0.5, 0.7, 0.9))), "min_budget": draw(st.integers(3, 8))}
    else:
        drawn["budget"] = draw(st.integers(3, longest))
    if {"alpha_time", "alpha_layer"} & fixed.keys():
        drawn["aggregator"] = "ema"
    if (drawn | fixed)["aggregator"] == "ema" and draw(st.booleans()):
        drawn |= {
            "alpha_time": draw(st.sampled_from((0.0, 0.5, 0.9))),
            "alpha_layer": draw(st.sampled_from((0.0, 0.7, 1.0))),
        }
    chosen = drawn | fixed
    smallest = chosen["budget"] if chosen.get("budget") is not None else chosen["min_budget"]
    for name, other in (("protect_recent", "protect_first"), ("protect_first", "protect_recent")):
        if name not in fixed:
            chosen[name] = max(0, min(chosen[name], smallest - chosen[other]))
    return Config(**chosen)


@dataclasses.dataclass(frozen=True)
class Geometry:
    """Geometry of a cache: prompt tokens per row, layers, query and KV heads, and the settings."""

    lengths: tuple[int, ...]
    layers: int
    heads: int
    kv_heads: int
    config: Config


@st.composite
def geometries(draw: Any, *, longest: int = 24, rows: int = 3, **fixed: Any) -> Geometry:
    """Draw caches of up to `rows` rows of unequal prompts, multi-head, grouped and multi-query attention."""
    heads, kv_heads = draw(st.sampled_from(((1, 1), (2, 2), (4, 2), (4, 1), (6, 2))))
    lengths = tuple(draw(st.lists(st.integers(1, longest), min_size=1, max_size=rows)))
    config = draw(configs(longest=longest, **fixed))
    return Geometry(lengths, draw(st.integers(1, 3)), heads, kv_heads, config)


@st.composite
def prompts(draw: Any, *, vocabulary: int = 128, rows: int = 3, longest: int = 24) -> dict[str, Tensor]:
    """Draw a batch padded left or right: input_ids and attention_mask [B, P]; ids from 1 on, padded with 0."""
    lengths = draw(st.lists(st.integers(1, longest), min_size=1, max_size=rows))
    width = max(lengths) + draw(st.integers(0, 2))
    left = draw(st.booleans())
    generator = torch.Generator().manual_seed(draw(seeds()))
    ids, mask = (torch.zeros(len(lengths), width, dtype=torch.int64) for _ in range(2))
    for row, length in enumerate(lengths):
        place = slice(width - length, width) if left else slice(0, length)
        ids[row, place] = torch.randint(1, vocabulary, (length,), generator=generator)
        mask[row, place] = 1
    return {"input_ids": ids, "attention_mask": mask}


@st.composite
def decoders(draw: Any, *, forms: Sequence[str] = tuple(FORMS)) -> TinyDecoder:
    """Draw a tiny decoder over a SlotCache, its attention in one of the forms that the passes match."""
    heads, kv_heads = draw(st.sampled_from(((1, 1), (2, 2), (4, 2), (4, 1), (6, 2))))
    return TinyDecoder(
        FORMS[draw(st.sampled_from(forms))],
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        width=draw(st.sampled_from((4, 8, 10))),
        seed=draw(st.integers(0, 1000)),
    )


@st.composite
def language_models(draw: Any, *, families: Sequence[str] = tuple(FAMILIES)) -> Any:
    """Draw a tiny Hugging Face decoder of a supported family, with "sdpa" or "eager" attention."""
    heads, kv_heads = draw(st.sampled_from(((4, 4), (4, 2), (4, 1))))
    return language_model(
        draw(st.sampled_from(families)),
        layers=draw(st.integers(1, 3)),
        heads=heads,
        kv_heads=kv_heads,
        attention=draw(st.sampled_from(("sdpa", "eager"))),
        seed=draw(st.integers(0, 1000)),
    )
