"""Host counting of a slot cache: tokens and slots per row, in plain Python ints.

How many tokens a row holds is known without looking at the device (one enters per decode step, at most one leaves), so
everything that is counted is counted here and a step never waits for the device. *Which* tokens a row holds is known to
the device only, see `storage`.

A :class:`Ledger` is immutable: each event returns the next one and, where storage has to follow, what it has to do. To
keep or to take back every count is therefore one assignment.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from ..config import Config

GROWTH = 64
"""Slots added at once, at least, to a row that has not reached its budget yet."""


class Phase(enum.Enum):
    """What the buffers of a cache hold."""

    EMPTY = "empty"
    """Nothing."""

    PREFILL = "prefill"
    """Columns: keys and values as the prompt's forwards left them, one column per token, padding included."""

    DECODE = "decode"
    """Slots: every decode step overwrites one; slot order is not position order."""


@dataclasses.dataclass(frozen=True)
class Extension:
    """More slots for every row.

    Attributes:
        room: slots to add.
        limits: per row, the slots below which may be filled; those from there on are closed.
        full: per row, whether its next token goes into the first of the new slots.
    """

    room: int
    limits: tuple[int, ...]
    full: tuple[bool, ...]


@dataclasses.dataclass(frozen=True)
class Compaction:
    """The first eviction: every row keeps its top tokens, in new buffers.

    Attributes:
        keep: per row, tokens that stay.
        limits: per row, the slots below which may be filled; those from there on are closed.
        capacity: slots of the new buffers.
    """

    keep: tuple[int, ...]
    limits: tuple[int, ...]
    capacity: int


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What follows from a decode step whose graph has run, for storage to do in this order.

    Attributes:
        ledger: the counts once it is done.
        pooled: per row, whether it evicts for the first time and its momentum is pooled before (SPEC D19).
        compaction: the first eviction, on step `evict_after`.
        extension: more slots, where a row is full but below its budget.
    """

    ledger: Ledger
    pooled: tuple[bool, ...] | None
    compaction: Compaction | None
    extension: Extension | None


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Counts of a batch of sequences between two forwards.

    Attributes:
        phase: what the buffers hold.
        seen: tokens per row, padding columns included, evicted tokens too (SPEC D9).
        steps: decode steps since the last prompt (SPEC D12, D13).
        capacity: length of every layer's buffers, in columns or slots.
        prompt: per row, real tokens of its prompts, of which the budget is a fraction.
        live: per row, tokens that are in the cache.
        open: per row, slots that hold a token or may be filled (0 while the buffers hold columns).
        evicting: per row, whether it has evicted since the last prompt.
    """

    phase: Phase = Phase.EMPTY
    seen: int = 0
    steps: int = 0
    capacity: int = 0
    prompt: tuple[int, ...] = ()
    live: tuple[int, ...] = ()
    open: tuple[int, ...] = ()
    evicting: tuple[bool, ...] = ()

    @property
    def rows(self) -> int:
        """Number of sequences, 0 while the cache is empty."""
        return len(self.prompt)

    @property
    def is_dense(self) -> bool:
        """Whether every column of every row holds a token."""
        return all(live == self.capacity for live in self.live)

    @property
    def is_uniform(self) -> bool:
        """Whether all rows count alike, so that exchanging them changes nothing here."""
        return all(len(set(counts)) <= 1 for counts in (self.prompt, self.live, self.open, self.evicting))

    def budgets(self, config: Config) -> tuple[int, ...]:
        """Tokens that survive each decode step, per row (SPEC D5, D6)."""
        return tuple(config.budget_of(tokens) for tokens in self.prompt)

    # ------------------------------------------------------------------ prompts

    def to_columns(self) -> Ledger:
        """Turn slots back into columns, which a later prompt joins: each row's live tokens, short rows closed at the end."""
        return dataclasses.replace(self, phase=Phase.PREFILL, capacity=max(self.live), open=(0,) * self.rows)

    def add_prompt(self, tokens: int, real: Sequence[int]) -> Ledger:
        """Count a prompt; decode steps are counted from 1 again (SPEC D13).

        Args:
            tokens: columns of the prompt, padding included.
            real: real tokens among them, per row.
        """
        none = (0,) * len(real)
        return dataclasses.replace(
            self,
            phase=Phase.PREFILL,
            seen=self.seen + tokens,
            steps=0,
            capacity=self.capacity + tokens,
            prompt=_sums(self.prompt or none, real),
            live=_sums(self.live or none, real),
            open=none,
            evicting=(False,) * len(real),
        )

    # ------------------------------------------------------------------ decode steps

    def to_slots(self, config: Config) -> tuple[Ledger, Extension]:
        """Turn columns into slots, with room for the steps up to the first eviction (SPEC D18)."""
        room = config.evict_after
        capacity = self.capacity + room
        ledger = dataclasses.replace(
            self, phase=Phase.DECODE, capacity=capacity, open=tuple(live + room for live in self.live)
        )
        return ledger, Extension(room, (capacity,) * self.rows, (True,) * self.rows)

    def add_step(self, config: Config) -> StepResult:
        """Count a decode step: one token more per row; from step `evict_after` on, no more than the budget stay."""
        steps = self.steps + 1
        budgets = self.budgets(config)
        live = tuple(count + 1 for count in self.live)
        evicts = tuple(
            steps >= config.evict_after and count > budget for count, budget in zip(live, budgets, strict=True)
        )
        first = tuple(now and not before for now, before in zip(evicts, self.evicting, strict=True))
        ledger = dataclasses.replace(
            self,
            seen=self.seen + 1,
            steps=steps,
            live=tuple(budget if now else count for now, count, budget in zip(evicts, live, budgets, strict=True)),
            evicting=tuple(now or before for now, before in zip(evicts, self.evicting, strict=True)),
        )
        compaction = extension = None
        if steps == config.evict_after:
            ledger, compaction = ledger._compact(budgets)
        if steps >= config.evict_after:
            ledger, extension = ledger._grow(budgets)
        return StepResult(ledger, first if any(first) and config.pool_width > 1 else None, compaction, extension)

    def _compact(self, budgets: tuple[int, ...]) -> tuple[Ledger, Compaction]:
        # Rows that are still filling up get what they hold and the next bucket, not all of a budget they may never use.
        bucket = -(-(max(self.live) + 1) // GROWTH) * GROWTH
        capacity = min(max(budgets) + 1, bucket)
        limits = tuple(min(budget + 1, capacity) for budget in budgets)
        ledger = dataclasses.replace(self, capacity=capacity, open=limits)
        return ledger, Compaction(self.live, limits, capacity)

    def _grow(self, budgets: tuple[int, ...]) -> tuple[Ledger, Extension | None]:
        """More slots where a row is full but below its budget, so that every row always has one that may be filled."""
        limits = tuple(budget + 1 for budget in budgets)
        full = tuple(live == opened < limit for live, opened, limit in zip(self.live, self.open, limits, strict=True))
        if not any(full):
            return self, None
        room = min(max(GROWTH, self.capacity // 8), max(limits) - self.capacity)
        capacity = self.capacity + room
        # A row never opens more than its budget + 1 slots, however many the longest row needs.
        opened = tuple(min(capacity, limit) for limit in limits)
        return dataclasses.replace(self, capacity=capacity, open=opened), Extension(room, opened, full)

    # ------------------------------------------------------------------ rows

    def select(self, rows: Sequence[int]) -> Ledger:
        """Make row i what row rows[i] was."""
        return dataclasses.replace(
            self,
            prompt=tuple(self.prompt[row] for row in rows),
            live=tuple(self.live[row] for row in rows),
            open=tuple(self.open[row] for row in rows),
            evicting=tuple(self.evicting[row] for row in rows),
        )

    def trim(self, config: Config) -> Ledger:
        """Let go of the slots that no row may fill any more, once a row that needed more than the others is gone."""
        if self.phase is not Phase.DECODE or self.steps < config.evict_after:
            return self
        return dataclasses.replace(self, capacity=min(self.capacity, max(self.open)))


def _sums(counts: Sequence[int], more: Sequence[int]) -> tuple[int, ...]:
    return tuple(count + new for count, new in zip(counts, more, strict=True))
