"""Decode by the letter of SPEC.md over a growing list of tokens, in eager torch, slow and obvious.

One row at a time, one growing list of cached tokens, nothing bounded, nothing compiled. It shares no code with the
passes, the kernels or the slot cache; its attention is the model's own eager attention, whose probabilities the model
hands out. What the compiled graph retains must equal what this retains, at every step.

    retention.py    the eviction rule on two Python lists, positions and momentum
    Reference       a Hugging Face model around them
    decode()        a prompt and greedy steps of it, recorded
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from ..errors import UnsupportedModelError
from .retention import RetentionList


@dataclasses.dataclass
class Observation:
    """Observation of one decode step before its eviction: everything that the eviction rests on.

    Attributes:
        momentum: of the L tokens attended to, by position, the new one last: after the update, before the eviction.
        scores: [K, L] fp32, the pooled score of every layer, also on a step that does not refresh.
        attention: [K, H, L] fp32 probabilities.
        value_norms: [K, N, L] fp32.
    """

    momentum: dict[int, float]
    scores: Tensor
    attention: Tensor
    value_norms: Tensor


class Reference:
    """Reference decoder of SPEC.md for one row of a Hugging Face model.

    Args:
        model: the original model. It is left alone: decode steps run on a copy with eager attention that shares its
            weights, prompts on the model itself.
        settings: those of :class:`RetentionList`.
        observe: called with an :class:`Observation` in every decode step.

    Attributes:
        chosen: positions that stay after the newest step by the rule, whatever `step` was told to follow.
    """

    def __init__(self, model: Any, *, observe: Callable[[Observation], None] | None = None, **settings: Any) -> None:
        self.model, self.eager = model, _eager_twin(model)
        self.row = RetentionList(**settings)
        self.observe = observe
        self.chosen: list[int] = []
        self.cache: Any = DynamicCache(config=self.model.config)  # its layers are typed as without keys
        self.arguments = inspect.signature(self.model.forward).parameters
        self.cache_name = "cache" if "cache" in self.arguments else "past_key_values"

    @property
    def positions(self) -> list[int]:
        """Return the true positions of the cached tokens, in order."""
        return self.row.positions

    @property
    def momentum(self) -> list[float]:
        """Return the momentum of the cached tokens."""
        return self.row.momentum

    @property
    def seen(self) -> int:
        """Return the number of tokens of the text so far."""
        return self.row.seen

    def budget(self) -> int:
        """Return the number of tokens that survive each step."""
        return self.row.budget()

    def fork(self) -> Reference:
        """Return an independent sequence with the same past (beam search), over the same model."""
        twin = copy.copy(self)
        twin.row, twin.cache = copy.deepcopy(self.row), copy.deepcopy(self.cache)
        return twin

    @torch.no_grad()
    def prompt(self, token_ids: list[int]) -> Tensor:
        """Prefill a first or later prompt (D13). Returns the last token's logits."""
        logits = self._forward(self.model, token_ids).logits[0, -1]
        self.row.add_prompt(len(token_ids))
        return logits

    @torch.no_grad()
    def step(self, token_id: int, follow: Sequence[int] | None = None) -> Tensor:
        """Run one decode step. Returns its logits.

        Args:
            follow: positions to keep instead of `chosen`: what the decoder under test kept, so that a tie which its
                rounding broke does not make every later step incomparable.
        """
        output = self._forward(self.eager, [token_id])
        refresh = self.row.add_token()
        if refresh or self.observe is not None:
            self._require_attentions(output)
            attention = [layer[0, :, -1].float().cpu() for layer in output.attentions]  # each [query heads, tokens]
            norms = [layer.values[0].float().norm(dim=-1).cpu() for layer in self.cache.layers]
            scores = [self.row.score(a, n) for a, n in zip(attention, norms, strict=True)]
            if refresh:
                self.row.refresh(scores)
            if self.observe is not None:
                seen = torch.stack(scores), torch.stack(attention), torch.stack(norms)
                self.observe(Observation(self.row.by_position, *seen))
        self.chosen = self.row.survivors()
        keep = self.row.retain(self.chosen if follow is None else follow)
        for layer in self.cache.layers:
            if len(keep) < layer.keys.shape[2]:
                layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        return output.logits[0, -1]

    def _require_attentions(self, output: Any) -> None:
        attentions = getattr(output, "attentions", None) or ()
        if len(attentions) != len(self.cache.layers) or any(layer is None for layer in attentions):
            raise UnsupportedModelError(
                f"{type(self.model).__name__} returned {len(attentions)} attention tensors for {len(self.cache.layers)} cached"
                " layers when asked for output_attentions=True with eager attention. The reference reads them: let the"
                " attention modules return their probabilities then, as transformers' own models do."
            )

    def _forward(self, model: Any, token_ids: list[int]) -> Any:
        length, cached = len(token_ids), len(self.row.positions)
        device, dtype = model.device, model.dtype
        positions = torch.arange(self.row.seen, self.row.seen + length, device=device)[None]
        optional = {"position_ids": positions, "logits_to_keep": 1}
        causal = torch.ones(length, cached + length, dtype=torch.bool, device=device).tril(cached)
        mask = torch.zeros(length, cached + length, dtype=dtype, device=device)
        return model(
            torch.tensor([token_ids], device=device),
            attention_mask=mask.masked_fill(~causal, torch.finfo(dtype).min)[None, None],
            output_attentions=model is self.eager,
            use_cache=True,
            **{name: value for name, value in optional.items() if name in self.arguments},
            **{self.cache_name: self.cache},
        )


def _eager_twin(model: Any) -> Any:
    """Modules and configuration of its own, so that eager attention can be set; the same weights and buffers."""
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    twin.set_attn_implementation("eager")
    return twin


@dataclasses.dataclass
class DecodeRecord:
    """Record of one row's decoding.

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


def decode(model: Any, prompt: list[int], steps: int, **settings: Any) -> DecodeRecord:
    """Decode one row greedily: the prompt, then `steps` decode steps.

    Args:
        model: a Hugging Face causal language model, in evaluation mode.
        prompt: token ids, without padding.
        steps: decode steps after the prompt's forward.
        settings: those of :class:`Reference`.
    """
    reference = Reference(model, **settings)
    logits = [reference.prompt(prompt)]
    record = DecodeRecord([int(logits[0].argmax())], [], [], torch.empty(0), reference.budget())
    for _ in range(steps):
        logits.append(reference.step(record.tokens[-1]))
        record.tokens.append(int(logits[-1].argmax()))
        record.retained.append(list(reference.positions))
        record.momentum.append(list(reference.momentum))
    record.logits = torch.stack(logits[1:])
    return record
