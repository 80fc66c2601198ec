"""Keep and evict tokens on two Python lists, by the letter of SPEC.md, wherever the scores come from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction

import torch
from torch import Tensor


class RetentionList:
    """Retention list of one row: its cached tokens, in the order of the text, and the rule that evicts them.

    Args:
        The arguments are those of :class:`inertia_fx.Config`, with the same meaning.

    Attributes:
        positions: true position of every cached token.
        momentum: its momentum (fp32 values).
        seen: tokens of the text so far.
        step_number: t; a later prompt starts it again (D12).
    """

    def __init__(
        self,
        *,
        ratio: float | Fraction | Decimal | str = 0.9,
        alpha: float = 0.8,
        refresh_every: int | None = 1,
        evict_after: int = 1,
        pool_width: int = 1,
        budget: int | None = None,
        min_budget: int = 64,
        aggregator: str = "ema",
        scorer: str = "attention",
        alpha_time: float | None = None,
        alpha_layer: float | None = None,
        protect_first: int = 0,
        protect_recent: int = 0,
    ) -> None:
        self.ratio, self.alpha, self.refresh_every, self.evict_after = ratio, alpha, refresh_every, evict_after
        self.pool_width, self.absolute, self.min_budget = pool_width, budget, min_budget
        self.aggregator, self.scorer = aggregator, scorer
        self.alpha_time, self.alpha_layer = alpha_time, alpha_layer
        self.protect_first, self.protect_recent = protect_first, protect_recent
        self.positions: list[int] = []
        self.momentum: list[float] = []
        self.prompt_length = 0
        self.seen = 0
        self.step_number = 0
        self.pooled = False

    @property
    def by_position(self) -> dict[int, float]:
        """Return the momentum of every listed token, by position."""
        return dict(zip(self.positions, self.momentum, strict=True))

    def budget(self) -> int:
        """Return B = floor((1 - ratio) P), exactly (D5), at least min_budget (D6)."""
        if self.absolute is not None:
            return self.absolute
        kept = (1 - Fraction(str(self.ratio))) * self.prompt_length
        return max(self.min_budget, math.floor(kept))

    def add_prompt(self, tokens: int) -> None:
        """Append a first or later prompt (D13): its tokens join at the mean of the momenta, 0 in an empty list."""
        mean = _mean(self.momentum)
        for _ in range(tokens):
            self.positions.append(self.seen)
            self.momentum.append(mean)
            self.seen += 1
        self.prompt_length += tokens
        self.step_number = 0
        self.pooled = False

    def add_token(self) -> bool:
        """Begin a decode step: its token enters at the mean of the others (D2). Returns whether it is a refresh."""
        self.step_number += 1
        self.positions.append(self.seen)
        self.momentum.append(_mean(self.momentum))
        self.seen += 1
        if self.refresh_every is None:
            return self.step_number == 1
        return (self.step_number - 1) % self.refresh_every == 0

    def score(self, probabilities: Tensor, value_norms: Tensor) -> Tensor:
        """Return the scores s of one layer (D4, D21).

        Args:
            probabilities: [query heads, tokens] fp32, softmax of the one query over the listed tokens.
            value_norms: [KV heads, tokens] fp32, norms of the values; read by the scorer "vnorm" alone.
        """
        if self.scorer == "vnorm":
            weights = value_norms / value_norms.mean(dim=-1, keepdim=True)
            group = probabilities.shape[0] // weights.shape[0]
            probabilities = torch.stack([probabilities[h] * weights[h // group] for h in range(len(probabilities))])
        s = probabilities.mean(dim=0)
        if self.scorer == "entropy":
            entropy = -sum(p * math.log(p) for p in s.tolist() if p > 0)
            s = s * (entropy / math.log(len(s)))
        return s

    def refresh(self, scores: Sequence[Tensor]) -> None:
        """Move the momentum by one step's scores, one [tokens] fp32 vector per layer, in model order."""
        layers = len(scores)
        m = torch.tensor(self.momentum, dtype=torch.float32)
        if self.aggregator == "single_step":
            m = scores[-1]  # D11
        elif self.aggregator == "cumulative":
            for s in scores:
                m = m + s  # D20
        elif self.alpha_time is None and self.alpha_layer is None:
            for s in scores:
                m = self.alpha * m + (1 - self.alpha) * s
        else:
            time = self.alpha**layers if self.alpha_time is None else self.alpha_time
            layer = self.alpha if self.alpha_layer is None else self.alpha_layer
            weights = [layer ** (layers - 1 - index) for index in range(layers)]
            u = sum(w / sum(weights) * s for w, s in zip(weights, scores, strict=True))
            m = time * m + (1 - time) * u
        self.momentum = m.tolist()

    def survivors(self) -> list[int]:
        """Return the sorted positions of the tokens that survive the step. Pools the momentum before a first eviction (D19)."""
        count = len(self.positions) - self.budget()
        if self.step_number < self.evict_after or count <= 0:
            return list(self.positions)
        if not self.pooled:
            self._pool()
            self.pooled = True
        candidates = [
            index
            for index, position in enumerate(self.positions)
            if self.protect_first <= position < self.seen - self.protect_recent
        ]
        candidates.sort(key=lambda index: (self.momentum[index], self.positions[index]))  # D7: the oldest goes first
        victims = set(candidates[:count])
        return [position for index, position in enumerate(self.positions) if index not in victims]

    def retain(self, positions: Sequence[int]) -> list[int]:
        """Keep these tokens alone. Returns their indices in the lists as they were."""
        kept = set(positions)
        keep = [index for index, position in enumerate(self.positions) if position in kept]
        self.positions = [self.positions[index] for index in keep]
        self.momentum = [self.momentum[index] for index in keep]
        return keep

    def _pool(self) -> None:
        reach = (self.pool_width - 1) // 2
        m = self.momentum  # the list is in position order: tokens are only ever appended and removed
        self.momentum = [max(m[max(0, i - reach) : i + reach + 1]) for i in range(len(m))]


def _mean(values: list[float]) -> float:
    """The exact mean, rounded once to fp32, so that tokens entering one after another at an unchanged mean tie (D7)."""
    return float(torch.tensor(math.fsum(values) / len(values), dtype=torch.float32)) if values else 0.0
