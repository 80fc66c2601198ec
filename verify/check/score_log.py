"""Log the scores that a model gives its tokens with the full cache, and hold Proposition 1 against them."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence
from typing import get_args

import torch
from torch import Tensor

from ...config import Config, Scorer
from ..reference import Observation
from ..retention import RetentionList
from ..theory.bounds import Rule
from .metrics import NEVER, best_first, finite, jaccard, spearman, top
from .report_data import Ranking, Stability

SCORERS: tuple[str, ...] = get_args(Scorer)

_PAIRS = 512
"""Tokens whose pairs are compared, at most: 131 thousand pairs."""
_SHOWN = 12
"""Tokens whose ranks are kept for the picture."""
_FEWEST = 8
"""Refreshes from which on a token's mean and variance mean anything."""


class ScoreLog:
    """Log of one sequence's scores with its full cache, step by step, and of the momentum that each scorer would give.

    Args:
        config: whose rule smooths the scores.
        prompt: P.
        budget: B, for the top-B sets.
    """

    def __init__(self, config: Config, prompt: int, budget: int) -> None:
        self.config, self.prompt, self.budget = config, prompt, budget
        self.lists = {}
        for scorer in SCORERS:
            self.lists[scorer] = RetentionList(**(vars(config) | {"budget": NEVER, "scorer": scorer}))
            self.lists[scorer].add_prompt(prompt)
        self.raw: list[Tensor] = []
        self.smoothed: list[Tensor] = []
        self.refreshed: list[bool] = []
        self.spearman: dict[str, list[float]] = {}
        self.jaccard: dict[str, list[float]] = {}
        self.layers = 0

    def add(self, seen: Observation) -> None:
        """Add one decode step.

        Raises:
            InputError: a score is not finite.
        """
        finite("the attention scores", seen.scores)
        self.layers = len(seen.scores)
        momentum = {}
        refresh = False
        for scorer, row in self.lists.items():
            refresh = row.add_token()
            if refresh:
                per_layer = zip(seen.attention, seen.value_norms, strict=True)
                row.refresh([row.score(attention, norms) for attention, norms in per_layer])
            momentum[scorer] = torch.tensor(row.momentum)
        for a, b in itertools.combinations(SCORERS, 2):
            sets = [top(momentum[scorer], self.budget) for scorer in (a, b)]
            self.spearman.setdefault(f"{a}/{b}", []).append(spearman(momentum[a], momentum[b]))
            self.jaccard.setdefault(f"{a}/{b}", []).append(jaccard(*sets))
        weights = torch.tensor(layer_weights(self.config, self.layers))
        self.raw.append((weights @ seen.scores)[: self.prompt])
        self.smoothed.append(momentum[self.config.scorer][: self.prompt])
        self.refreshed.append(refresh)

    def mean(self, of: dict[str, list[float]]) -> dict[str, float]:
        """Return the mean over the steps, per pair of scorers."""
        return {pair: statistics.fmean(values) for pair, values in of.items()}

    def churn(self, of: Sequence[Tensor]) -> list[float]:
        """Return 1 - Jaccard of each step's top B of the prompt with the step before's."""
        sets = [top(scores, self.budget) for scores in of]
        return [1 - jaccard(before, after) for before, after in itertools.pairwise(sets)]

    def ranking(self) -> Ranking | None:
        """Rank the tokens around the budget; ``None`` if the budget holds the whole prompt."""
        if self.budget >= self.prompt:
            return None
        order = best_first(self.smoothed[-1])
        first = max(0, self.budget - _SHOWN // 2)
        positions = order[first : first + _SHOWN].tolist()
        shown = {}
        for name, scores in (("raw", self.raw), ("smoothed", self.smoothed)):
            ranks = [best_first(step).argsort() for step in scores]
            shown[name] = [[int(rank[position]) for position in positions] for rank in ranks]
        return Ranking(positions, self.budget, **shown)

    def stability(self) -> tuple[Stability | None, str | None]:
        """Evaluate Proposition 1 on these scores, or say why it does not apply to them."""
        if self.config.aggregator == "cumulative":
            return None, "a sum of scores (aggregator='cumulative') has no stationary spread, so no bound"
        refreshes = sum(self.refreshed)
        if refreshes < _FEWEST:
            return None, f"the spread of scores over time needs at least {_FEWEST} refreshes, the run had {refreshes}"
        if self.prompt < 2:
            return None, "a prompt of one token has no pair to rank"
        rule = Rule.of(self.config, self.layers)
        raw = torch.stack([u for u, on in zip(self.raw, self.refreshed, strict=True) if on]).double()
        smoothed = torch.stack([m for m, on in zip(self.smoothed, self.refreshed, strict=True) if on]).double()
        if self.prompt > _PAIRS:  # evenly spread over the text
            chosen = torch.linspace(0, self.prompt - 1, _PAIRS).long()
            raw, smoothed = raw[:, chosen], smoothed[:, chosen]
        return _stability(rule, raw, smoothed), None


@functools.cache
def layer_weights(config: Config, layers: int) -> list[float]:
    """Return the weights w_1 ... w_K of one step's scores, summing to 1; equal ones for a cumulative sum."""
    if config.aggregator == "cumulative":
        return [1 / layers] * layers
    return Rule.of(config, layers).layer_weights()


def _stability(rule: Rule, raw: Tensor, smoothed: Tensor) -> Stability:
    """`raw` u and `smoothed` m, [refreshes, tokens] fp64."""
    refreshes = len(raw)
    mean, variance = raw.mean(0), raw.var(0, correction=1)
    gap = mean.unsqueeze(1) - mean  # [i, j]
    ahead = gap > 0
    pairs = int(ahead.sum())
    # The layers are already weighed in u, so what is left is one update per refresh.
    process = Rule(alpha=rule.time_weight)
    spread = variance.unsqueeze(1) + variance
    observed, bound = torch.zeros_like(gap), torch.zeros_like(gap)
    for update in range(1, refreshes + 1):
        now = smoothed[update - 1]
        observed += now.unsqueeze(1) < now
        expected = process.expected_gap(update, 1.0) * gap
        bound += (process.gap_variance(update, 0.5) * spread / expected**2).clamp(max=1)
    observed, bound = observed[ahead] / refreshes, bound[ahead] / refreshes
    centred = raw - mean
    usable = variance > 0
    lagged = (centred[1:] * centred[:-1]).sum(0)[usable] / (centred**2).sum(0)[usable]
    normal = centred[:, usable] / variance[usable].sqrt()
    across = (normal.T @ normal / (refreshes - 1)).abs()
    off = ~torch.eye(across.shape[0], dtype=torch.bool)
    autocorrelation = float(lagged.median()) if lagged.numel() else 0.0
    cross = float(across[off].median()) if bool(off.any()) else 0.0
    half_life = rule.half_life
    return Stability(
        layers=rule.layers,
        time_weight=rule.time_weight,
        effective_layers=rule.effective_layers,
        half_life=half_life if half_life < float("inf") else None,
        refreshes=refreshes,
        pairs=pairs,
        observed=float(observed.mean()) if pairs else 0.0,
        bound=float(bound.mean()) if pairs else 0.0,
        exceeded=float((observed > bound).double().mean()) if pairs else 0.0,
        autocorrelation=autocorrelation,
        independent=-1 / refreshes,
        cross_correlation=cross,
        assumption=_assumption(refreshes, autocorrelation, cross),
    )


def _chance(length: int) -> float:
    """Median |correlation| of two independent normal series: its square is Beta(1/2, (length - 2) / 2)."""
    from scipy.stats import beta

    return float(beta.ppf(0.5, 0.5, (length - 2) / 2) ** 0.5)


def _assumption(refreshes: int, autocorrelation: float, cross: float) -> str:
    """What of Proposition 1's "i.i.d. over time, independent across tokens" does not hold, against what chance gives."""
    chance = _chance(refreshes)
    broken = []
    # The median over many tokens is far steadier than one token's 1 / sqrt(T); half of that is a cautious line.
    if autocorrelation + 1 / refreshes > 0.5 / refreshes**0.5:
        broken.append(
            f"a token's score depends on the one before (correlation {autocorrelation:.2f}, independent scores:"
            f" {-1 / refreshes:.2f})"
        )
    if cross > 1.5 * chance:
        broken.append(
            f"tokens' scores move together (median |correlation| {cross:.2f}, independent scores: {chance:.2f})"
        )
    if not broken:
        return (
            "No assumption is visibly broken over these steps; that scores are independent is still assumed, not shown."
        )
    return "Broken here: " + " and ".join(broken) + ". The bound describes this model, it does not certify it."
