"""`gpu_check.py`: every kernel against its definition in `kernels/reference.py`, which is fed fp64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from gpu_check_report import Row, Setting
from torch import Tensor
from torch.utils import deterministic

from inertia_fx.kernels import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

OUTPUT_TOLERANCE = {BF16: 1e-2, FP16: 2e-3, FP32: 2e-5}
"""Largest error of an output over the largest output: a few roundings of the model's dtype, in which the probabilities
are multiplied with the values (reference.py does the same)."""

SCORE_TOLERANCE = 5e-4
"""Largest relative error of a score, whatever the model's dtype: scores are fp32 throughout (SPEC D8), but for 2 ulp of
the hardware's exp2 and the order of summation, which logits of size 10 amplify tenfold."""

DEFINITION_TOLERANCE = {BF16: 0.2, FP16: 0.03, FP32: 5e-4}
"""The same where the definition itself runs, on a CPU: its logits are rounded to the model's dtype, which costs its
outputs accuracy as well."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One launch of the attention kernels. `scorer` None is unscored; `blend` is (old weight, new weight) or None."""

    dtype: torch.dtype
    rows: int
    kv_heads: int
    groups: int
    slots: int
    width: int
    value_width: int | None = None
    scorer: str | None = "attention"
    softcap: float = 0.0
    sink: bool = False
    blend: tuple[float, float] | None = (0.8, 0.2)

    def __str__(self) -> str:
        shape = f"{self.rows}x{self.kv_heads * self.groups}/{self.kv_heads}x{self.slots}x{self.width}"
        extra = [f"Dv={self.value_width}"] * (self.value_width is not None) + [self.scorer or "unscored"]
        extra += ["softcap"] * (self.softcap > 0) + ["sink"] * self.sink
        return " ".join([str(self.dtype).removeprefix("torch."), shape, *extra])


CASES = (
    Case(BF16, 1, 8, 4, 65536, 128),
    Case(BF16, 8, 8, 4, 6400, 128),
    Case(BF16, 3, 8, 4, 6401, 128, scorer=None),
    Case(BF16, 128, 8, 4, 130, 128, blend=None),
    Case(FP16, 3, 8, 4, 1000, 128, scorer="vnorm"),
    Case(FP32, 3, 2, 4, 777, 128, scorer="entropy"),
    Case(BF16, 2, 8, 1, 1000, 64),
    Case(BF16, 2, 4, 2, 1000, 80, blend=(0.0, 1.0)),
    Case(BF16, 2, 2, 8, 1000, 256, scorer="vnorm"),
    Case(BF16, 2, 2, 16, 1000, 128, scorer="entropy"),
    Case(BF16, 2, 1, 64, 1000, 128),
    Case(BF16, 2, 1, 71, 1000, 64, scorer="vnorm"),
    Case(BF16, 2, 4, 8, 1000, 192, value_width=128, scorer="vnorm"),
    Case(BF16, 2, 4, 2, 1000, 128, softcap=30.0),
    Case(BF16, 2, 8, 8, 1000, 64, sink=True),
    Case(FP32, 2, 2, 4, 1000, 64, softcap=30.0, sink=True, scorer="vnorm"),
    Case(FP32, 2, 2, 4, 1000, 256),
    Case(FP32, 2, 1, 40, 1000, 128),
    Case(FP32, 2, 2, 3, 1000, 80, scorer=None),
    Case(FP16, 2, 2, 4, 1000, 64, blend=(1.0, 1.0)),
    Case(BF16, 2, 2, 4, 1, 128),
    Case(BF16, 5, 3, 3, 17, 64),
)

TINY_CASES = tuple(dataclasses.replace(case, rows=min(case.rows, 3), slots=min(case.slots, 90)) for case in CASES)


