"""Drive InertiaCache and a compiled tiny model through any course of events, beside growing Python lists.

Every sequence of the machine is a batch with a cache of its own; all share one compiled model. Its model is one
`verify.reference.Reference` per row: two growing lists and the original model.
"""

from __future__ import annotations

import dataclasses
import functools
import io
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)

import inertia_fx
from inertia_fx import Config, errors
from inertia_fx.verify.check.driver import Driver, decided_momentum
from inertia_fx.verify.check.metrics import is_tie
from inertia_fx.verify.reference import Observation, Reference
from inertia_fx.verify.retention import RetentionList
from tests.common import models

LONGEST = 300
"""Text length at which a sequence is let go, so that prompts stay cheap."""

lengths = st.lists(st.integers(1, 12), min_size=1, max_size=3)
steps_taken = 0
"""Decode steps of all machines so far, counted per row."""


@functools.cache
def compiled() -> Any:
    return inertia_fx.compile(models.cached_llama(2, 4, 2), backend="eager")


@functools.cache
def template() -> Reference:
    return Reference(models.cached_llama(2, 4, 2))


@dataclasses.dataclass
class Batch:
    """The compiled model's side, and the lists'."""

    driver: Driver
    rows: list[Reference]
    logits: list[torch.Tensor]


class CacheMachine(RuleBasedStateMachine):
    batches = Bundle("batches")

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[Batch] = []
        self.prompts = 0

    @initialize(
        budget=st.one_of(st.integers(1, 20), st.sampled_from(("0.3", "0.6", "0.9"))),
        refresh_every=st.sampled_from((1, 1, 2, 4, None)),
        evict_after=st.sampled_from((1, 1, 2, 5)),
        pool_width=st.sampled_from((1, 1, 3)),
        protect=st.sampled_from(((0, 0), (0, 0), (1, 1))),
        rule=st.sampled_from(({}, {}, {}, {"alpha_time": 0.9, "alpha_layer": 0.5, "scorer": "vnorm"})),
    )
    def settings_are_chosen(self, budget: Any, protect: tuple[int, int], rule: dict[str, Any], **chosen: Any) -> None:
        kept = {"budget": budget} if isinstance(budget, int) else {"ratio": budget, "min_budget": 2}
        self.settings = kept | chosen | rule
        if budget != 1:
            self.settings |= {"protect_first": protect[0], "protect_recent": protect[1]}

    # ------------------------------------------------------------------ what users do

    @rule(target=batches, lengths=lengths)
    def first_prompt(self, lengths: list[int]) -> Batch:
        rows = self._lists(len(lengths))
        batch = Batch(Driver(compiled(), Config(**self.settings)), rows, [])
        self._prompt(batch, lengths)
        self.alive.append(batch)
        return batch

    @rule(batch=batches, count=st.integers(20, 60))
    def decode_many(self, batch: Batch, count: int) -> None:
        self.decode(batch, count)

    @rule(batch=batches, count=st.integers(1, 6))
    def decode(self, batch: Batch, count: int) -> None:
        global steps_taken
        for _ in range(count):
            if max(batch.driver.seen) >= LONGEST:
                return
            tokens = batch.driver.greedy
            logits = batch.driver.step(tokens)
            steps_taken += len(batch.rows)
            sides = zip(batch.rows, tokens, batch.driver.retained, decided_momentum(batch.driver.cache), strict=True)
            for index, (row, token, kept, own) in enumerate(sides):
                seen: list[Observation] = []
                row.observe = seen.append
                batch.logits[index] = row.step(token, follow=kept)
                near = kept == row.chosen or is_tie(seen[0].momentum, own, kept, row.chosen, 1e-5)
                assert near, f"row {index}: kept {kept}, due {row.chosen}"
                torch.testing.assert_close(logits[index], batch.logits[index], rtol=1e-3, atol=1e-3)

    @rule(batch=batches, lengths=st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def later_prompt(self, batch: Batch, lengths: list[int]) -> None:
        # One token for every row would be a decode step.
        lengths = lengths[: len(batch.rows)]
        if max(batch.driver.seen) < LONGEST and max(lengths) > 1:
            self._prompt(batch, lengths)

    @rule(batch=batches, lengths=lengths)
    def reset(self, batch: Batch, lengths: list[int]) -> None:
        batch.driver.cache.reset()
        assert batch.driver.cache.nbytes == 0
        batch.driver.seen, batch.driver.masks = [], []
        batch.rows = self._lists(len(lengths))
        self._prompt(batch, lengths)

    @rule(batch=batches, order=st.lists(st.integers(0, 2), min_size=1, max_size=3))
    def select_rows(self, batch: Batch, order: list[int]) -> None:
        """Beams reordered, doubled, dropped."""
        order = [row % len(batch.rows) for row in order]
        batch.driver.select(order)
        batch.rows = [batch.rows[row].fork() for row in order]
        batch.logits = [batch.logits[row] for row in order]

    @rule(batch=batches)
    def repeat_rows(self, batch: Batch) -> None:
        if len(batch.rows) == 1:
            batch.driver.cache.batch_repeat_interleave(2)
            driver = batch.driver
            driver.seen, driver.masks = driver.seen * 2, [*driver.masks, list(driver.masks[0])]
            driver.logits = driver.logits.repeat(2, 1)
            batch.rows, batch.logits = [batch.rows[0], batch.rows[0].fork()], batch.logits * 2

    @rule(target=batches, batch=batches)
    def branch(self, batch: Batch) -> Batch:
        """Deep copy: from here on two sequences with one past."""
        twin = Batch(batch.driver.fork(), [row.fork() for row in batch.rows], list(batch.logits))
        self.alive.append(twin)
        return twin

    @rule(batch=batches)
    def save_and_load(self, batch: Batch) -> None:
        file = io.BytesIO()
        torch.save(batch.driver.cache, file)
        file.seek(0)
        batch.driver.cache = torch.load(file, weights_only=False)

    @rule(batch=consumes(batches))
    def drop(self, batch: Batch) -> None:
        self.alive.remove(batch)

    # ------------------------------------------------------------------ what goes wrong

    @rule(batch=batches, late=st.booleans())
    def step_fails(self, batch: Batch, late: bool) -> None:
        """An exception before or after the compiled graph has run."""
        if max(batch.driver.seen) >= LONGEST:
            return
        runtime = compiled()._inertia
        real = runtime.step

        def failing(*which: Any) -> Any:
            def step(*given: Any) -> Any:
                if late:
                    real(*which)(*given)
                raise MemoryError

            return step

        runtime.step = failing
        logits = batch.driver.logits
        try:
            with pytest.raises(MemoryError):
                batch.driver.step()
        finally:
            del runtime.step
        assert batch.driver.logits is logits

    @rule(batch=batches, layer=st.integers(0, 1))
    def prompt_fails(self, batch: Batch, layer: int) -> None:
        """An exception in the middle of a prompt, after some layers have cached."""
        block = compiled().model.layers[layer].self_attn
        handle = block.register_forward_hook(_raise)
        try:
            with pytest.raises(MemoryError):
                batch.driver.prompt([[1, 2, 3]] * len(batch.rows))
        finally:
            handle.remove()

    @rule(batch=batches)
    def refused(self, batch: Batch) -> None:
        cache = batch.driver.cache
        with pytest.raises(errors.UndoError):
            cache.crop(1)
        with pytest.raises(errors.CacheError), torch.no_grad():
            compiled()(torch.ones(len(batch.rows) + 1, 2, dtype=torch.int64), past_key_values=cache)
        tokens = torch.ones(len(batch.rows), 1, dtype=torch.int64)
        with pytest.raises(errors.OutputError), torch.no_grad():
            compiled()(tokens, past_key_values=cache, output_attentions=True)

    # ------------------------------------------------------------------ what must hold

    @invariant()
    def every_sequence_is_its_lists(self) -> None:
        """All of them, also those that the last rule did not touch."""
        for batch in self.alive:
            cache = batch.driver.cache
            assert cache.rows == len(batch.rows)
            assert cache.budget == [row.budget() for row in batch.rows]
            retained, momentum = batch.driver.retained, batch.driver.momentum
            for index, row in enumerate(batch.rows):
                assert retained[index] == row.positions
                torch.testing.assert_close(momentum[index], torch.tensor(row.momentum), rtol=1e-4, atol=1e-6)
            layer = cache.layers[0]
            assert cache.nbytes == 2 * 2 * layer.keys.numel() * layer.keys.element_size()
            evicting = all(row.row.step_number >= row.row.evict_after for row in batch.rows)
            if evicting and all(len(row.positions) == row.budget() for row in batch.rows):
                assert cache.slots == max(cache.budget) + 1  # also once the longest row is gone

    def _lists(self, count: int) -> list[Reference]:
        rows = [template().fork() for _ in range(count)]
        for row in rows:
            row.row = RetentionList(**self.settings)
        return rows

    def _prompt(self, batch: Batch, lengths: list[int]) -> None:
        tokens = [models.prompt(length, seed=self.prompts * 7 + row) for row, length in enumerate(lengths)]
        self.prompts += 1
        logits = batch.driver.prompt(tokens)
        batch.logits = [row.prompt(ids) for row, ids in zip(batch.rows, tokens, strict=True)]
        torch.testing.assert_close(logits, torch.stack(batch.logits), rtol=1e-3, atol=1e-3)


def _raise(*args: Any) -> None:
    raise MemoryError
