"""The invariants of docs/SPEC.md, 1 to 12, as properties of the compiled graph's own nodes under scores of every kind.

The decoder is `verify.testing.synthetic`: real passes, real slot cache, real compile, attention as drawn. (9 and 10 are in
test_propositions.py.)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from inertia_fx import Config, backend, errors
from inertia_fx.cache import RetentionState
from inertia_fx.cache.eviction import survivors
from inertia_fx.kernels.reference import enter, next_free
from inertia_fx.passes import PASSES, name_of
from inertia_fx.passes.nodes import emit
from inertia_fx.passes.update_momentum import scores_of as emitted
from inertia_fx.verify.check.metrics import tie
from inertia_fx.verify.testing import strategies, synthetic
from inertia_fx.verify.testing.strategies import Geometry
from inertia_fx.verify.testing.synthetic import DifferentialRun, SyntheticRun
from tests.common.examples import examples

STEPS = 10
POSITIONS = 64


def differential_run(geometry: Geometry) -> DifferentialRun:
    return DifferentialRun(geometry.config, geometry.lengths, **shape(geometry))


def shape(geometry: Geometry) -> dict[str, int]:
    return {
        "layers": geometry.layers, "heads": geometry.heads, "kv_heads": geometry.kv_heads, "positions": POSITIONS,
    }  # fmt: skip


def scores_of(geometry: Geometry, kind: str, seed: int, steps: int = STEPS, rows: int | None = None) -> Tensor:
    rows = len(geometry.lengths) if rows is None else rows
    return strategies.draw_scores(kind, (steps, geometry.layers, rows, geometry.heads, POSITIONS), seed)


def runs(config: Config, lengths: Any, scores: Tensor, **sizes: int) -> list[tuple[list[list[int]], list[Any]]]:
    """Per step: kept positions, and momenta (that of the token just evicted too)."""
    run = SyntheticRun(config, lengths, positions=POSITIONS, **sizes)
    seen = []
    for step in scores:
        run.step(step)
        seen.append((run.retained, run.decided))
    return seen


kinds = st.sampled_from(strategies.KINDS)
sizes = st.sampled_from(({"layers": 1}, {"layers": 3}, {"layers": 2, "heads": 4, "kv_heads": 2}))
lengths = st.lists(st.integers(1, 24), min_size=1, max_size=3)


@examples(25)
@given(
    geometry=strategies.geometries(), kind=kinds, seed=strategies.seeds(), later=st.lists(st.integers(2, 6), max_size=1)
)
def test_1_2_8_the_slots_are_the_list(geometry: Geometry, kind: str, seed: int, later: list[int]) -> None:
    """The slot form keeps what the growing list keeps, in B + 1 slots; at most one token leaves per step."""
    pair = differential_run(geometry)
    run, config = pair.run, geometry.config
    before: list[set[int]] = []
    for turn in range(len(later) + 1):
        if turn:
            pair.prompt(later * len(geometry.lengths))
            before = []
        for number, step in enumerate(scores_of(geometry, kind, seed + turn), 1):
            pair.step(step)
            now = [set(kept) for kept in run.retained]
            budgets = run.cache.budget
            slot = sum(2 * layer.keys[:, :, :1].numel() * 4 for layer in run.cache.layers)
            assert run.cache.nbytes == run.cache.slots * slot
            for row, kept in enumerate(now):
                if number >= config.evict_after:
                    assert len(kept) <= budgets[row]
                evicting = number > config.evict_after and len(before[row]) == budgets[row]
                if evicting:
                    assert len(before[row] - kept) <= 1
                    union = len(before[row] | kept)
                    churn = 1 - len(before[row] & kept) / union
                    assert churn == pytest.approx(0) or churn == pytest.approx(2 / (budgets[row] + 1))
            if number >= config.evict_after and all(
                len(kept) == budget for kept, budget in zip(now, budgets, strict=True)
            ):
                assert run.cache.slots == max(budgets) + 1
            before = now


@examples(25)
@given(
    alpha=st.sampled_from((0.3, 0.8)), size=sizes, lengths=lengths, kind=st.sampled_from(("uniform", "heavy_tailed")),
    seed=strategies.seeds(),
)  # fmt: skip
def test_2_unrolled_and_layer_by_layer_agree(alpha: float, size: Any, lengths: list[int], kind: str, seed: int) -> None:
    """m = alpha m + (1 - alpha) s per layer is alpha^K over time and alpha over layers."""
    heads, layers = size.get("heads", 1), size["layers"]
    scores = strategies.draw_scores(kind, (STEPS, layers, len(lengths), heads, POSITIONS), seed)
    kept = {"ratio": 0.6, "min_budget": 3}
    by_layer = runs(Config(alpha=alpha, **kept), lengths, scores, **size)
    unrolled = runs(Config(alpha_time=alpha**layers, alpha_layer=alpha, **kept), lengths, scores, **size)
    for (positions, momenta), (others, other_momenta) in zip(by_layer, unrolled, strict=True):
        for row in range(len(lengths)):
            if positions[row] != others[row]:
                assert tie(momenta[row], others[row], positions[row]) < synthetic.TIE
                return  # a tie that rounding decides: what follows is two histories
            for position, value in momenta[row].items():
                assert value == pytest.approx(other_momenta[row][position], rel=1e-5, abs=1e-9)


SCALED = {power: functools.cache(synthetic._compiled.__wrapped__) for power in (-12, 7)}
"""Compiled steps whose scores are multiplied by 2^power; kept apart from the others."""


@examples(15)
@given(
    power=st.sampled_from(tuple(SCALED)), refresh_every=st.sampled_from((1, 3)), lengths=lengths, kind=kinds,
    seed=strategies.seeds(),
)  # fmt: skip
def test_3_scaling_every_score_changes_no_retained_set(
    power: int, refresh_every: int, lengths: list[int], kind: str, seed: int
) -> None:
    """Every score of the graph times 2^power (exact in floating point): the same sets, momenta times 2^power."""

    def scale_scores_pass(gm: Any, example_inputs: Any, *, options: Any) -> Any:
        for score in emitted(gm.graph):
            readers = list(score.users)
            scaled = emit(gm.graph, score.next, torch.mul, score, 2.0**power)
            for reader in readers:
                reader.replace_input_with(score, scaled)
        return gm

    config = Config(ratio=0.6, min_budget=3, refresh_every=refresh_every)
    scores = strategies.draw_scores(kind, (STEPS, 2, len(lengths), 1, POSITIONS), seed)
    unscaled = runs(config, lengths, scores, layers=2)
    with pytest.MonkeyPatch.context() as patch:
        place = [name_of(run) for run in PASSES].index("update_momentum") + 1
        patch.setattr(backend, "PASSES", (*PASSES[:place], scale_scores_pass, *PASSES[place:]))
        patch.setattr(synthetic, "_compiled", SCALED[power])
        scaled = runs(config, lengths, scores, layers=2)
    for (positions, momenta), (same, larger) in zip(unscaled, scaled, strict=True):
        assert same == positions
        for row, momentum in enumerate(momenta):
            assert larger[row] == {position: value * 2.0**power for position, value in momentum.items()}


@examples(15)
@given(lengths=lengths, kind=kinds, seed=strategies.seeds(), alpha=st.sampled_from((0.0, 0.8)))
def test_3_entropy_weighting_of_one_layer_changes_none(lengths: list[int], kind: str, seed: int, alpha: float) -> None:
    """K = 1, as long as one refresh is all the momentum knows: Score-Free, or alpha = 0 (SPEC, E10)."""
    refresh_every = None if alpha else 1
    config = Config(ratio=0.6, min_budget=3, alpha=alpha, refresh_every=refresh_every)
    scores = strategies.draw_scores(kind, (STEPS, 1, len(lengths), 1, POSITIONS), seed)
    attention = runs(config, lengths, scores)
    entropy = runs(dataclasses.replace(config, scorer="entropy"), lengths, scores)
    for (positions, momenta), (others, _) in zip(attention, entropy, strict=True):
        for row in range(len(lengths)):
            if positions[row] != others[row]:
                assert tie(momenta[row], others[row], positions[row]) < synthetic.TIE
                return


def test_3_entropy_weighting_changes_sets_where_steps_are_mixed() -> None:
    """With memory over time each step has an entropy, and so a weight, of its own: the invariant ends there."""
    scores = strategies.draw_scores("heavy_tailed", (STEPS, 1, 1, 1, POSITIONS), 3)
    config = Config(ratio=0.6, min_budget=3, alpha=0.8)
    attention = runs(config, [24], scores)
    entropy = runs(dataclasses.replace(config, scorer="entropy"), [24], scores)
    assert [kept for kept, _ in attention] != [kept for kept, _ in entropy]


@examples(15)
@given(lengths=lengths, kind=kinds, seed=strategies.seeds(), size=sizes)
def test_4_score_free_is_lazy_without_end(lengths: list[int], kind: str, seed: int, size: Any) -> None:
    scores = strategies.draw_scores(kind, (STEPS, size["layers"], len(lengths), size.get("heads", 1), POSITIONS), seed)
    kept = {"ratio": 0.6, "min_budget": 3}
    free = runs(Config(refresh_every=None, **kept), lengths, scores, **size)
    assert free == runs(Config(refresh_every=STEPS, **kept), lengths, scores, **size)
    assert free != runs(Config(refresh_every=1, **kept), lengths, scores, **size)
    whole = runs(Config(refresh_every=1, **kept), lengths, scores, **size)
    assert whole == runs(Config(**kept), lengths, scores, **size)


@examples(15)
@given(
    refresh_every=st.one_of(st.none(), st.integers(1, 6)), steps=st.integers(1, 14), length=st.integers(2, 20),
    seed=strategies.seeds(),
)  # fmt: skip
def test_5_the_momentum_moves_on_ceil_of_t_over_r_steps(
    refresh_every: int | None, steps: int, length: int, seed: int
) -> None:
    config = Config(ratio=0.0, min_budget=1, refresh_every=refresh_every)
    scores = strategies.draw_scores("uniform", (steps, 1, 1, 1, POSITIONS), seed)
    before: dict[int, float] = dict.fromkeys(range(length), 0.0)
    moved = 0
    for _, (momentum,) in runs(config, [length], scores):
        moved += any(before[position] != value for position, value in momentum.items() if position in before)
        before = momentum
    assert moved == (1 if refresh_every is None else math.ceil(steps / refresh_every))


@examples(15)
@given(
    lengths=lengths, kind=kinds, seed=strategies.seeds(), size=sizes, evict_after=st.integers(1, 4),
    endless=st.booleans(),
)  # fmt: skip
def test_6_outputs_are_the_uncompressed_models_until_the_first_eviction(
    lengths: list[int], kind: str, seed: int, size: Any, evict_after: int, endless: bool
) -> None:
    """And for ever if the budget holds the whole run. After it they are not, if anything of weight was evicted."""
    layers, heads = size["layers"], size.get("heads", 1)
    scores = strategies.draw_scores(kind, (STEPS, layers, len(lengths), heads, POSITIONS), seed)
    kept: dict[str, Any] = {"budget": 10**6} if endless else {"ratio": 0.6, "min_budget": 3, "evict_after": evict_after}
    run = SyntheticRun(Config(**kept), lengths, positions=POSITIONS, **size)
    for number, step in enumerate(scores, 1):
        outputs = run.step(step)
        for row, length in enumerate(lengths):
            full = torch.softmax(step[:, row].double().log()[..., : length + number], dim=-1)
            full = full * synthetic._norms(torch.arange(length + number))
            first = max(evict_after, run.cache.budget[row] + 1 - length)
            off = (outputs[:, row, :, : length + number] - full).abs().max()
            assert outputs[:, row, :, length + number :].abs().max() == 0
            if endless or number <= first:
                assert off < 1e-5
            else:
                assert off > 1e-6  # every token has a share of at least 1e-4 / 64 e^2


@examples(300)
@given(state=strategies.momenta())
def test_7_who_enters_at_the_mean_goes_only_if_all_are_equal(state: RetentionState) -> None:
    taken = torch.arange(state.positions.shape[1]) == state.free[:, None]
    others = (state.positions >= 0) & ~taken
    momentum, positions = enter(state.momentum, state.positions, state.free, state.length)
    free = next_free(momentum, positions, state.length, 0, 0)
    for row in range(len(free)):
        alive = state.momentum[row][others[row]].double()
        if not len(alive):
            continue
        assert float(momentum[row, state.free[row]]) == pytest.approx(float(alive.mean()), rel=1e-6)
        entered = float(momentum[row, state.free[row]])
        if entered == float(alive.min()):
            # Rounded to fp32 the mean is the minimum only if all are within an ulp of it. It ties then, and is the newest.
            assert float(alive.max()) == pytest.approx(float(alive.min()), rel=2e-7)
        assert free[row] != state.free[row]
        if not bool((state.momentum[row][positions[row] < 0] == -math.inf).any()):
            live = positions[row] >= 0
            least = min(zip(momentum[row][live].tolist(), positions[row][live].tolist(), strict=True))
            assert int(positions[row, free[row]]) == least[1]


@examples(200)
@given(state=strategies.momenta(), protect=st.sampled_from(((0, 0), (1, 0), (0, 2), (2, 1))), data=st.data())
def test_7_compaction_keeps_what_evicting_one_by_one_keeps(
    state: RetentionState, protect: Any, data: st.DataObject
) -> None:
    """Top B at once is B - 1 smallest (momentum, position) one after another, ties and protected tokens included."""
    counts = (state.positions >= 0).sum(-1).tolist()
    keep = [data.draw(st.integers(1, count)) for count in counts]
    newest = state.length - 1
    held = (state.positions >= 0) & ((state.positions < protect[0]) | (state.positions > newest[:, None] - protect[1]))
    keep = [max(number, int(fixed)) for number, fixed in zip(keep, held.sum(-1), strict=True)]
    chosen = survivors(state, keep, *protect)
    for row, number in enumerate(keep):
        alive = [
            (bool(held[row, slot]), float(state.momentum[row, slot]), int(state.positions[row, slot]))
            for slot in range(state.positions.shape[1])
            if state.positions[row, slot] >= 0
        ]
        expected = sorted(position for _, _, position in sorted(alive)[len(alive) - number :])
        assert state.positions[row, chosen[row, :number]].tolist() == expected


@examples(12)
@given(geometry=strategies.geometries(rows=3), kind=kinds, seed=strategies.seeds(), data=st.data())
def test_11_rows_do_not_see_each_other(geometry: Geometry, kind: str, seed: int, data: st.DataObject) -> None:
    """Permuting, adding and removing rows changes nothing for the others."""
    scores = scores_of(geometry, kind, seed)
    together = runs(geometry.config, geometry.lengths, scores, **_sizes(geometry))
    rows = range(len(geometry.lengths))
    order = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=4))
    chosen = [geometry.lengths[row] for row in order]
    others = runs(geometry.config, chosen, scores[:, :, order], **_sizes(geometry))
    for (positions, momenta), (theirs, their_momenta) in zip(together, others, strict=True):
        for place, row in enumerate(order):
            if theirs[place] != positions[row]:
                # Another batch may sum in another order; only what rounding decides may differ.
                assert tie(momenta[row], theirs[place], positions[row]) < synthetic.TIE
                return
            assert their_momenta[place] == pytest.approx(momenta[row], rel=1e-5)


def _sizes(geometry: Geometry) -> dict[str, int]:
    return {name: size for name, size in shape(geometry).items() if name != "positions"}


@examples(20)
@given(geometry=strategies.geometries(rows=2), kind=kinds, seed=strategies.seeds())
def test_12_sequences_do_not_see_each_other(geometry: Geometry, kind: str, seed: int) -> None:
    """Two caches of one compiled step, in turns: each as if it were alone, to the last bit."""
    first, second = scores_of(geometry, kind, seed), scores_of(geometry, kind, seed + 1)
    alone = [runs(geometry.config, geometry.lengths, scores, **_sizes(geometry)) for scores in (first, second)]
    pair = [SyntheticRun(geometry.config, geometry.lengths, **shape(geometry)) for _ in range(2)]
    for number in range(STEPS):
        for run, scores, seen in zip(pair, (first, second), alone, strict=True):
            run.step(scores[number])
            assert (run.retained, run.decided) == seen[number]


def test_bad_scripts_are_refused_by_name() -> None:
    run = SyntheticRun(Config(), [5], layers=2, positions=8)
    good = torch.ones(2, 1, 1, 8)
    with pytest.raises(errors.InputError, match=r"shape \(1, 1, 8\); \(2, 1, 1, 8\) is expected"):
        run.step(torch.ones(1, 1, 8))
    with pytest.raises(errors.InputError, match="1 of 16 values of the scores are not finite"):
        run.step(torch.where(torch.arange(8) == 3, torch.tensor([1.0, math.nan])[:, None], 1.0)[:, None, None])
    with pytest.raises(errors.InputError, match="must be positive"):
        run.step(good - 1)
    for _ in range(3):
        run.step(good)
    with pytest.raises(errors.InputError, match="A text of 9 tokens does not fit positions=8"):
        run.step(good)
    assert run.retained == [list(range(8))]
