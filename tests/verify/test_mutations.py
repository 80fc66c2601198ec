"""Planted faults: each must make a named check fail that passes without it. A fault that no check sees is a missing check.

The checks are those that users have: clauses of `inertia_fx.verify.check`, tests of `DecoderContract`, the synthetic
decoder beside its reference, and the propositions. Faults are planted by monkeypatching, before the model is compiled.
"""

from __future__ import annotations

import functools
import itertools
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch._dynamo.exc import BackendCompilerFailed

import inertia_fx
from inertia_fx import Config, verify
from inertia_fx.errors import UnsupportedAttentionError
from inertia_fx.passes import prove_attention
from inertia_fx.verify.testing import DecoderContract, strategies, synthetic
from inertia_fx.verify.testing.synthetic import DifferentialRun
from tests.common import cache_machine, faults, models, propositions
from tests.common.propositions import Process

pytestmark = pytest.mark.exhaustive

Patch = pytest.MonkeyPatch
Check = Callable[[], None]

# ---------------------------------------------------------------------- the checks, by name


@functools.cache
def original() -> Any:
    """One layer, which is the quickest to trace; what takes several is the synthetic decoder's part."""
    return models.llama(1, 4, 2)


def report_of(lengths: tuple[int, ...], settings: tuple[tuple[str, Any], ...]) -> verify.Report:
    model = inertia_fx.compile(original(), backend="eager")
    rows = [models.prompt(length, seed) for seed, length in enumerate(lengths)]
    return verify.check(model, rows, steps=8, **dict(settings))


report_without_a_fault = functools.cache(report_of)
planted = False


def clause(name: str, **settings: Any) -> Check:
    """A clause of `verify.check`, on a padded batch (or on `lengths`) of a tiny Llama."""
    lengths = settings.pop("lengths", (40, 23))

    def run() -> None:
        given = {"ratio": 0.7, "min_budget": 5} | settings
        report = (report_of if planted else report_without_a_fault)(lengths, tuple(given.items()))
        (finding,) = [finding for finding in report.findings if finding.name == name]
        assert finding.passed is not False, finding.detail

    return run


def contract(test: str, *arguments: Any) -> Check:
    """A test of the contract that users subclass."""

    def run() -> None:
        class Mine(DecoderContract):
            model = original()
            steps = 8

        getattr(Mine(), test)(*arguments)

    return run


