"""Planted faults: each must make a named check fail that passes without it. A fault that no check sees is a missing check.

The checks are those that users have: clauses of `inertia_fx.verify.check`, tests of `DecoderContract`, the scripted
decoder beside its lists, and the propositions. Faults are planted by monkeypatching, before the model is compiled.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import itertools
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import inertia_fx
from inertia_fx import Config, cache, config, huggingface, passes, slots, verify
from inertia_fx.huggingface_cache import InertiaCache
from inertia_fx.kernels import reference
from inertia_fx.verify import scripted, strategies
from inertia_fx.verify.contract import DecoderContract
from inertia_fx.verify.scripted import Beside
from tests import models, test_propositions
from tests.test_propositions import Process

Patch = pytest.MonkeyPatch
Check = Callable[[], None]

momentum_pass = importlib.import_module("inertia_fx.passes.update_momentum")  # the package has a function of this name
evict_pass = importlib.import_module("inertia_fx.passes.evict")


# ---------------------------------------------------------------------- the checks, by name


@functools.cache
def original() -> Any:
    """One layer, which is the quickest to trace; what takes several is the scripted decoder's part."""
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
        assert finding.passed, finding.detail

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
    """The scripted decoder beside its lists."""
    layers, heads = settings.pop("layers", 3), settings.pop("heads", 4)
    kept = {} if "budget" in settings else {"ratio": 0.6, "min_budget": 3}

    def run() -> None:
        kv_heads = max(1, heads // 2)
        pair = Beside(Config(**(kept | settings)), lengths, layers=layers, heads=heads, kv_heads=kv_heads, positions=48)
        for step in strategies.draw_scores(kind, (steps, layers, len(lengths), heads, 48), seed=1):
            pair.step(step)

    return run


def proposition(check: Callable[[Process], None], **process: Any) -> Check:
    given = {"layers": 1, "steps": 8, "settings": {"alpha": 0.8}} | process
    return lambda: check(Process(**given))


CHECKS: dict[str, Check] = {
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
    "proposition 1 (a)": proposition(test_propositions.check_expected_gap),
    "proposition 1 (b)": proposition(test_propositions.check_gap_variance),
    "proposition 1 (b), layers": proposition(test_propositions.check_gap_variance, layers=3),
    "proposition 1 (c)": proposition(test_propositions.check_misranking, settings={"alpha": 0.95}, steps=20, gap=0.02),
}


# ---------------------------------------------------------------------- the faults


def alpha_swapped(patch: Patch) -> None:
    real = momentum_pass._blend
    patch.setattr(momentum_pass, "_blend", lambda old, new, a, b: real(old, new, b, a))


def layers_in_reverse(patch: Patch) -> None:
    def update(rewrite: Any) -> Any:
        real = momentum_pass.update_momentum(rewrite)
        moved, alpha = rewrite.marker.new_momentum, rewrite.options.alpha
        for score in reversed(rewrite.scores):
            moved = rewrite.emit(rewrite.marker.node, momentum_pass._blend, moved, score, alpha, 1 - alpha)
        rewrite.momentum = rewrite.emit(
            rewrite.marker.node, torch.where, rewrite.live, moved, rewrite.marker.new_momentum
        )
        return real

    find, emit, _, *rest = passes.PASSES
    patch.setattr(passes, "PASSES", (find, emit, update, *rest))


def entering(patch: Patch, momentum_of: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
    """Patch what a new token enters with: `momentum_of(momentum, positions, taken, due)`."""
    real = cache.enter

    def enter(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
        due, new_positions = real(momentum, positions, free, length)
        taken = torch.arange(positions.size(1), device=positions.device) == free.unsqueeze(1)
        return torch.where(taken, momentum_of(momentum, positions, taken, due), due), new_positions

    patch.setattr(cache, "enter", enter)


def new_token_at_zero(patch: Patch) -> None:
    entering(patch, lambda momentum, positions, taken, due: torch.zeros_like(due))


def mean_over_dead_slots(patch: Patch) -> None:
    def mean(momentum: Tensor, positions: Tensor, taken: Tensor, due: Tensor) -> Tensor:
        return torch.where((positions >= 0) & ~taken, momentum, 0.0).mean(-1, keepdim=True)

    entering(patch, mean)


def mean_over_the_batch(patch: Patch) -> None:
    entering(patch, lambda momentum, positions, taken, due: due.where(taken, 0.0).sum(1).mean().expand_as(due))


def mean_with_the_evicted_token(patch: Patch) -> None:
    entering(patch, lambda momentum, positions, taken, due: reference.mean_momentum(momentum, positions >= 0))


def tokens_of_a_later_prompt_at_zero(patch: Patch) -> None:
    patch.setattr(cache, "mean_momentum", lambda momentum, live: torch.zeros(len(momentum), 1))


def choosing(patch: Patch, choose: Callable[..., Tensor]) -> None:
    """Patch the choice of the next free slot, in the graph and on the host."""
    for module in (evict_pass, slots):
        patch.setattr(module, "next_free", choose)


def ties_by_slot_order(patch: Patch) -> None:
    choosing(patch, lambda momentum, positions, length, first, recent: momentum.argmin(-1))


def ties_let_the_newest_go(patch: Patch) -> None:
    def choose(momentum: Tensor, positions: Tensor, *_: Any) -> Tensor:
        smallest = momentum == momentum.amin(-1, keepdim=True)
        return torch.where(smallest, positions, -2).argmax(-1)

    choosing(patch, choose)


def compaction_by_topk(patch: Patch) -> None:
    def survivors(state: Any, keep: Any, *_: Any) -> Tensor:
        rank = torch.where(state.positions >= 0, state.momentum, -math.inf)
        kept = rank.topk(max(keep), dim=1).indices
        stays = torch.arange(max(keep)) < torch.tensor(keep)[:, None]
        order = torch.where(stays, state.positions.gather(1, kept), 10**6).argsort(dim=1)
        return kept.gather(1, order)

    patch.setattr(slots, "survivors", survivors)


def eviction_before_attention(patch: Patch) -> None:
    real = cache.SlotCache.enter

    def enter(self: Any) -> Any:
        entry = real(self)
        victim = reference.next_free(entry.momentum, entry.positions, self._state.length, 0, 0)
        gone = torch.arange(entry.positions.shape[1]) == victim.unsqueeze(1)
        positions = torch.where(gone, -1, entry.positions)
        return slots.Entry(positions >= 0, torch.where(gone, -math.inf, entry.momentum), positions)

    patch.setattr(cache.SlotCache, "enter", enter)


def position_is_the_physical_length(patch: Patch) -> None:
    real = huggingface._Compiled._inertia_step

    def step(self: Any, store: Any, rows: int, device: Any, arguments: dict[str, Any]) -> Any:
        arguments.setdefault("position_ids", torch.full((1, 1), store.slots))
        return real(self, store, rows, device, arguments)

    patch.setattr(huggingface._Compiled, "_inertia_step", step)


def recorded_position_is_the_slot(patch: Patch) -> None:
    real = cache.enter

    def enter(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor) -> Any:
        new_momentum, _ = real(momentum, positions, free, length)
        place = torch.arange(positions.size(1))
        return new_momentum, torch.where(place == free.unsqueeze(1), place, positions)

    patch.setattr(cache, "enter", enter)


def budget(patch: Patch, of: Callable[[Config, int, int], int]) -> None:
    real = Config.budget_of
    patch.setattr(Config, "budget_of", lambda self, prompt: of(self, prompt, real(self, prompt)))


def budget_off_by_one(patch: Patch) -> None:
    budget(patch, lambda config, prompt, due: due - 1 if str(config.ratio) == "0.9" else due)


def one_token_too_many(patch: Patch) -> None:
    budget(patch, lambda config, prompt, due: due + 1)


def float_budget_arithmetic(patch: Patch) -> None:
    budget(patch, lambda config, prompt, due: max(config.min_budget, int((1 - float(config.ratio)) * prompt)))


def min_budget_ignored(patch: Patch) -> None:
    budget(patch, lambda settings, prompt, due: max(1, config._kept(settings.ratio, prompt)))


def refreshing(patch: Patch, when: Callable[[Config, int, bool], bool]) -> None:
    real = Config.refreshes_at
    patch.setattr(Config, "refreshes_at", lambda self, step: when(self, step, real(self, step)))


def lazy_off_by_one(patch: Patch) -> None:
    refreshing(patch, lambda config, step, due: due if not config.refresh_every else step % config.refresh_every == 0)


def lazy_every_r_plus_one(patch: Patch) -> None:
    def when(config: Config, step: int, due: bool) -> bool:
        lazy = (config.refresh_every or 1) > 1
        return (step - 1) % (config.refresh_every + 1) == 0 if lazy else due  # type: ignore[operator]

    refreshing(patch, when)


def score_free_scores_on(patch: Patch) -> None:
    # The host believes what it should, the graph that runs is the other one.
    real = huggingface.Runtime.step
    patch.setattr(huggingface.Runtime, "step", lambda self, config, score: real(self, config, True))


def momentum_decays_between_refreshes(patch: Patch) -> None:
    real = momentum_pass.update_momentum

    def update(rewrite: Any) -> Any:
        result = real(rewrite)
        if not rewrite.scores:
            rewrite.momentum = rewrite.emit(
                rewrite.marker.node, torch.where, rewrite.live,
                rewrite.emit(rewrite.marker.node, torch.mul, rewrite.momentum, 0.9), rewrite.momentum,
            )  # fmt: skip
        return result

    find, emit, _, *rest = passes.PASSES
    patch.setattr(passes, "PASSES", (find, emit, update, *rest))


def scoring(patch: Patch, scores_of: Callable[..., Tensor]) -> None:
    """Patch the pooled scores: `scores_of(real, probabilities, value, live, scorer)`."""
    real = reference.pooled_scores
    patch.setattr(
        reference,
        "pooled_scores",
        lambda probabilities, value, live, scorer: scores_of(real, probabilities, value, live, scorer),
    )


def scores_not_renormalised(patch: Patch) -> None:
    """As if the evicted tokens still had their part of the softmax: scores sum to the share of the text that is cached."""

    def share(score: Tensor, live: Tensor, length: Tensor) -> Tensor:
        return score * (live.sum(-1, keepdim=True) / (length.unsqueeze(1) + 1))

    def update(rewrite: Any) -> Any:
        length = rewrite.marker.length
        rewrite.scores = tuple(rewrite.emit(s.next, share, s, rewrite.live, length) for s in rewrite.scores)
        return momentum_pass.update_momentum(rewrite)

    find, emit, _, *rest = passes.PASSES
    patch.setattr(passes, "PASSES", (find, emit, update, *rest))


def softmax_in_bf16(patch: Patch) -> None:
    real = reference.attention_probabilities
    patch.setattr(reference, "attention_probabilities", lambda *given: real(*given).bfloat16().float())


def first_query_head_of_each_group(patch: Patch) -> None:
    scoring(patch, lambda real, p, value, live, scorer: real(p[:, :, :1], value, live, scorer))


def first_kv_head_alone(patch: Patch) -> None:
    scoring(patch, lambda real, p, value, live, scorer: p[:, 0].mean(1))


def pooled_over_the_batch(patch: Patch) -> None:
    def scores(real: Any, p: Tensor, value: Tensor, live: Tensor, scorer: str) -> Tensor:
        s = real(p, value, live, scorer)
        return s.mean(0, keepdim=True).expand_as(s)

    scoring(patch, scores)


def scores_of_another_slot(patch: Patch) -> None:
    scoring(patch, lambda real, p, value, live, scorer: real(p, value, live, scorer).roll(2, -1))


def groups_interleaved(patch: Patch) -> None:
    patch.setattr(
        reference,
        "group_queries",
        lambda query, kv_heads: query.squeeze(2).unflatten(1, (-1, kv_heads)).transpose(1, 2),
    )


def vnorm_renormalised(patch: Patch) -> None:
    def scores(real: Any, p: Tensor, value: Tensor, live: Tensor, scorer: str) -> Tensor:
        s = real(p, value, live, scorer)
        return s / s.sum(-1, keepdim=True)

    scoring(patch, scores)


def entropy_over_all_slots(patch: Patch) -> None:
    scoring(patch, lambda real, p, value, live, scorer: real(p, value, torch.ones_like(live), scorer))


def padding_scored(patch: Patch) -> None:
    patch.setattr(huggingface, "_padding", lambda *given: None)


def state_shared_between_sequences(patch: Patch) -> None:
    """The momentum belongs to the model, not to the cache."""
    momentum_of_the_model(patch, lambda momentum, held: momentum.copy_(held))


def momentum_gathers_over_sequences(patch: Patch) -> None:
    momentum_of_the_model(patch, lambda momentum, held: momentum.add_(torch.where(held.isfinite(), held, 0.0).flip(1)))


def momentum_of_the_model(patch: Patch, use: Callable[[Tensor, Tensor], Any]) -> None:
    real, held = cache.SlotCache.step, {}

    @contextlib.contextmanager
    def step(self: Any, rows: int) -> Any:
        with real(self, rows):
            momentum = self._state.momentum
            if momentum.shape in held:
                use(momentum, held[momentum.shape])
            yield
            held[momentum.shape] = momentum.clone()

    patch.setattr(cache.SlotCache, "step", step)


def two_leave_at_once(patch: Patch) -> None:
    """Every other step, the oldest token is out of sight too."""
    real = cache.SlotCache._alive

    def alive(self: Any) -> Tensor:
        held = real(self)
        oldest = torch.where(held, self._state.positions, 10**6).argmin(1, keepdim=True)
        hidden = self._seen % 2 == 0 and self._phase == "slots"
        return held.scatter(1, oldest, False) if hidden else held

    patch.setattr(cache.SlotCache, "_alive", alive)


def stale_free_slot(patch: Patch) -> None:
    """The slot to overwrite is chosen by the momentum from before the step's update."""
    real = evict_pass._write_back

    def write_back(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor, *rest: Any) -> Tensor:
        stale = momentum.clone()
        result = real(momentum, positions, free, length, *rest)
        free.copy_(reference.next_free(stale, positions, length - 1, rest[2], rest[3]))
        return result

    patch.setattr(evict_pass, "_write_back", write_back)


def free_slot_never_moves(patch: Patch) -> None:
    choosing(patch, lambda momentum, positions, length, *_: torch.full_like(length, 3))


def values_not_written(patch: Patch) -> None:
    def write(self: Any, key: Tensor, value: Tensor, rows: Tensor, slot: Tensor) -> Any:
        self.keys[rows, :, slot] = key[:, :, 0]
        return self.keys, self.values

    patch.setattr(slots.SlotLayer, "write", write)


def second_turn_goes_on_counting(patch: Patch) -> None:
    real = cache.SlotCache._join

    def join(self: Any, *given: Any) -> None:
        steps = self._steps
        real(self, *given)
        self._steps = steps

    patch.setattr(cache.SlotCache, "_join", join)


def nothing_compacted(patch: Patch) -> None:
    """Evicted tokens are gone, their storage is not: the buffers stay as long as the prompt."""
    real = slots.gather

    def gather(layers: Any, state: Any, index: Tensor, counts: Any, limits: Any, capacity: int) -> None:
        real(layers, state, index, counts, limits, capacity + 30)

    patch.setattr(slots, "gather", gather)


def views_keep_the_prompt_alive(patch: Patch) -> None:
    """Storage is bounded in counts, but every buffer is a view into one that is as large as the prompt."""

    def take(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = buffer.shape
        whole = buffer.new_zeros(rows, heads, capacity + 30, width)
        expanded = index[:, None, :, None].expand(rows, heads, index.shape[1], width)
        whole[:, :, : index.shape[1]] = buffer.gather(2, expanded)
        return whole[:, :, :capacity]

    patch.setattr(slots, "_take", take)


def reordering_forgets_momentum(patch: Patch) -> None:
    real = slots.select_rows

    def select(layers: Any, state: Any, index: Tensor) -> None:
        momentum = state.momentum.clone()
        real(layers, state, index)
        state.momentum.copy_(momentum)

    patch.setattr(slots, "select_rows", select)


def saving_forgets_the_step(patch: Patch) -> None:
    real = InertiaCache.__getstate__
    patch.setattr(InertiaCache, "__getstate__", lambda self: real(self) | {"_steps": 0})


def failure_keeps_the_state(patch: Patch) -> None:
    """A step that fails after its graph has run is not taken back: no field of the state is saved before it."""
    patch.setattr(cache, "dataclasses", types.SimpleNamespace(fields=lambda state: [], replace=dataclasses.replace))


def reset_keeps_the_count(patch: Patch) -> None:
    real = cache.SlotCache._clear

    def clear(self: Any) -> None:
        steps = getattr(self, "_steps", 0)
        real(self)
        self._steps = steps

    second_turn_goes_on_counting(patch)
    patch.setattr(cache.SlotCache, "_clear", clear)


def pooling_forgotten(patch: Patch) -> None:
    patch.setattr(slots, "pool", lambda *given: None)


def first_eviction_takes_one_step_longer(patch: Patch) -> None:
    real = cache.SlotCache._compact

    def compact(self: Any) -> None:
        self._steps -= 1
        if self._steps >= self.config.evict_after:
            real(self)
        else:
            self._steps += 1

    patch.setattr(cache.SlotCache, "_compact", compact)


def protected_off_by_one(patch: Patch) -> None:
    real = cache.SlotCache._protected.fget
    patch.setattr(
        cache.SlotCache,
        "_protected",
        property(lambda self: (real(self)[0], max(0, real(self)[1] - 1))),  # type: ignore[misc]
    )


def layer_weights_reversed(patch: Patch) -> None:
    """alpha_layer weighs the first layer most."""
    real = momentum_pass._blend

    def blend(old: Tensor, new: Tensor, old_weight: float, new_weight: float) -> Tensor:
        return (
            real(old, new, 1.0, old_weight)
            if new_weight == 1.0 and old_weight not in (0.0, 1.0)
            else real(old, new, old_weight, new_weight)
        )

    patch.setattr(momentum_pass, "_blend", blend)


def sum_that_forgets(patch: Patch) -> None:
    real = momentum_pass._blend
    patch.setattr(
        momentum_pass,
        "_blend",
        lambda old, new, a, b: real(old, new, 0.9, b) if a == b == 1.0 else real(old, new, a, b),
    )


def first_layer_instead_of_last(patch: Patch) -> None:
    emit_pass = importlib.import_module("inertia_fx.passes.emit_scores")
    patch.setattr(emit_pass, "_is_scored", lambda rewrite, layer: rewrite.options.score and layer == 0)


def momentum_in_bf16(patch: Patch) -> None:
    real = momentum_pass._blend
    patch.setattr(momentum_pass, "_blend", lambda old, new, a, b: real(old, new, a, b).bfloat16().float())


FAULTS: dict[Callable[[Patch], None], str | tuple[str, ...]] = {
    alpha_swapped: ("proposition 1 (a)", "proposition 1 (b)", "proposition 1 (b), layers", "lists"),
    layers_in_reverse: "lists",
    new_token_at_zero: "lists: Lazy",
    mean_over_dead_slots: "lists: a budget larger than the prompt",
    mean_over_the_batch: "contract: rows",
    mean_with_the_evicted_token: "clause: momentum",
    tokens_of_a_later_prompt_at_zero: "contract: second turn",
    ties_by_slot_order: "lists: exact ties, Score-Free",
    ties_let_the_newest_go: "lists: exact ties, Score-Free",
    compaction_by_topk: "lists: exact ties, Score-Free",
    eviction_before_attention: "clause: outputs before the first eviction",
    position_is_the_physical_length: "clause: outputs, one row without position_ids",
    recorded_position_is_the_slot: "clause: evicted never return",
    budget_off_by_one: "contract: decimal ratio",
    one_token_too_many: "clause: budget",
    float_budget_arithmetic: "contract: decimal ratio",
    min_budget_ignored: "contract: short prompts",
    lazy_off_by_one: "lists: Lazy",
    lazy_every_r_plus_one: "lists: Lazy",
    score_free_scores_on: "clause: momentum moves at step 1 alone",
    momentum_decays_between_refreshes: "clause: momentum moves on refreshes alone",
    scores_not_renormalised: "lists",
    softmax_in_bf16: "clause: momentum",
    momentum_in_bf16: "clause: momentum",
    first_query_head_of_each_group: "lists",
    first_kv_head_alone: "lists",
    pooled_over_the_batch: "contract: rows",
    scores_of_another_slot: ("proposition 1 (a)", "proposition 1 (c)"),
    groups_interleaved: "clause: outputs",
    vnorm_renormalised: "lists: vnorm",
    entropy_over_all_slots: "lists: entropy",
    padding_scored: "clause: positions",
    state_shared_between_sequences: "contract: sequences",
    momentum_gathers_over_sequences: "clause: sequences",
    two_leave_at_once: ("clause: one token per step", "clause: evicted never return"),
    stale_free_slot: "clause: retained sets",
    free_slot_never_moves: "clause: retained sets",
    values_not_written: "clause: outputs",
    second_turn_goes_on_counting: "contract: second turn",
    nothing_compacted: "clause: storage",
    views_keep_the_prompt_alive: "contract: storage",
    reordering_forgets_momentum: "contract: reordered rows",
    saving_forgets_the_step: "contract: saved cache",
    failure_keeps_the_state: "contract: failed step",
    reset_keeps_the_count: "contract: reset",
    pooling_forgotten: "lists: the first eviction waits, pooled",
    first_eviction_takes_one_step_longer: "clause: budget",
    protected_off_by_one: "contract: protected tokens",
    layer_weights_reversed: "lists: time and layer",
    sum_that_forgets: "lists: cumulative",
    first_layer_instead_of_last: "lists: last layer",
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
    monkeypatch.setattr(scripted, "_compiled", functools.cache(scripted._compiled.__wrapped__))
    plant(monkeypatch)
    for name in (names,) if isinstance(names, str) else names:
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            CHECKS[name]()
