"""The literal growing-list decoder: SPEC.md line by line, in plain eager torch, slow and obvious.

One row at a time, one growing list of cached tokens, nothing bounded, nothing compiled. It shares no code with the
passes, the kernels or the slot cache; its attention is the model's own eager attention, whose probabilities the model
hands out. What the compiled graph retains must equal what this retains, at every step.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache


@dataclasses.dataclass
class Trace:
    """What one row did.

    Attributes:
        tokens: the greedy tokens, the first of them from the prompt's forward.
        retained: after each decode step, the sorted true positions of the tokens that survive it.
        momentum: after each decode step, their momentum (fp32), in the same order.
        logits: [steps, vocabulary], of each decode step.
        budget: B.
    """

    tokens: list[int]
    retained: list[list[int]]
    momentum: list[list[float]]
    logits: Tensor
    budget: int


class Reference:
    """The decoder of SPEC.md for one row of a Hugging Face model.

    Args:
        model: the original model; a copy with eager attention is used, the model itself is left alone.
        The others are those of :class:`inertia_fx.Config`, with the same meaning.
    """

    def __init__(
        self,
        model: Any,
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
        self.model = copy.deepcopy(model)
        self.model.set_attn_implementation("eager")
        self.ratio, self.alpha, self.refresh_every, self.evict_after = ratio, alpha, refresh_every, evict_after
        self.pool_width, self.absolute, self.min_budget = pool_width, budget, min_budget
        self.aggregator, self.scorer = aggregator, scorer
        self.alpha_time, self.alpha_layer = alpha_time, alpha_layer
        self.protect_first, self.protect_recent = protect_first, protect_recent
        self.cache = DynamicCache(config=self.model.config)
        arguments = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in arguments else "past_key_values"
        self.positions: list[int] = []  # true position of every cached token, in the order they are cached
        self.momentum: list[float] = []  # its momentum
        self.prompt_length = 0
        self.seen = 0  # tokens of the text so far
        self.step_number = 0  # t; a later prompt starts it again (D12)
        self.pooled = False

    def budget(self) -> int:
        """B = floor((1 - ratio) P), exactly (D5), at least min_budget (D6)."""
        if self.absolute is not None:
            return self.absolute
        kept = (1 - Fraction(str(self.ratio))) * self.prompt_length
        return max(self.min_budget, math.floor(kept))

    @torch.no_grad()
    def prompt(self, token_ids: list[int]) -> Tensor:
        """Several tokens at once, first or later prompt (D13). Returns the last token's logits."""
        mean = _mean(self.momentum)
        logits = self._forward(token_ids)
        for _ in token_ids:
            self.positions.append(self.seen)
            self.momentum.append(mean)
            self.seen += 1
        self.prompt_length += len(token_ids)
        self.step_number = 0
        self.pooled = False
        return logits

    @torch.no_grad()
    def step(self, token_id: int) -> Tensor:
        """One decode step. Returns its logits."""
        self.step_number += 1
        refresh = (
            self.step_number == 1 if self.refresh_every is None else ((self.step_number - 1) % self.refresh_every == 0)
        )
        logits = self._forward([token_id])
        self.positions.append(self.seen)
        self.momentum.append(_mean(self.momentum))  # D2: the mean of the row's other live tokens
        self.seen += 1
        if refresh:
            self._refresh()
        if self.step_number >= self.evict_after and len(self.positions) > self.budget():
            if not self.pooled:
                self._pool()
                self.pooled = True
            self._evict(len(self.positions) - self.budget())
        return logits

    def _forward(self, token_ids: list[int]) -> Tensor:
        length = len(token_ids)
        positions = torch.arange(self.seen, self.seen + length)[None]
        cached = len(self.positions)
        causal = torch.ones(length, cached + length, dtype=torch.bool).tril(cached)
        dtype = self.model.dtype
        mask = torch.zeros(length, cached + length, dtype=dtype).masked_fill(~causal, torch.finfo(dtype).min)
        output = self.model(
            torch.tensor([token_ids]),
            attention_mask=mask[None, None],
            position_ids=positions,
            output_attentions=True,
            use_cache=True,
            **{self.cache_name: self.cache},
        )
        self.attentions = output.attentions
        return output.logits[0, -1]

    def _refresh(self) -> None:
        scores = [self._score(layer) for layer in range(len(self.attentions))]
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

    def _score(self, layer: int) -> Tensor:
        probabilities = self.attentions[layer][0, :, -1].float()  # [query heads, tokens]
        if self.scorer == "vnorm":
            norms = self.cache.layers[layer].values[0].float().norm(dim=-1)  # [KV heads, tokens]
            weights = norms / norms.mean(dim=-1, keepdim=True)
            group = probabilities.shape[0] // weights.shape[0]
            probabilities = torch.stack([probabilities[h] * weights[h // group] for h in range(len(probabilities))])
        s = probabilities.mean(dim=0)
        if self.scorer == "entropy":
            entropy = -sum(float(p) * math.log(float(p)) for p in s if p > 0)
            s = s * (entropy / math.log(len(s)))
        return s

    def _pool(self) -> None:
        reach = (self.pool_width - 1) // 2
        m = self.momentum  # the list is in position order: tokens are only ever appended and removed
        self.momentum = [max(m[max(0, i - reach) : i + reach + 1]) for i in range(len(m))]

    def _evict(self, count: int) -> None:
        newest = self.seen - 1
        candidates = [
            index
            for index, position in enumerate(self.positions)
            if position >= self.protect_first and position <= newest - self.protect_recent
        ]
        candidates.sort(key=lambda index: (self.momentum[index], self.positions[index]))  # D7: the oldest goes first
        victims = set(candidates[:count])
        keep = [index for index in range(len(self.positions)) if index not in victims]
        self.positions = [self.positions[index] for index in keep]
        self.momentum = [self.momentum[index] for index in keep]
        for layer in self.cache.layers:
            layer.keys = layer.keys[:, :, keep]
            layer.values = layer.values[:, :, keep]


def _mean(values: list[float]) -> float:
    """The exact mean, rounded once to fp32, so that tokens entering one after another at an unchanged mean tie (D7)."""
    return float(torch.tensor(math.fsum(values) / len(values), dtype=torch.float32)) if values else 0.0


def decode(model: Any, prompt: list[int], steps: int, **settings: Any) -> Trace:
    """Greedy decoding of one row: the prompt, then `steps` decode steps.

    Args:
        model: a Hugging Face causal language model, in evaluation mode.
        prompt: token ids, without padding.
        steps: decode steps after the prompt's forward.
        settings: those of :class:`Reference`.
    """
    reference = Reference(model, **settings)
    logits = [reference.prompt(prompt)]
    trace = Trace([int(logits[0].argmax())], [], [], torch.empty(0), reference.budget())
    for _ in range(steps):
        logits.append(reference.step(trace.tokens[-1]))
        trace.tokens.append(int(logits[-1].argmax()))
        trace.retained.append(list(reference.positions))
        trace.momentum.append(list(reference.momentum))
    trace.logits = torch.stack(logits[1:])
    return trace
