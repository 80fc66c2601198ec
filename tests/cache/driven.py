"""A slot cache driven without a model, and the plain dictionary that a row of it must agree with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from inertia_fx import Config
from inertia_fx.cache import SlotCache

LAYERS, HEADS, WIDTH = 2, 2, 4
SLOT_BYTES = LAYERS * 2 * HEADS * WIDTH * 4


def columns(tokens: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys that say which token they belong to, [B, N, T, D], and values that are their negation."""
    key = torch.tensor(tokens, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, WIDTH).contiguous()
    return key, -key


class Driven:
    """A SlotCache driven without a model: the key of the token at position p is p, scores are handed in."""

    def __init__(self, config: Config, lengths: list[int], cache: SlotCache | None = None) -> None:
        self.cache = SlotCache(config) if cache is None else cache
        self.lengths = [0] * len(lengths)
        self.prompt(lengths)

    def prompt(self, lengths: list[int]) -> None:
        width = max(lengths)
        padding = torch.tensor([[column >= width - length for column in range(width)] for length in lengths])
        tokens = [
            [before + column - (width - length) for column in range(width)]
            for before, length in zip(self.lengths, lengths, strict=True)
        ]
        with self.cache.prompt(len(lengths), width, None if bool(padding.all()) else padding):
            for layer in range(LAYERS):
                self.cache.update(*columns(tokens), layer)
        self.lengths = [before + length for before, length in zip(self.lengths, lengths, strict=True)]

    def step(self, scores: Any = None) -> None:
        """One decode step; `scores(row, position)` is added to the momentum as the passes would."""
        cache = self.cache
        with cache.step(len(self.lengths)):
            entry = cache.enter()
            for layer in range(LAYERS):
                keys, values = cache.update(*columns([[length] for length in self.lengths]), layer)
            for row, positions in enumerate(entry.positions.tolist()):
                for slot, position in enumerate(positions):
                    if position >= 0:
                        assert keys[row, 0, slot, 0] == position == -values[row, 1, slot, 3]
            momentum = entry.momentum
            if scores is not None:
                momentum = momentum.clone()
                for row, positions in enumerate(entry.positions.tolist()):
                    for slot, position in enumerate(positions):
                        if position >= 0:
                            momentum[row, slot] = scores(row, position)
            cache.leave(dataclasses.replace(entry, momentum=momentum))
        self.lengths = [length + 1 for length in self.lengths]

    @property
    def retained(self) -> list[list[int]]:
        return [positions.tolist() for positions in self.cache.retained_positions()]


class ListRow:
    """One row as a dictionary from position to momentum."""

    def __init__(self, config: Config, protect: tuple[int, int]) -> None:
        self.config, self.protect = config, protect
        self.momentum: dict[int, float] = {}
        self.seen = self.length = self.t = 0
        self.pooled = False

    @property
    def budget(self) -> int:
        return self.config.budget_of(self.length)

    def mean(self) -> float:
        return math.fsum(self.momentum.values()) / len(self.momentum) if self.momentum else 0.0

    def prompt(self, length: int) -> None:
        mean = self.mean()
        self.momentum |= {self.seen + index: mean for index in range(length)}
        self.seen, self.length, self.t, self.pooled = self.seen + length, self.length + length, 0, False

    def step(self, score: Any) -> None:
        self.momentum[self.seen] = 0.0
        self.momentum = {position: score(position) for position in self.momentum}
        self.seen += 1
        if self.t < self.config.evict_after or len(self.momentum) <= self.budget:
            return
        if not self.pooled:
            self.pooled, order, reach = True, sorted(self.momentum), self.config.pool_width // 2
            values = [self.momentum[position] for position in order]
            self.momentum = {
                position: max(values[max(0, place - reach) : place + reach + 1]) for place, position in enumerate(order)
            }
        while len(self.momentum) > self.budget:
            loose = [p for p in self.momentum if self.protect[0] <= p < self.seen - self.protect[1]]
            del self.momentum[min(loose, key=lambda position: (self.momentum[position], position))]
