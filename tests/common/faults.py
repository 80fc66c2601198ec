"""Faults that somebody could make, each planted by monkeypatching before a model is compiled. See test_mutations.py."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from inertia_fx import Config, backend, config, passes
from inertia_fx.cache import eviction
from inertia_fx.cache import slot_cache as cache
from inertia_fx.cache import storage as slots
from inertia_fx.cache.ledger import Ledger, Phase
from inertia_fx.huggingface import model as huggingface
from inertia_fx.huggingface.cache import InertiaCache
from inertia_fx.kernels import reference, targets
from inertia_fx.passes import emit_scores
from inertia_fx.passes.contract import require_marker
from inertia_fx.passes.nodes import emit
from inertia_fx.passes.update_momentum import scores_of, update_momentum_pass

Patch = pytest.MonkeyPatch


def instead_of(patch: Patch, name: str, run: Callable[..., Any]) -> None:
    """Put a pass in the place of one of ours."""
    run.__name__ = f"{name}_pass"
    changed = tuple(run if passes.name_of(ours) == name else ours for ours in passes.PASSES)
    assert changed != passes.PASSES
    patch.setattr(backend, "PASSES", changed)


def alpha_swapped(patch: Patch) -> None:
    real = reference.blend
    patch.setattr(reference, "blend", lambda old, new, a, b: real(old, new, b, a))


def layers_in_reverse(patch: Patch) -> None:
    def update(gm: Any, example_inputs: Any, *, options: Any) -> Any:
        marker = require_marker(gm)
        moved = marker.new_momentum
        for score in reversed(scores_of(gm.graph)):
            moved = emit(gm.graph, marker.node, reference.blend, moved, score, options.alpha, 1 - options.alpha)
        marker.set_momentum(moved)
        return gm

    instead_of(patch, "update_momentum", update)


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
    patch.setattr(slots, "mean_momentum", lambda momentum, live: torch.zeros(len(momentum), 1))


def choosing(patch: Patch, choose: Callable[..., Tensor]) -> None:
    """Patch the choice of the next free slot, in the graph and on the host."""
    for module in (reference, eviction):
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

    patch.setattr(eviction, "survivors", survivors)


def eviction_before_attention(patch: Patch) -> None:
    real = cache.SlotCache.enter

    def enter(self: Any) -> Any:
        entry = real(self)
        victim = reference.next_free(entry.momentum, entry.positions, self.state.length, 0, 0)
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
    def update(gm: Any, example_inputs: Any, *, options: Any) -> Any:
        gm = update_momentum_pass(gm, example_inputs, options=options)
        if not options.score:
            marker = require_marker(gm)
            marker.set_momentum(emit(gm.graph, marker.node, torch.mul, marker.new_momentum, 0.9))
        return gm

    instead_of(patch, "update_momentum", update)


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

    def share(score: Tensor, positions: Tensor, length: Tensor) -> Tensor:
        return score * ((positions >= 0).sum(-1, keepdim=True) / (length.unsqueeze(1) + 1))

    def update(gm: Any, example_inputs: Any, *, options: Any) -> Any:
        gm = update_momentum_pass(gm, example_inputs, options=options)
        marker = require_marker(gm)
        for score in scores_of(gm.graph):
            blends = list(score.users)
            shared = emit(gm.graph, score.next, share, score, marker.new_positions, marker.length)
            for blend in blends:
                blend.replace_input_with(score, shared)
        return gm

    instead_of(patch, "update_momentum", update)


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
    patch.setattr(huggingface, "padding_of", lambda *given: None)


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
            momentum = self.state.momentum
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
        oldest = torch.where(held, self.state.positions, 10**6).argmin(1, keepdim=True)
        hidden = self.seen % 2 == 0 and self.phase is Phase.DECODE
        return held.scatter(1, oldest, False) if hidden else held

    patch.setattr(cache.SlotCache, "_alive", alive)


def stale_free_slot(patch: Patch) -> None:
    """The slot to overwrite is chosen by the momentum from before the step's update."""
    real = targets.REFERENCE.commit

    def commit(momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor, *rest: Any) -> Tensor:
        stale = momentum.clone()
        result = real(momentum, positions, free, length, *rest)
        free.copy_(reference.next_free(stale, positions, length - 1, rest[3], rest[4]))
        return result

    patch.setattr(targets, "REFERENCE", dataclasses.replace(targets.REFERENCE, commit=commit))


def free_slot_never_moves(patch: Patch) -> None:
    choosing(patch, lambda momentum, positions, length, *_: torch.full_like(length, 3))


