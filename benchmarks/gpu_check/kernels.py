"""Check every attention kernel against its definition in `kernels/reference.py`, which is fed fp64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from inertia_fx.kernels import reference

from .report import Row, Setting, launching_directly, poisoned_memory

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
    from inertia_fx.kernels.triton.attention import scored_attention

    old_weight, new_weight = case.blend or (0.0, 1.0)
    with launching_directly():
        return scored_attention(
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
