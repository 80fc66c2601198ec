"""Put any scores through the real passes, slot cache and compiler, and compare with retention lists.

With one unit vector per true position as its key (and as its value), scale 1 and the logarithm of a score vector as the
query, attention over the live tokens *is* that score vector, renormalised over them; and the output says, per position,
how much was attended to. So any scores whatever can be put through the passes, the slot cache and the compiler:

    SyntheticDecoder    a decoder with given attention, to be compiled with backend="inertia_fx"
    SyntheticRun        drives it with a SlotCache: prompts, steps with given scores
    SyntheticReference  the same on `RetentionList`s
    DifferentialRun     both in lockstep; raises Difference where they disagree
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...cache.slot_cache import SlotCache
from ...config import Config
from ...errors import InputError
from ..check.driver import by_position
from ..check.metrics import finite, is_tie, tie
from ..retention import RetentionList
from .decoders import compile_step, require_groups

TIE = 1e-5
"""Relative difference of two momenta that fp32 rounding may turn around (they differ by a few 1e-7 in practice)."""


class Difference(AssertionError):
    """The compiled graph and the list disagree."""


class SyntheticDecoder(nn.Module):
    """Decoder of `layers` attentions with given probabilities.

    Args:
        heads, kv_heads: query heads and KV heads.
        positions: length of the longest text, D.
    """

    def __init__(self, layers: int = 1, heads: int = 1, kv_heads: int = 1, positions: int = 64) -> None:
        super().__init__()
        self.layers, self.heads, self.kv_heads, self.positions = layers, heads, kv_heads, positions

    def step(self, log_scores: Tensor, places: Tensor, norms: Tensor, cache: SlotCache) -> Tensor:
        """Run one decode step; to be compiled.

        Args:
            log_scores: [K, B, H, D] logarithms of the scores, by true position.
            places: [B] true position of the new token.
            norms: [B] norm of the new token's value (only the scorer "vnorm" reads it).

        Returns:
            [K, B, H, D]: how much every position was attended to, times its value's norm.
        """
        entry = cache.enter()
        live = entry.live[:, None, None, :]
        key = F.one_hot(places, self.positions).to(log_scores.dtype)[:, None, None, :].expand(-1, self.kv_heads, -1, -1)
        value = key * norms[:, None, None, None]
        outputs = []
        for layer in range(self.layers):
            keys, values = cache.update(key, value, layer)
            query = log_scores[layer].unsqueeze(2)
            outputs.append(
                F.scaled_dot_product_attention(query, keys, values, attn_mask=live, scale=1.0, enable_gqa=True)
            )
        cache.leave(entry)
        return torch.stack(outputs).squeeze(3)


@functools.cache
def _compiled(decoder: tuple[int, int, int, int], options: tuple[tuple[str, Any], ...]) -> Any:
    return compile_step(SyntheticDecoder(*decoder).step, **dict(options))


class SyntheticRun:
    """Run of a compiled :class:`SyntheticDecoder` over its cache.

    Args:
        config: what to keep.
        lengths: tokens of the prompt, per row (left-padded where they differ).
        backend: inner compiler.
    """

    def __init__(
        self,
        config: Config,
        lengths: Sequence[int],
        *,
        layers: int = 1,
        heads: int = 1,
        kv_heads: int = 1,
        positions: int = 64,
        backend: str = "eager",
    ) -> None:
        self.config, self.cache, self.backend = config, SlotCache(config), backend
        self.shape = (layers, heads, kv_heads, positions)
        require_groups(heads, kv_heads)
        self.seen = [0] * len(lengths)
        self.prompt(lengths)

    def prompt(self, lengths: Sequence[int]) -> None:
        """Prefill a first or later prompt of `lengths` tokens per row, each at least 1."""
        if len(lengths) != len(self.seen) or not lengths or min(lengths) < 1:
            raise InputError(f"lengths={list(lengths)}: one number of tokens per row, at least 1, is expected.")
        layers, _, kv_heads, positions = self.shape
        width = max(lengths)
        real = torch.tensor([[column >= width - length for column in range(width)] for length in lengths])
        places = (real.long().cumsum(-1) - 1 + torch.tensor(self.seen)[:, None]).clamp(min=0)
        self._require_room([before + length for before, length in zip(self.seen, lengths, strict=True)])
        key = F.one_hot(places, positions).float()[:, None].expand(-1, kv_heads, -1, -1)
        with self.cache.prompt(len(lengths), width, None if bool(real.all()) else real):
            for layer in range(layers):
                self.cache.update(key, key * _norms(places)[:, None, :, None], layer)
        self.seen = [before + length for before, length in zip(self.seen, lengths, strict=True)]

    def step(self, scores: Tensor) -> Tensor:
        """Run one decode step with these scores.

        Args:
            scores: [K, B, H, D], positive and finite, by true position; what is not cached is not read.

        Returns:
            [K, B, H, D] attention by position.
        """
        layers, heads, _, positions = self.shape
        shape = (layers, len(self.seen), heads, positions)
        if tuple(scores.shape) != shape:
            raise InputError(
                f"The scores have shape {tuple(scores.shape)}; {shape} is expected: [layers, rows, heads, positions]."
            )
        finite("the scores", scores)
        if not bool((scores > 0).all()):
            raise InputError("The scores must be positive: attention gives every live token a share.")
        self._require_room([before + 1 for before in self.seen])
        options = self.config.graph_options(score=self.cache.refreshing) | {"backend": self.backend}
        step = _compiled(self.shape, tuple(options.items()))
        places = torch.tensor(self.seen)
        with torch.no_grad(), self.cache.step(len(self.seen)):
            outputs = step(scores.log(), places, _norms(places), self.cache)
            state = self.cache.state  # before a first eviction gathers what stays
            self._decided = state.positions.clone(), state.momentum.clone()
        self.seen = [before + 1 for before in self.seen]
        return outputs

    def _require_room(self, seen: Sequence[int]) -> None:
        if max(seen) > self.shape[3]:
            raise InputError(f"A text of {max(seen)} tokens does not fit positions={self.shape[3]}: raise it.")

    @property
    def retained(self) -> list[list[int]]:
        """Return the sorted true positions of the live tokens, per row."""
        return [positions.tolist() for positions in self.cache.retained_positions()]

    @property
    def decided(self) -> list[dict[int, float]]:
        """Return the momentum by position that the newest step's choice rests on, per row: of what stays and of what leaves."""
        return by_position(*self._decided)

    @property
    def momentum(self) -> list[dict[int, float]]:
        """Return the momentum by position, per row."""
        pairs = zip(self.cache.retained_positions(), self.cache.momentum, strict=True)
        return [dict(zip(positions.tolist(), momentum.tolist(), strict=True)) for positions, momentum in pairs]