def values_not_written(patch: Patch) -> None:
    def write(self: Any, key: Tensor, value: Tensor, rows: Tensor, slot: Tensor) -> Any:
        self.keys[rows, :, slot] = key[:, :, 0]
        return self.keys, self.values

    patch.setattr(slots.SlotLayer, "write", write)


def second_turn_goes_on_counting(patch: Patch) -> None:
    real = Ledger.add_prompt
    patch.setattr(Ledger, "add_prompt", lambda self, *given: dataclasses.replace(real(self, *given), steps=self.steps))


def nothing_compacted(patch: Patch) -> None:
    """Evicted tokens are gone, their storage is not: the buffers stay as long as the prompt."""
    real = slots.gather

    def gather(layers: Any, state: Any, index: Tensor, counts: Any, limits: Any, capacity: int) -> Any:
        return real(layers, state, index, counts, limits, capacity + 30)

    patch.setattr(slots, "gather", gather)


def views_keep_the_prompt_alive(patch: Patch) -> None:
    """Storage is bounded in counts, but every buffer is a view into one that is as large as the prompt."""

    def take(buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
        rows, heads, _, width = buffer.shape
        whole = buffer.new_zeros(rows, heads, capacity + 30, width)
        expanded = index[:, None, :, None].expand(rows, heads, index.shape[1], width)
        whole[:, :, : index.shape[1]] = buffer.gather(2, expanded)
        return whole[:, :, :capacity]

    patch.setattr(targets, "REFERENCE", dataclasses.replace(targets.REFERENCE, gather=take))


def reordering_forgets_momentum(patch: Patch) -> None:
    real = slots.select_rows

    def select(layers: Any, state: Any, index: Tensor) -> Any:
        momentum = state.momentum.clone()
        selected = real(layers, state, index)
        if selected.momentum.shape == momentum.shape:
            selected.momentum.copy_(momentum)
        return selected

    patch.setattr(slots, "select_rows", select)


def saving_forgets_the_step(patch: Patch) -> None:
    real = InertiaCache.__getstate__
    patch.setattr(
        InertiaCache, "__getstate__", lambda self: real(self) | {"_ledger": dataclasses.replace(self._ledger, steps=0)}
    )


def failure_keeps_the_state(patch: Patch) -> None:
    """A step that fails after its graph has run is not taken back: what is kept of the state before it is no copy."""
    patch.setattr(slots.RetentionState, "clone", lambda self: self)


def reset_keeps_the_count(patch: Patch) -> None:
    real = cache.SlotCache._clear

    def clear(self: Any) -> None:
        steps = self._ledger.steps
        real(self)
        self._ledger = dataclasses.replace(self._ledger, steps=steps)

    second_turn_goes_on_counting(patch)
    patch.setattr(cache.SlotCache, "_clear", clear)


def pooling_forgotten(patch: Patch) -> None:
    patch.setattr(eviction, "pool", lambda *given: None)


def first_eviction_takes_one_step_longer(patch: Patch) -> None:
    """The counts evict, storage does not yet."""
    real = Ledger.add_step
    patch.setattr(Ledger, "add_step", lambda self, config: dataclasses.replace(real(self, config), compaction=None))


def protected_off_by_one(patch: Patch) -> None:
    real = cache.SlotCache._protected.fget
    patch.setattr(
        cache.SlotCache,
        "_protected",
        property(lambda self: (real(self)[0], max(0, real(self)[1] - 1))),  # type: ignore[misc]
    )


def layer_weights_reversed(patch: Patch) -> None:
    """alpha_layer weighs the first layer most."""
    real = reference.blend

    def blend(old: Tensor, new: Tensor, old_weight: float, new_weight: float) -> Tensor:
        return (
            real(old, new, 1.0, old_weight)
            if new_weight == 1.0 and old_weight not in (0.0, 1.0)
            else real(old, new, old_weight, new_weight)
        )

    patch.setattr(reference, "blend", blend)


def sum_that_forgets(patch: Patch) -> None:
    real = reference.blend
    patch.setattr(
        reference,
        "blend",
        lambda old, new, a, b: real(old, new, 0.9, b) if a == b == 1.0 else real(old, new, a, b),
    )


def first_layer_instead_of_last(patch: Patch) -> None:
    patch.setattr(emit_scores, "_is_scored", lambda layer, layers, options: options.score and layer == 0)


def momentum_in_bf16(patch: Patch) -> None:
    real = reference.blend
    patch.setattr(reference, "blend", lambda old, new, a, b: real(old, new, a, b).bfloat16().float())
