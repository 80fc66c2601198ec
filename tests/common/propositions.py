"""Run the process of Proposition 1 through the compiled graph, and check the graph's momentum against the derivation.

Error rates: a comparison of a mean or a variance fails by chance about once in a million (|z| > 4.9, by the normal
approximation; the variance of a sample variance is exact, from fourth cumulants), one of a count with a bound less often
(binomial p < 1e-6).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from inertia_fx import Config
from inertia_fx.verify.testing.synthetic import SyntheticRun
from inertia_fx.verify.theory.bounds import Rule

ROWS = 2048
Z = 4.9
"""Two-sided tail of the normal distribution: 1e-6."""
POSITIONS = 32
SINK, AHEAD, BEHIND = 0, 1, 2
MEAN = 0.2

KURTOSIS = {"two_point": 1.0, "uniform": 1.8, "heavy_tailed": 20.0}


def noise(kind: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Independent, mean 0, variance 1, bounded by 4.5 so that scores stay positive."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(*shape, generator=generator, dtype=torch.float64)
    if kind == "two_point":
        return torch.where(uniform < 0.5, -1.0, 1.0).double()
    if kind == "uniform":
        return (uniform - 0.5) * math.sqrt(12)
    outlier = 1 / math.sqrt(0.05)  # with probability 0.05 far out, else 0
    return torch.where(uniform < 0.025, -outlier, torch.where(uniform > 0.975, outlier, 0.0)).double()


@dataclasses.dataclass
class Process:
    """Two tokens with scores of given means and standard deviation, `layers` per step, `steps` steps."""

    settings: dict[str, Any]
    layers: int
    steps: int
    gap: float = 0.05
    deviation: float = 0.03
    kind: str = "uniform"
    same_in_all_layers: bool = False
    seed: int = 0

    @property
    def rule(self) -> Rule:
        return Rule.of(self.config, self.layers)

    @property
    def config(self) -> Config:
        return Config(budget=10**9, evict_after=self.steps + 1, **self.settings)

    def scores(self) -> Tensor:
        """[steps, K, rows, 2]."""
        shape = (self.steps, 1 if self.same_in_all_layers else self.layers, ROWS, 2)
        drawn = noise(self.kind, shape, self.seed) * self.deviation
        return (drawn + torch.tensor([MEAN + self.gap, MEAN])).expand(-1, self.layers, -1, -1)

    def gaps(self, scores: Tensor | None = None) -> Tensor:
        """m(i) - m(j) after the last step, [rows] fp64, as the compiled graph has it."""
        run = SyntheticRun(self.config, [3] * ROWS, layers=self.layers, positions=POSITIONS)
        for step in self.scores() if scores is None else scores:
            run.step(scores_of_all_positions(step))
        state = run.cache.state
        slot = {at: (state.positions == at).long().argmax(1, keepdim=True) for at in (AHEAD, BEHIND)}
        momentum = {at: state.momentum.gather(1, slot[at]).squeeze(1).double() for at in (AHEAD, BEHIND)}
        return momentum[AHEAD] - momentum[BEHIND]


def scores_of_all_positions(scores: Tensor) -> Tensor:
    """Extend [K, rows, 2] scores of i and j to all positions, the sink taking the rest."""
    layers, rows, _ = scores.shape
    whole = torch.full((layers, rows, 1, POSITIONS), 1e-9, dtype=torch.float64)
    whole[:, :, 0, AHEAD], whole[:, :, 0, BEHIND] = scores[..., 0], scores[..., 1]
    whole[:, :, 0, SINK] = 1 - scores.sum(-1)
    return whole.float()


def check_expected_gap(process: Process) -> None:
    """(a): the mean gap is the derived one, which tends to delta."""
    gaps, rule = process.gaps(), process.rule
    expected = rule.expected_gap(process.steps, process.gap)
    correlation = float(process.same_in_all_layers)
    spread = rule.gap_variance(process.steps, process.deviation**2, layer_correlation=correlation)
    z = (float(gaps.mean()) - expected) / math.sqrt(spread / ROWS)
    assert abs(z) < Z, f"mean gap {float(gaps.mean()):.6g}, expected {expected:.6g}: z = {z:.1f}"


def check_gap_variance(process: Process) -> None:
    """(b): the variance of the gap is the derived one, exactly at this T, and within the bound."""
    gaps, rule = process.gaps(), process.rule
    correlation = float(process.same_in_all_layers)
    expected = rule.gap_variance(process.steps, process.deviation**2, layer_correlation=correlation)
    bound = rule.variance_bound(process.deviation**2, layer_correlation=correlation)
    assert expected <= bound * (1 + 1e-12)
    # Fourth cumulants of independent summands add up, with their weights to the fourth power.
    weights = torch.tensor(rule.weights(process.steps), dtype=torch.float64)
    if process.same_in_all_layers:
        weights = weights.sum(1)
    cumulant = 2 * float((weights**4).sum()) * (KURTOSIS[process.kind] - 3) * process.deviation**4
    deviation = math.sqrt(cumulant / ROWS + 2 * expected**2 / (ROWS - 1))
    z = (float(gaps.var()) - expected) / deviation
    assert abs(z) < Z, f"variance of the gap {float(gaps.var()):.6g}, expected {expected:.6g}: z = {z:.1f}"


def check_misranking(process: Process) -> None:
    """(c): how often i is behind j is within Chebyshev's bound at this T."""
    behind = int((process.gaps() < 0).sum())
    correlation = float(process.same_in_all_layers)
    bound = process.rule.misranking_bound(
        process.gap, process.deviation**2, steps=process.steps, layer_correlation=correlation
    )
    assert bound < 1, "the bound says nothing about this process"
    assert binomtest(behind, ROWS, bound, alternative="greater").pvalue > 1e-6, (
        f"{behind / ROWS:.3f}, bound {bound:.3f}"
    )


CHECKS = (check_expected_gap, check_gap_variance, check_misranking)