def _norms(places: Tensor) -> Tensor:
    """Norms of the values, uneven enough that the scorer "vnorm" ranks otherwise than "attention"."""
    return 1 + 0.5 * torch.sin(places.float() * 2.3)


class SyntheticReference:
    """Reference of a :class:`SyntheticRun`: the same steps, row by row on a :class:`RetentionList`, probabilities in fp64."""

    def __init__(self, config: Config, lengths: Sequence[int], *, kv_heads: int = 1) -> None:
        self.rows = [RetentionList(**vars(config)) for _ in lengths]
        self.kv_heads = kv_heads
        self.prompt(lengths)

    def prompt(self, lengths: Sequence[int]) -> None:
        """Append a first or later prompt."""
        for row, length in zip(self.rows, lengths, strict=True):
            row.add_prompt(length)

    def step(self, scores: Tensor, follow: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, list[list[int]]]:
        """Run one step as :meth:`SyntheticRun.step` does. `follow` as in `Reference.step`.

        Returns its outputs, and the positions that each row chooses to keep.
        Sets `momenta`: per row, the momentum by position that the choice rests on.
        """
        outputs = torch.zeros(scores.shape, dtype=torch.float64)
        chosen = []
        self.momenta: list[dict[int, float]] = []
        for index, row in enumerate(self.rows):
            refresh = row.add_token()
            listed = torch.tensor(row.positions)
            probabilities = torch.softmax(scores[:, index].double().log()[..., listed], dim=-1)
            norms = _norms(listed)
            outputs[:, index][..., listed] = probabilities * norms
            if refresh:
                value_norms = norms.expand(self.kv_heads, -1)
                row.refresh([row.score(layer.float(), value_norms) for layer in probabilities])
            survivors = row.survivors()
            chosen.append(survivors)
            self.momenta.append(row.by_position)
            row.retain(survivors if follow is None else follow[index])
        return outputs, chosen


class DifferentialRun:
    """Differential run: a compiled synthetic decoder and its reference, in lockstep.

    Every step compares, per row: attention per position, kept positions, momentum. Tokens whose momenta differ by less
    than rounding (but not by nothing: an exact tie is decided, D7) may be chosen either way; the lists then follow.

    Raises:
        Difference: they disagree.
    """

    def __init__(self, config: Config, lengths: Sequence[int], **shape: Any) -> None:
        self.run = SyntheticRun(config, lengths, **shape)
        self.reference = SyntheticReference(config, lengths, kv_heads=shape.get("kv_heads", 1))

    def prompt(self, lengths: Sequence[int]) -> None:
        self.run.prompt(lengths)
        self.reference.prompt(lengths)
        self._compare_momentum()

    def step(self, scores: Tensor) -> None:
        outputs = self.run.step(scores)
        retained = self.run.retained
        pooled = [row.pooled for row in self.reference.rows]
        expected, chosen = self.reference.step(scores, follow=retained)
        off = (outputs - expected).abs().amax(dim=(0, 2, 3))
        for row, (kept, survivors) in enumerate(zip(retained, chosen, strict=True)):
            if off[row] > 1e-5:
                raise Difference(f"row {row}: attention is off by {off[row]:.2g}: other tokens are attended to")
            if kept != survivors and not self._near_tie(row, kept, survivors, pooled[row]):
                raise Difference(
                    f"row {row}, step {self.reference.rows[row].step_number}: kept {kept}, expected {survivors}"
                )
        self._compare_momentum()

    def _near_tie(self, row: int, kept: list[int], survivors: list[int], pooled_before: bool) -> bool:
        momenta = self.reference.momenta[row]
        if self.run.config.pool_width > 1 and not pooled_before:
            # Pooled on the host, after `decided`: which of two equal maxima rounding told apart is not known here.
            return 0 <= tie(momenta, kept, survivors) <= TIE
        return is_tie(momenta, self.run.decided[row], kept, survivors, TIE)

    def _compare_momentum(self) -> None:
        for row, (ours, listed) in enumerate(zip(self.run.momentum, self.reference.rows, strict=True)):
            expected = listed.by_position
            if ours.keys() != expected.keys():
                raise Difference(f"row {row}: positions {sorted(ours)}, expected {sorted(expected)}")
            largest = max(map(abs, expected.values()), default=0.0)
            for position, value in ours.items():
                if not abs(value - expected[position]) <= 1e-5 * largest:
                    raise Difference(
                        f"row {row}: momentum of {position} is {value:.6g}, expected {expected[position]:.6g}"
                    )
