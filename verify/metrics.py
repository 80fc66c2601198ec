"""How alike two sets, two rankings, two distributions are, and Proposition 1 beside a model's own scores."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import get_args

import torch
from torch import Tensor

from ..config import Config, Scorer
from ..errors import ConfigError, InputError
from .bounds import Rule
from .reference import Observation, RetentionList
from .report import Ranking, Stability

SCORERS: tuple[str, ...] = get_args(Scorer)
NEVER = 2**62
"""A budget that no run reaches."""

_PAIRS = 512
"""Tokens whose pairs are compared, at most: 131 thousand pairs."""
_SHOWN = 12
"""Tokens whose ranks are kept for the picture."""
_FEWEST = 8
"""Refreshes from which on a token's mean and variance mean anything."""


def jaccard(left: Collection[int], right: Collection[int]) -> float:
    """|A and B| / |A or B|; 1 for two empty sets."""
    a, b = set(left), set(right)
    return len(a & b) / len(a | b) if a | b else 1.0


def spearman(left: Tensor, right: Tensor) -> float:
    """Rank correlation of two vectors, ties at their mean rank; 1 if either has no order to compare.

    Raises:
        InputError: unequal shapes, or values that are not finite.
    """
    same_shape("the two score vectors", left, right)
    finite("the scores to rank", left)
    finite("the scores to rank", right)
    if len(left.unique()) < 2 or len(right.unique()) < 2:
        return 1.0
    require_scipy("A rank correlation")
    from scipy.stats import spearmanr

    return float(spearmanr(left.numpy(), right.numpy()).statistic)


def top(scores: Tensor, budget: int) -> list[int]:
    """Indices of the `budget` largest of [L] scores, best first; of equal ones the newest stay (SPEC D7)."""
    return _best_first(scores)[:budget].tolist()


def _best_first(scores: Tensor) -> Tensor:
    """Indices by score, of equal ones the newest first: the order in which tokens are worth keeping."""
    return len(scores) - 1 - scores.flip(0).argsort(descending=True, stable=True)


def tie(momentum: Mapping[int, float], kept: Collection[int], due: Collection[int]) -> float:
    """How far apart, relatively, the momenta are of the tokens by which two choices of survivors differ.

    Args:
        momentum: of every token that could be chosen, by position.
        kept, due: the two choices, not equal.

    Returns:
        0 for exactly equal momenta; infinity where no rounding explains the difference: the choices differ in number, hold
        a token that was not there, or `due` spares a token of less momentum (a protected one).
    """
    wrongly_kept, wrongly_gone = set(kept) - set(due), set(due) - set(kept)
    if len(wrongly_kept) != len(wrongly_gone) or not wrongly_kept <= momentum.keys():
        return math.inf
    low, high = min(momentum[at] for at in wrongly_kept), max(momentum[at] for at in wrongly_gone)
    return (high - low) / max(abs(high), abs(low), 1e-30) if high >= low else math.inf


def is_tie(
    reference: Mapping[int, float],
    own: Mapping[int, float],
    kept: Collection[int],
    due: Collection[int],
    tolerance: float,
) -> bool:
    """Whether rounding alone explains that `kept` was kept and not `due`, what the reference would have kept.

    Args:
        reference: the reference's momentum of every token that could be chosen, by position.
        own: the momentum under test, of those it knows.
        tolerance: relative difference of two momenta that rounding may turn around. Momenta which the reference finds
            exactly equal are a matter of age (SPEC D7), unless the ones under test do differ, and in that direction.
    """
    apart = tie(reference, kept, due)
    if apart > 0:
        return apart <= tolerance
    gone = [own[at] for at in set(due) - set(kept) if at in own]
    stay = [own[at] for at in set(kept) - set(due) if at in own]
    return bool(gone and stay) and max(gone) < min(stay)


def divergence(full: Tensor, other: Tensor) -> float:
    """KL(full || other) in nats, of two vectors of next-token logits."""
    same_shape("the two vectors of logits", full, other)
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (full, other))
    return max(0.0, float((p.exp() * (p - q)).sum()))


def relative_error(full: Tensor, other: Tensor) -> float:
    """|other - full| / |full|, 2-norms."""
    same_shape("the two vectors of logits", full, other)
    return float((other.double() - full.double()).norm() / full.double().norm().clamp(min=1e-30))


def require_scipy(who: str) -> None:
    """Raise :class:`ConfigError` if it is not installed."""
    if importlib.util.find_spec("scipy") is None:
        raise ConfigError(f'{who} needs scipy: pip install "inertia_fx[verify]"')


def same_shape(what: str, left: Tensor, right: Tensor) -> None:
    """Raise :class:`InputError` unless the shapes agree."""
    if left.shape != right.shape:
        raise InputError(f"The shapes of {what} differ: {tuple(left.shape)} and {tuple(right.shape)}; they must agree.")


def finite(what: str, values: Tensor) -> None:
    """Raise :class:`InputError` if a value is NaN or infinite."""
    if not bool(torch.isfinite(values).all()):
        bad = int((~torch.isfinite(values)).sum())
        raise InputError(
            f"{bad} of {values.numel()} values of {what} are not finite: the model overflows in this dtype, or its"
            " weights are broken. Try float32."
        )


class ScoreLog:
    """Scores of one sequence with its full cache, step by step, and the momentum that each scorer would give.

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
        """Take in one decode step.

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
        """Per pair of scorers, the mean over the steps."""
        return {pair: statistics.fmean(values) for pair, values in of.items()}

    def churn(self, of: Sequence[Tensor]) -> list[float]:
        """1 - Jaccard of each step's top B of the prompt with the step before's."""
        sets = [top(scores, self.budget) for scores in of]
        return [1 - jaccard(before, after) for before, after in itertools.pairwise(sets)]

    def ranking(self) -> Ranking | None:
        """Ranks of the tokens around the budget; ``None`` if the budget holds the whole prompt."""
        if self.budget >= self.prompt:
            return None
        order = _best_first(self.smoothed[-1])
        first = max(0, self.budget - _SHOWN // 2)
        positions = order[first : first + _SHOWN].tolist()
        shown = {}
        for name, scores in (("raw", self.raw), ("smoothed", self.smoothed)):
            ranks = [_best_first(step).argsort() for step in scores]
            shown[name] = [[int(rank[position]) for position in positions] for rank in ranks]
        return Ranking(positions, self.budget, **shown)

    def stability(self) -> tuple[Stability | None, str | None]:
        """Proposition 1 on these scores, or why it says nothing about them."""
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
    """w_1 ... w_K of one step's scores, summing to 1; equal ones for a cumulative sum."""
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
