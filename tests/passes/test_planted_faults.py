"""Faults that somebody could make in what proves the passes' rewrites: each must make a named check fail.

A check is a form of attention that has to be refused (or, the last one, matched). `FAULTS` says which check sees which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from inertia_fx.errors import UnsupportedAttentionError
from inertia_fx.passes import aliasing, check_mask, find_attention, prove_attention, slices, small_states
from tests.common.graphs import OtherwiseInOneLayer, fresh_dynamo, run_until, traced  # noqa: F401
from tests.passes import hostile

Patch = pytest.MonkeyPatch


def refused(attention: Any, **decoder: Any) -> Callable[[], None]:
    def check() -> None:
        gm = traced(attention, **({"layers": 1} | decoder))
        with pytest.raises(UnsupportedAttentionError):
            run_until(gm, "prove_attention")

    return check


def divided(q: Any, k: Any, v: Any, live: Any, extra: Any, rounding: str | None = None) -> Any:
    logits = torch.div(q @ hostile.repeat(k).mT, 3.0, rounding_mode=rounding)
    return F.softmax(logits + hostile.hidden(live), -1) @ hostile.repeat(v)


def floored(q: Any, k: Any, v: Any, live: Any, extra: Any) -> Any:
    return divided(q, k, v, live, extra, "floor")


CHECKS: dict[str, Callable[[], None]] = {
    "a write through a view": refused(hostile.transposed_attribute),
    "a write through a view of the query's memory": refused(hostile.memory_behind_the_query),
    "a write into the keys": refused(hostile.keys_grown),
    "a write by out=": refused(hostile.out_argument),
    "a window in the second layer": refused(None, decoder=OtherwiseInOneLayer.attending(hostile.window_of_thousands), layers=2),
    "fp8 in the second layer": refused(None, decoder=OtherwiseInOneLayer.attending(hostile.keys_through_fp8), layers=2),
    "another constant in the second layer": refused(
        None, decoder=OtherwiseInOneLayer.attending(floored, usual=divided), layers=2
    ),
    "a window of thousands": refused(hostile.window_of_thousands),
    "far positions": refused(hostile.far_positions),
    "keys through fp8": refused(hostile.keys_through_fp8),
    "uneven groups": refused(hostile.uneven_groups),
    "a mask that hides too little": refused(hostile.masked_with_little),
}  # fmt: skip


# ---------------------------------------------------------------------- faults


def no_views_are_followed(patch: Patch) -> None:
    real = aliasing._effects
    patch.setattr(aliasing, "_effects", lambda node, known: dataclasses.replace(real(node, known), shares=()))


def methods_alone_make_views(patch: Patch) -> None:
    real = aliasing._effects

    def effects(node: Any, known: Any) -> Any:
        seen = real(node, known)
        return seen if node.op == "call_method" else dataclasses.replace(seen, shares=())

    patch.setattr(aliasing, "_effects", effects)


def the_first_mask_alone_is_checked(patch: Patch) -> None:
    real = check_mask.check_mask
    seen: list[Any] = []

    def once(*arguments: Any) -> None:
        if not seen:
            seen.append(arguments)
            real(*arguments)

    patch.setattr(find_attention, "check_mask", once)
    patch.setattr(prove_attention, "STATES", prove_attention.STATES[:1])  # which a window of thousands does not cut


def masks_are_tried_on_few_slots(patch: Patch) -> None:
    patch.setattr(check_mask, "STATES", check_mask.STATES[:1])


def positions_are_small(patch: Patch) -> None:
    real = small_states.SmallState.tensors

    def tensors(self: Any) -> Any:
        momentum, positions, free, length = real(self)
        return momentum, positions.clamp(max=5000), free, length.clamp(max=5000)

    patch.setattr(small_states.SmallState, "tensors", tensors)


def the_first_layer_alone_is_proved(patch: Patch) -> None:
    patch.setattr(prove_attention._Proof, "signature", lambda proof: "alike")


def constants_are_no_part_of_reading_alike(patch: Patch) -> None:
    patch.setattr(prove_attention, "frozen", lambda value, number: None)


def writers_are_left_out_of_slices(patch: Patch) -> None:
    patch.setattr(slices.Slicer, "_writers", lambda *arguments: [])


def every_cast_is_undone(patch: Patch) -> None:
    real = small_states.Runner.cast

    def cast(self: Any, dtype: torch.dtype) -> torch.dtype:
        return torch.float64 if self.wide and dtype.is_floating_point else real(self, dtype)

    patch.setattr(small_states.Runner, "cast", cast)
    real_compare = prove_attention._Proof._compare
    patch.setattr(
        prove_attention._Proof, "_compare",
        lambda self, state, dtype, wide: real_compare(self, state, dtype, wide) if wide else 0.0,
    )  # fmt: skip


def keywords_are_not_looked_at(patch: Patch) -> None:
    """As if only positional arguments could be written into."""
    real = aliasing._effects

    def effects(node: Any, known: Any) -> Any:
        seen = real(node, known)
        return seen if "out" not in node.kwargs else dataclasses.replace(seen, writes=())

    patch.setattr(aliasing, "_effects", effects)


def outputs_are_not_compared(patch: Patch) -> None:
    real = prove_attention._agree
    patch.setattr(
        prove_attention, "_agree",
        lambda one, other, tolerance, what, on: 0.0 if "its output" in what else real(one, other, tolerance, what, on),
    )  # fmt: skip
    patch.setattr(prove_attention._Proof, "_bucketings", lambda proof, state: [])


FAULTS: dict[Callable[[Patch], None], str] = {
    no_views_are_followed: "a write through a view",
    methods_alone_make_views: "a write through a view",
    the_first_mask_alone_is_checked: "a window in the second layer",
    masks_are_tried_on_few_slots: "a window of thousands",
    positions_are_small: "far positions",
    the_first_layer_alone_is_proved: "fp8 in the second layer",
    constants_are_no_part_of_reading_alike: "another constant in the second layer",
    writers_are_left_out_of_slices: "a write into the keys",
    every_cast_is_undone: "keys through fp8",
    keywords_are_not_looked_at: "a write by out=",
    outputs_are_not_compared: "uneven groups",
}


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_fault(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_fault_is_caught(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        CHECKS[FAULTS[plant]]()
