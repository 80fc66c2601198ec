"""Test the contract of docs/SPEC.md on a model of yours, with pytest.

    from inertia_fx.verify.testing import DecoderContract

    class TestMine(DecoderContract):
        model = MyModel.from_pretrained("...").eval()      # or a staticmethod that makes it

In a pytest suite this runs every test below on `TestMine.model`. Tests that compare with the reference fail with the
clauses of docs/SPEC.md that do not hold. Needs ``pip install "inertia_fx[verify]"``.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from ... import debug
from ...errors import UndoError
from ..check.driver import Driver, decided_momentum
from ..check.metrics import NEVER, is_tie
from ..reference import Reference
from .harness import DecoderHarness

SCHEDULES: dict[str, int | None] = {"full": 1, "lazy4": 4, "lazy3": 3, "score_free": None}
VARIANTS: dict[str, dict[str, Any]] = {
    "vnorm": {"scorer": "vnorm"},
    "entropy": {"scorer": "entropy"},
    "cumulative": {"aggregator": "cumulative"},
    "single_step": {"aggregator": "single_step"},
    "time_and_layer": {"alpha_time": 0.9, "alpha_layer": 0.95},
}


class DecoderContract(DecoderHarness):
    """Contract of a compiled decoder: subclass it, name the class ``Test...``, and set `model`.

    The other attributes that a class may set are those of :class:`.harness.DecoderHarness`.
    """

    # ------------------------------------------------------------------ against the reference

    @pytest.mark.parametrize("schedule", SCHEDULES)
    def test_agrees_with_the_reference(self, schedule: str) -> None:
        """Same kept positions, momentum, outputs, storage, budget: full refresh, Lazy, Score-Free; padded rows."""
        self.report(refresh_every=SCHEDULES[schedule])

    def test_a_single_row_agrees_with_the_reference(self) -> None:
        """Without padding, and so without positions from the caller: the model's own must be the true ones (D9)."""
        self.report(self.rows()[:1])

    def test_the_first_eviction_may_wait(self) -> None:
        """D18, D19."""
        self.report(evict_after=4, pool_width=3)
        self.report(evict_after=4, refresh_every=None)

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_other_rules_agree_with_the_reference(self, variant: str) -> None:
        """D11, D20, D21, `alpha_time` and `alpha_layer`."""
        self.report(**VARIANTS[variant])

    def test_protected_tokens_stay(self) -> None:
        """`protect_first`, `protect_recent` (D3)."""
        report = self.report(protect_first=1, protect_recent=2)
        for row in report.rows:
            for number, kept in enumerate(row.retained, row.prompt_tokens):
                assert {0, number - 1, number} <= set(kept)

    @pytest.mark.parametrize("length", [1, 2, 3, 12])
    def test_short_prompts(self, length: int) -> None:
        """A row that holds fewer tokens than its budget fills up first (D6)."""
        self.report(self.rows([length]))

    def test_the_ratio_is_the_decimal_that_was_written(self) -> None:
        """0.9 of 50 tokens evicted leaves 5, of 100 leaves 10, whatever 1 - 0.9 is in floating point (D5)."""
        report = self.report(self.rows([50, 100]), ratio=0.9, min_budget=1, protect_first=0, protect_recent=0)
        assert [len(row.retained[-1]) for row in report.rows] == [5, 10]
        assert [row.budget for row in report.rows] == [5, 10]

    def test_a_budget_never_reached_is_the_uncompressed_model(self) -> None:
        """Invariant 6."""
        for row in self.report(budget=NEVER).rows:
            assert max(row.output_error) < 10 * self.tolerance.logits
            assert row.first_divergence is None or self.original.dtype.itemsize < 4
            assert row.retained[-1] == list(range(row.prompt_tokens + self.steps))

    def test_a_second_turn_agrees_with_the_reference(self) -> None:
        """A later prompt attends to what is left, raises the budget and starts the count of steps again (D12, D13)."""
        settings = {"refresh_every": 3, "evict_after": 2}
        config = self.config(**settings)
        driver = Driver(self.compiled, config)
        reference = Reference(self.original, **vars(config))
        seen: list[Any] = []
        reference.observe = seen.append
        for turn, length in enumerate((30, 11, 17)):
            row = self.rows([length], seed=turn)[0]
            driver.prompt([row])
            reference.prompt(row)
            for step in range(self.steps):
                token = driver.greedy[0]
                driver.step()
                (kept,) = driver.retained
                reference.step(token, follow=kept)
                momenta = seen[-1].momentum, decided_momentum(driver.cache)[0]
                near = kept == reference.chosen or is_tie(*momenta, kept, reference.chosen, self.tolerance.tie)
                assert near, f"turn {turn + 1}, step {step + 1}: kept {kept}, expected {reference.chosen}"
            assert driver.cache.budget == [reference.budget()]
            assert driver.cache.get_seq_length() == reference.seen

    # ------------------------------------------------------------------ identities

    def test_score_free_is_lazy_without_end(self) -> None:
        """Invariant 4."""
        assert self.run(self.rows(), refresh_every=None) == self.run(self.rows(), refresh_every=self.steps + 1)

    def test_generate_is_the_loop(self) -> None:
        """`model.generate` gives the tokens of a hand-written loop."""
        rows = self.rows()[:1]
        loop = [tokens[0] for tokens, _ in self.run(rows)]
        driver = Driver(self.compiled, self.config())
        name = self.compiled._inertia.cache_name
        # Greedy to the end, whatever else the model's own generation settings ask for.
        greedy = GenerationConfig(max_new_tokens=self.steps, do_sample=False, pad_token_id=0)
        ids = torch.tensor(rows, device=self.original.device)
        held, self.compiled.generation_config = self.compiled.generation_config, greedy
        try:
            generated = self.compiled.generate(ids, generation_config=greedy, **{name: driver.cache})
        finally:
            self.compiled.generation_config = held
        assert generated[0, len(rows[0]) :].tolist() == loop

    # ------------------------------------------------------------------ rows and sequences

    def test_rows_do_not_see_each_other(self) -> None:
        """A padded row is the row alone; permuting rows permutes what they do (invariant 11, D10)."""
        self.need_float32()
        rows = self.rows()
        together = self.run(rows)
        for index, row in enumerate(rows):
            alone = self.run([row])
            assert [(tokens[index], kept[index]) for tokens, kept in together] == [(t[0], k[0]) for t, k in alone]
        turned = self.run(rows[::-1])
        assert [(tokens[::-1], kept[::-1]) for tokens, kept in turned] == together

    def test_sequences_do_not_see_each_other(self) -> None:
        """Two caches on one compiled model, in turns (invariant 12)."""
        first, second = self.rows()[:1], self.rows(seed=7)[:1]
        drivers = [Driver(self.compiled, self.config()) for _ in range(2)]
        for driver, rows in zip(drivers, (first, second), strict=True):
            driver.prompt(rows)
        seen: list[list[Any]] = [[], []]
        for _ in range(self.steps):
            for driver, log in zip(drivers, seen, strict=True):
                log += self.go_on(driver, 1)
        assert seen == [self.run(first), self.run(second)]

    def test_reordered_rows_carry_everything(self) -> None:
        """Beam search: K/V, momentum, positions and counts move together."""
        self.need_float32()
        rows = self.rows()
        driver = Driver(self.compiled, self.config())
        driver.prompt(rows)
        order = list(range(len(rows)))[::-1]
        before = self.go_on(driver, self.steps // 2)
        driver.select(order)
        after = self.go_on(driver, self.steps - len(before))
        whole = self.run(rows)
        assert before == whole[: len(before)]
        turned = [
            ([tokens[row] for row in order], [kept[row] for row in order]) for tokens, kept in whole[len(before) :]
        ]
        assert after == turned

    # ------------------------------------------------------------------ the cache's life

    def test_a_saved_cache_goes_on(self) -> None:
        """`torch.save` and `torch.load` of a cache, and a deep copy of it."""
        driver = Driver(self.compiled, self.config(evict_after=2, refresh_every=3))  # so that the step's number matters
        driver.prompt(self.rows())
        self.go_on(driver, 2)
        file = io.BytesIO()
        torch.save(driver.cache, file)
        file.seek(0)
        loaded, copied = driver.fork(), driver.fork()
        loaded.cache = torch.load(file, weights_only=False)
        copied.cache = copy.deepcopy(driver.cache)
        expected = self.go_on(driver, self.steps)
        assert self.go_on(loaded, self.steps) == expected
        assert self.go_on(copied, self.steps) == expected

    def test_a_reset_cache_is_a_new_one(self) -> None:
        """After a longer and a wider use; nothing is left over."""
        driver = Driver(self.compiled, self.config())
        driver.prompt(self.rows())
        self.go_on(driver, 3)
        driver.cache.reset()
        fresh = Driver(self.compiled)
        fresh.cache = driver.cache
        rows = self.rows(seed=3)[:1]
        fresh.prompt(rows)
        assert self.go_on(fresh, self.steps) == self.run(rows)

    def test_a_step_that_fails_changes_nothing(self) -> None:
        """An exception after the graph has run (out of memory, an interrupt): the step can be taken again."""
        rows = self.rows()
        driver = Driver(self.compiled, self.config())
        driver.prompt(rows)
        before = self.go_on(driver, 2)
        kept, momentum = driver.retained, driver.momentum
        runtime = self.compiled._inertia
        real = runtime.step

        def failing(*args: Any) -> Any:
            def step(*given: Any) -> Any:
                real(*args)(*given)
                raise KeyboardInterrupt

            return step

        runtime.step = failing
        try:
            with pytest.raises(KeyboardInterrupt):
                driver.step()
        finally:
            del runtime.step
        assert driver.retained == kept
        assert all(torch.equal(a, b) for a, b in zip(driver.momentum, momentum, strict=True))
        assert before + self.go_on(driver, self.steps - 2) == self.run(rows)

    def test_storage_is_the_budget_and_one_slot(self) -> None:
        """In bytes that are held, from the first eviction on (invariant 1)."""
        driver = Driver(self.compiled, self.config(evict_after=1))
        driver.prompt(self.rows([60]))
        if driver.cache.budget[0] >= 60:
            pytest.skip("the class's budget holds the whole prompt")
        prompt = driver.cache.nbytes
        for _ in range(self.steps):
            driver.step()
            slots = driver.cache.budget[0] + 1
            assert driver.cache.nbytes * 60 == prompt * slots

    def test_undoing_is_refused(self) -> None:
        """D15."""
        driver = Driver(self.compiled, self.config())
        driver.prompt(self.rows()[:1])
        driver.step()
        kept = driver.retained
        with pytest.raises(UndoError):
            driver.cache.crop(1)
        assert driver.retained == kept

    def test_one_graph_serves_every_length(self) -> None:
        """No recompiles for other prompt lengths, budgets, ratios or step numbers."""
        self.run(self.rows([31]), 3)
        with debug.record() as compiled:
            for length, ratio in itertools.product((7, 45, 90), (0.5, 0.9)):
                self.run(self.rows([length]), 3, ratio=ratio)
        assert not compiled, f"{len(compiled)} graphs were compiled anew"

    def test_momentum_is_finite_and_of_live_tokens(self) -> None:
        """One finite fp32 number per kept token (D8)."""
        driver = Driver(self.compiled, self.config())
        driver.prompt(self.rows())
        for _ in range(self.steps):
            driver.step()
            for kept, momentum in zip(driver.retained, driver.momentum, strict=True):
                assert momentum.dtype == torch.float32
                assert len(kept) == len(momentum)
                assert all(math.isfinite(value) and value >= 0 for value in momentum.tolist())