def lists(kind: str = "heavy_tailed", lengths: tuple[int, ...] = (20, 7), steps: int = 12, **settings: Any) -> Check:
    """The differential run of the synthetic decoder."""
    layers, heads = settings.pop("layers", 3), settings.pop("heads", 4)
    kept = {} if "budget" in settings else {"ratio": 0.6, "min_budget": 3}

    def run() -> None:
        kv_heads = max(1, heads // 2)
        pair = DifferentialRun(
            Config(**(kept | settings)), lengths, layers=layers, heads=heads, kv_heads=kv_heads, positions=48
        )
        for step in strategies.draw_scores(kind, (steps, layers, len(lengths), heads, 48), seed=1):
            pair.step(step)

    return run


def proposition(check: Callable[[Process], None], **process: Any) -> Check:
    given = {"layers": 1, "steps": 8, "settings": {"alpha": 0.8}} | process
    return lambda: check(Process(**given))


def machine() -> None:
    """The cache's state machine, a short run of it."""
    cache_machine.compiled.cache_clear()
    short = settings(
        max_examples=12, stateful_step_count=25, deadline=None, derandomize=True, database=None,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    try:
        run_state_machine_as_test(cache_machine.CacheMachine, settings=short)
    finally:
        cache_machine.compiled.cache_clear()


CHECKS: dict[str, Check] = {
    "state machine": machine,
    "clause: retained sets": clause("retained sets are the reference's"),
    "clause: momentum": clause("momentum is the reference's"),
    "clause: outputs": clause("outputs are the reference's"),
    "clause: outputs before the first eviction": clause(
        "outputs before the first eviction are the full cache's", evict_after=3
    ),
    "clause: outputs, one row without position_ids": clause("outputs are the reference's", lengths=(40,)),
    "clause: budget": clause("every row keeps its budget"),
    "clause: positions": clause("kept positions are of real tokens"),
    "clause: storage": clause("storage is the budget and one slot, in bytes"),
    "clause: one token per step": clause("at most one token leaves per step"),
    "clause: evicted never return": clause("evicted tokens never return"),
    "clause: momentum moves on refreshes alone": clause("momentum moves on refreshes alone", refresh_every=4),
    "clause: momentum moves at step 1 alone": clause("momentum moves on refreshes alone", refresh_every=None),
    "clause: sequences": clause("sequences do not see each other"),
    "contract: decimal ratio": contract("test_the_ratio_is_the_decimal_that_was_written"),
    "contract: second turn": contract("test_a_second_turn_agrees_with_the_reference"),
    "contract: rows": contract("test_rows_do_not_see_each_other"),
    "contract: sequences": contract("test_sequences_do_not_see_each_other"),
    "contract: reordered rows": contract("test_reordered_rows_carry_everything"),
    "contract: saved cache": contract("test_a_saved_cache_goes_on"),
    "contract: failed step": contract("test_a_step_that_fails_changes_nothing"),
    "contract: reset": contract("test_a_reset_cache_is_a_new_one"),
    "contract: storage": contract("test_storage_is_the_budget_and_one_slot"),
    "contract: protected tokens": contract("test_protected_tokens_stay"),
    "contract: short prompts": contract("test_short_prompts", 3),
    "lists": lists(),
    "lists: Lazy": lists(refresh_every=3),
    "lists: exact ties, Score-Free": lists("exact_ties", refresh_every=None, layers=1, heads=1, evict_after=3),
    "lists: the first eviction waits, pooled": lists(evict_after=4, pool_width=3),
    "lists: a budget larger than the prompt": lists(lengths=(6, 3), budget=10),
    "lists: time and layer": lists(alpha_time=0.9, alpha_layer=0.5),
    "lists: cumulative": lists(aggregator="cumulative"),
    "lists: last layer": lists(aggregator="single_step"),
    "lists: vnorm": lists(scorer="vnorm"),
    "lists: entropy": lists(scorer="entropy"),
    "proposition 1 (a)": proposition(propositions.check_expected_gap),
    "proposition 1 (b)": proposition(propositions.check_gap_variance),
    "proposition 1 (b), layers": proposition(propositions.check_gap_variance, layers=3),
    "proposition 1 (c)": proposition(propositions.check_misranking, settings={"alpha": 0.95}, steps=20, gap=0.02),
}


FAULTS: dict[Callable[[Patch], None], str | tuple[str, ...]] = {
    faults.alpha_swapped: ("proposition 1 (a)", "proposition 1 (b)", "proposition 1 (b), layers", "lists"),
    faults.layers_in_reverse: "lists",
    faults.new_token_at_zero: "lists: Lazy",
    faults.mean_over_dead_slots: "lists: a budget larger than the prompt",
    faults.mean_over_the_batch: "contract: rows",
    faults.mean_with_the_evicted_token: "clause: momentum",
    faults.tokens_of_a_later_prompt_at_zero: "contract: second turn",
    faults.ties_by_slot_order: "lists: exact ties, Score-Free",
    faults.ties_let_the_newest_go: "lists: exact ties, Score-Free",
    faults.compaction_by_topk: "lists: exact ties, Score-Free",
    faults.eviction_before_attention: "clause: outputs before the first eviction",
    faults.position_is_the_physical_length: "clause: outputs, one row without position_ids",
    faults.recorded_position_is_the_slot: "clause: evicted never return",
    faults.budget_off_by_one: "contract: decimal ratio",
    faults.one_token_too_many: "clause: budget",
    faults.float_budget_arithmetic: "contract: decimal ratio",
    faults.min_budget_ignored: "contract: short prompts",
    faults.lazy_off_by_one: "lists: Lazy",
    faults.lazy_every_r_plus_one: "lists: Lazy",
    faults.score_free_scores_on: "clause: momentum moves at step 1 alone",
    faults.momentum_decays_between_refreshes: "clause: momentum moves on refreshes alone",
    faults.scores_not_renormalised: "lists",
    faults.softmax_in_bf16: "clause: momentum",
    faults.momentum_in_bf16: "clause: momentum",
    faults.first_query_head_of_each_group: "lists",
    faults.first_kv_head_alone: "lists",
    faults.pooled_over_the_batch: "contract: rows",
    faults.scores_of_another_slot: ("proposition 1 (a)", "proposition 1 (c)"),
    faults.groups_interleaved: "clause: outputs",
    faults.vnorm_renormalised: "lists: vnorm",
    faults.entropy_over_all_slots: "lists: entropy",
    faults.padding_scored: "clause: positions",
    faults.state_shared_between_sequences: "contract: sequences",
    faults.momentum_gathers_over_sequences: "clause: sequences",
    faults.two_leave_at_once: ("clause: one token per step", "clause: evicted never return"),
    faults.stale_free_slot: "clause: retained sets",
    faults.free_slot_never_moves: "clause: retained sets",
    faults.values_not_written: "clause: outputs",
    faults.second_turn_goes_on_counting: "contract: second turn",
    faults.nothing_compacted: "clause: storage",
    faults.views_keep_the_prompt_alive: "contract: storage",
    faults.reordering_forgets_momentum: ("contract: reordered rows", "state machine"),
    faults.saving_forgets_the_step: "contract: saved cache",
    faults.failure_keeps_the_state: "contract: failed step",
    faults.reset_keeps_the_count: "contract: reset",
    faults.pooling_forgotten: "lists: the first eviction waits, pooled",
    faults.first_eviction_takes_one_step_longer: "clause: budget",
    faults.protected_off_by_one: "contract: protected tokens",
    faults.layer_weights_reversed: "lists: time and layer",
    faults.sum_that_forgets: "lists: cumulative",
    faults.first_layer_instead_of_last: "lists: last layer",
}


def test_every_check_is_needed() -> None:
    """Each one sees a fault."""
    named = [names if isinstance(names, tuple) else (names,) for names in FAULTS.values()]
    assert set(itertools.chain.from_iterable(named)) == set(CHECKS)


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_fault(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    names = FAULTS[plant]
    monkeypatch.setattr(sys.modules[__name__], "planted", True)
    # Compiled steps are cached across tests; a fault must meet none, and leave none.
    monkeypatch.setattr(synthetic, "_compiled", functools.cache(synthetic._compiled.__wrapped__))
    # The passes would refuse some of these before any check is asked: see the next test.
    monkeypatch.setattr(prove_attention._Proof, "run", lambda proof: 0.0)
    plant(monkeypatch)
    for name in (names,) if isinstance(names, str) else names:
        with pytest.raises((AssertionError, pytest.fail.Exception)) as caught:
            CHECKS[name]()
        # By a check, not by an assertion inside the library.
        ours = pathlib.Path(__file__).parents[1], pathlib.Path(inertia_fx.__file__).parent
        raised = [
            path
            for entry in caught.traceback
            if (path := pathlib.Path(entry.path)).is_relative_to(ours[0]) or path.is_relative_to(ours[1])
        ]
        assert raised[-1].is_relative_to(ours[0]) or "verify" in raised[-1].parts


@pytest.mark.parametrize(
    "plant",
    [
        faults.softmax_in_bf16, faults.first_query_head_of_each_group, faults.first_kv_head_alone,
        faults.pooled_over_the_batch, faults.scores_of_another_slot, faults.groups_interleaved,
    ],
    ids=lambda plant: plant.__name__,
)  # fmt: skip
def test_the_rewrites_own_proof_sees_it(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """Faults in the attention's replacement and in its scores are refused where the rewrite is made."""
    monkeypatch.setattr(synthetic, "_compiled", functools.cache(synthetic._compiled.__wrapped__))
    plant(monkeypatch)
    with pytest.raises(BackendCompilerFailed) as caught:
        CHECKS["lists"]()
    assert isinstance(caught.value.inner_exception, UnsupportedAttentionError)
    assert "tried on a small state" in caught.value.inner_exception.reason