def tensors_of(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Random tensors. Some slots are dead, whole tiles of them too; a dead slot holds something that would be noticed."""
    generator = torch.Generator(device).manual_seed(case.slots + case.width)
    heads, value_width = case.kv_heads * case.groups, case.value_width or case.width

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    live = torch.rand(case.rows, case.slots, generator=generator, device=device) < 0.7
    live[0, : case.slots // 3] = False
    live[-1, : 2 * case.slots // 3] = False
    live[:, -1] = True
    dead = ~live[:, None, :, None]
    return {
        "query": (normal(case.rows, heads, 1, case.width) * 2).to(case.dtype),
        "key": normal(case.rows, case.kv_heads, case.slots, case.width).masked_fill_(dead, 30.0).to(case.dtype),
        "value": normal(case.rows, case.kv_heads, case.slots, value_width).masked_fill_(dead, 30.0).to(case.dtype),
        "mask": torch.where(live, 0.0, -math.inf)[:, None, None, :],
        "live": live,
        "sink": normal(heads),
        # As in a decode step: a dead slot's momentum is -inf, and a weight of 0 must drop it.
        "old": torch.where(live, normal(case.rows, case.slots).abs() / case.slots, -math.inf),
    }


def definition(case: Case, given: dict[str, Tensor]) -> tuple[Tensor, Tensor | None]:
    """What `reference.py` says, with operands of whatever dtype they are."""
    arguments = (given["query"], given["key"], given["value"], given["mask"])
    scale, sink = 1 / math.sqrt(case.width), given["sink"] if case.sink else None
    if case.scorer is None:
        return reference.slot_attention(*arguments, scale, case.kv_heads, case.softcap, sink), None
    output, scores = reference.scored_attention(
        *arguments, given["live"], scale, case.kv_heads, case.scorer, case.softcap, sink
    )
    return output, scores if case.blend is None else reference.blend(given["old"], scores, *case.blend)


def kernels(case: Case, given: dict[str, Tensor], setting: Setting) -> tuple[Tensor, Tensor | None]:
    """What the kernels say; their definition where there is no GPU to run them."""
    if not setting.on_gpu:
        return definition(case, given)
    from inertia_fx.kernels import scored_attention

    old_weight, new_weight = case.blend or (0.0, 1.0)
    with launching_directly():
        return scored_attention.scored_attention(
            *(given[name] for name in ("query", "key", "value", "mask", "live")),
            1 / math.sqrt(case.width),
            case.kv_heads,
            case.scorer,
            old=given["old"] if case.blend is not None and case.scorer is not None else None,
            old_weight=old_weight,
            new_weight=new_weight,
            softcap=case.softcap,
            sink=given["sink"] if case.sink else None,
            processors=setting.processors,
        )


@contextlib.contextmanager
def launching_directly() -> Iterator[None]:
    """Without the dispatch of a higher-order operator, about a millisecond per launch, that `wrap_triton` is for tracing."""
    from torch._library.triton import set_wrap_triton_enabled

    with set_wrap_triton_enabled(False):
        yield


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every `empty` is full of NaN: a kernel that leaves a hole, or reads what it did not write, is found out."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    filled, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, True
    try:
        yield
    finally:
        deterministic.fill_uninitialized_memory = filled
        torch.use_deterministic_algorithms(before)


def attention(setting: Setting) -> Iterator[Row]:
    """Outputs and scores (or the blend with the old momentum) of every case."""
    for case in TINY_CASES if setting.tiny else CASES:
        given = tensors_of(case, setting.device)
        with poisoned_memory():
            output, scores = kernels(case, given, setting)
        wide = {name: given[name].double() for name in ("query", "key", "value")}
        if case.scorer == "vnorm":
            wide["value"] = given["value"].float()  # the definition takes norms in fp32
        expect, expect_scores = definition(case, given | wide)
        del wide
        error = float((output - expect).abs().max() / expect.abs().max())
        figures: dict[str, Any] = {"output error": error}
        tolerance = OUTPUT_TOLERANCE[case.dtype] * (1 if setting.on_gpu else 2)
        right = output.dtype == case.dtype and error <= tolerance
        if scores is not None and expect_scores is not None:
            live = given["live"]
            score_error = relative_error(scores[live], expect_scores[live])
            figures["score error"] = score_error
            right &= score_error <= (SCORE_TOLERANCE if setting.on_gpu else DEFINITION_TOLERANCE[case.dtype])
            if case.blend is None or case.blend[0] == 0:
                right &= bool((scores[~live] == 0).all())
        yield Row(str(case), figures, is_right=right)
        setting.free_memory()


def relative_error(got: Tensor, expect: Tensor) -> float:
    """The largest, of what is not vanishingly small (a millionth of the largest)."""
    floor = 1e-6 * expect.abs().max().clamp(min=1e-30)
    return float(((got.double() - expect.double()).abs() / (expect.double().abs() + floor)).max())


# ---------------------------------------------------------------------- who enters, who leaves, who stays


def state_of(rows: int, slots: int, device: torch.device) -> list[Tensor]:
    """Momentum with many ties, dead and closed slots, positions in any order; the slot to fill; tokens seen."""
    generator = torch.Generator(device).manual_seed(slots)
    positions = torch.stack([torch.randperm(slots, generator=generator, device=device) for _ in range(rows)])
    momentum = torch.randint(0, 4, (rows, slots), generator=generator, device=device) / 7 + 0.01
    kind = torch.rand(rows, slots, generator=generator, device=device)
    kind[-1] = 1  # no dead slot in the last row: somebody has to go
    momentum[kind < 0.1], momentum[(kind >= 0.1) & (kind < 0.2)] = -math.inf, math.inf
    positions[kind < 0.2] = -1
    free = torch.randint(0, slots, (rows,), generator=generator, device=device)
    return [momentum, positions, free, torch.full((rows,), slots, device=device)]


def bookkeeping(setting: Setting) -> Iterator[Row]:
    """Enter, evict and gather. Exact, but for the last bit of the mean, whose sum may run in another order."""
    shapes = ((3, 33), (2, 90)) if setting.tiny else ((1, 65537), (8, 6401), (128, 130), (3, 1))
    for rows, slots in shapes:
        state = state_of(rows, slots, setting.device)
        momentum, positions = _enter(setting, *state)
        expect_momentum, expect_positions = reference.enter(*state)
        right = torch.equal(positions, expect_positions) and torch.allclose(
            momentum, expect_momentum, rtol=3e-7, atol=0
        )
        yield Row(f"enter {rows}x{slots}", {"equal": right}, is_right=right)
        for protected in ((0, 0), (4, slots // 8)):
            marks = momentum.clone()
            moved = torch.where(positions >= 0, momentum * 2, 0.125)  # whatever the layers make of dead slots
            ours, expect = [t.clone() for t in state], [t.clone() for t in state]
            _evict(setting, ours, moved, marks, positions, *protected)
            _evict_by_definition(expect, moved, marks, positions, *protected)
            right = all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expect, strict=True))
            yield Row(f"evict {rows}x{slots} protect {protected}", {"equal": right}, is_right=right)
    for dtype, width in ((BF16, 128), (FP32, 80), (FP16, 20)):
        buffer = torch.randn(2, 3, 200, width, device=setting.device).to(dtype)
        index = torch.rand(2, 200, device=setting.device).argsort(1)[:, :37]
        with poisoned_memory():
            got = _gather(setting, buffer, index, 41)
        expect = torch.zeros(2, 3, 41, width, dtype=dtype, device=setting.device)
        expect[:, :, :37] = buffer.gather(2, index[:, None, :, None].expand(2, 3, 37, width))
        right = torch.equal(got, expect)
        yield Row(f"gather {str(dtype).removeprefix('torch.')} {width}", {"equal": right}, is_right=right)


def bookkeeping_times(setting: Setting) -> Iterator[Row]:
    """What a step pays for it, once for all layers."""
    for rows, slots in ((2, 90),) if setting.tiny else ((1, 65537), (1, 6554), (8, 6554)):
        states = [state_of(rows, slots, setting.device) for _ in range(4)]
        entered = [reference.enter(*state) for state in states]
        if setting.on_gpu:
            from inertia_fx.kernels import evict as ours
        enter, evict = (ours.enter, ours.evict) if setting.on_gpu else (reference.enter, _evict_in_place)
        entries = [functools.partial(enter, *state) for state in states]
        exits = [
            functools.partial(evict, *state, m, m, positions, 0, 0)
            for state, (m, positions) in zip(states, entered, strict=True)
        ]
        with launching_directly():
            times = {
                "enter us": setting.seconds_per_call(entries) * 1e6,
                "evict us": setting.seconds_per_call(exits) * 1e6,
            }
        yield Row(f"{slots:,} slots x {rows}", times)


def _evict_in_place(*arguments: Any) -> None:
    _evict_by_definition(list(arguments[:4]), *arguments[4:])


def _enter(setting: Setting, *state: Tensor) -> tuple[Tensor, Tensor]:
    if not setting.on_gpu:
        return reference.enter(*state)
    from inertia_fx.kernels import evict

    with poisoned_memory(), launching_directly():
        return evict.enter(*state)


def _evict(setting: Setting, state: list[Tensor], *arguments: Any) -> None:
    if not setting.on_gpu:
        return _evict_by_definition(state, *arguments)
    from inertia_fx.kernels import evict

    with poisoned_memory(), launching_directly():
        evict.evict(*state, *arguments)


def _evict_by_definition(
    state: list[Tensor], moved: Tensor, marks: Tensor, positions: Tensor, protect_first: int, protect_recent: int
) -> None:
    momentum = torch.where(positions >= 0, moved, marks)
    free = reference.next_free(momentum, positions, state[3], protect_first, protect_recent)
    for tensor, value in zip(state, (momentum, positions, free, state[3] + 1), strict=True):
        tensor.copy_(value)


def _gather(setting: Setting, buffer: Tensor, index: Tensor, capacity: int) -> Tensor:
    if setting.on_gpu:
        from inertia_fx.kernels import evict

        return evict.gather(buffer, index, capacity)
    from inertia_fx.slots import _take

    return _take(buffer, index, capacity)
