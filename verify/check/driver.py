"""Drive a compiled Hugging Face model in a hand-written decoding loop: prompts, steps, second turns, rows of any lengths."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...cache.slot_cache import SlotCache
from ...config import Config
from ...errors import NotCompiledError
from ...huggingface.cache import InertiaCache
from ...huggingface.model import Runtime


def decided_momentum(cache: SlotCache) -> list[dict[int, float]]:
    """Return the momentum by position after a decode step, per row: of the live tokens, and of the one just evicted.

    The evicted token stands in its slot until the next step (SPEC E4), except where a first eviction has compacted.
    """
    return by_position(cache.state.positions, cache.state.momentum)


def by_position(positions: Tensor, momentum: Tensor) -> list[dict[int, float]]:
    """Turn [B, S] slots into dictionaries, one per row, without the slots that hold no token."""
    rows = zip(positions.tolist(), momentum.tolist(), strict=True)
    return [{at: value for at, value in zip(*row, strict=True) if at >= 0} for row in rows]


def runtime_of(model: Any) -> Runtime:
    """Return what :func:`inertia_fx.compile` put on a model.

    Raises:
        NotCompiledError: it is not what `compile` returned.
    """
    runtime = model.__dict__.get("_inertia") if hasattr(model, "__dict__") else None
    if not isinstance(runtime, Runtime):
        raise NotCompiledError(
            f"A {type(model).__name__} was given that inertia_fx.compile did not return: pass"
            " inertia_fx.compile(model, ...), it is the compiled model that is checked."
        )
    return runtime


class Driver:
    """Decoding loop: sequences of one compiled model, in lockstep as a batch of their own.

    Args:
        model: what :func:`inertia_fx.compile` returned.
        config: settings other than the model's.

    Attributes:
        cache: the :class:`inertia_fx.InertiaCache`.
        seen: real tokens per row so far.
        logits: [B, vocabulary] fp32 of the newest forward.
    """

    def __init__(self, model: Any, config: Config | None = None) -> None:
        self.runtime = runtime_of(model)
        self.model, self.cache = model, InertiaCache(config)
        self.arguments = inspect.signature(type(model)._inertia_base.forward).parameters
        self.seen: list[int] = []
        self.masks: list[list[int]] = []  # per row, 1 where a column is a real token
        self.logits = torch.empty(0)

    def fork(self) -> Driver:
        """Return an independent copy: same model, same past."""
        twin = copy.copy(self)
        twin.cache, twin.seen, twin.masks = copy.deepcopy(self.cache), list(self.seen), [list(m) for m in self.masks]
        return twin

    def prompt(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Prefill a first or later prompt; rows of unequal length are left-padded. Returns the last tokens' logits."""
        before = self.seen or [0] * len(rows)
        width = max(map(len, rows))
        own = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
        masks = [old + new for old, new in zip(self.masks or [[] for _ in rows], own, strict=True)]
        arguments: dict[str, Any] = {"input_ids": torch.tensor([[0] * (width - len(row)) + list(row) for row in rows])}
        if _padded(masks):
            arguments["attention_mask"] = torch.tensor(masks)
            if "position_ids" in self.arguments:
                places = torch.tensor(before)[:, None] + torch.tensor(own).cumsum(-1) - 1
                arguments["position_ids"] = places.clamp(min=0)
        if "logits_to_keep" in self.arguments:
            arguments["logits_to_keep"] = 1
        logits = self._forward(arguments)
        self.masks, self.seen = masks, [seen + len(row) for seen, row in zip(before, rows, strict=True)]
        return logits

    def step(self, tokens: Sequence[int] | None = None) -> Tensor:
        """Run one decode step, of the most likely tokens if none are given. Returns its logits.

        Positions are left to the model where no row is padded, as in a user's loop.
        """
        tokens = self.greedy if tokens is None else tokens
        arguments: dict[str, Any] = {"input_ids": torch.tensor(tokens)[:, None]}
        if _padded(self.masks) and "position_ids" in self.arguments:
            arguments["position_ids"] = torch.tensor(self.seen)[:, None]
        logits = self._forward(arguments)
        self.seen = [seen + 1 for seen in self.seen]
        for mask in self.masks:
            mask.append(1)
        return logits

    def select(self, rows: Sequence[int]) -> None:
        """Reorder the rows: row i becomes what row rows[i] was (beam search)."""
        self.cache.reorder_cache(torch.tensor(rows, device=self.model.device))
        self.seen = [self.seen[row] for row in rows]
        self.masks = [list(self.masks[row]) for row in rows]
        self.logits = self.logits[list(rows)]

    @property
    def greedy(self) -> list[int]:
        """Return each row's most likely next token."""
        return self.logits.argmax(-1).tolist()

    @property
    def retained(self) -> list[list[int]]:
        """Return the sorted true positions of the live tokens, per row."""
        return [positions.tolist() for positions in self.cache.retained_positions()]

    @property
    def momentum(self) -> list[Tensor]:
        """Return the momentum of the live tokens, per row, on the CPU."""
        return [momentum.cpu() for momentum in self.cache.momentum]

    @torch.no_grad()
    def _forward(self, arguments: dict[str, Any]) -> Tensor:
        arguments = {
            name: value.to(self.model.device) if isinstance(value, Tensor) else value
            for name, value in arguments.items()
        }
        output = self.model(**arguments, **{self.runtime.cache_name: self.cache})
        self.logits = output.logits[:, -1].float().cpu()
        return self.logits


def _padded(masks: list[list[int]]) -> bool:
    return any(0 in mask for mask in masks)
