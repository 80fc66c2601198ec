"""Check the state kernels (enter, evict, gather) against their definitions, and time them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from inertia_fx.kernels import reference

from .report import Row, Setting, launching_directly, poisoned_memory


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
    enter, evict, gather = _launches(setting)
    shapes = ((3, 33), (2, 90)) if setting.tiny else ((1, 65537), (8, 6401), (128, 130), (3, 1))
    for rows, slots in shapes:
        state = state_of(rows, slots, setting.device)
        with poisoned_memory(), launching_directly():
            momentum, positions = enter(*state)
        expect_momentum, expect_positions = reference.enter(*state)
        right = torch.equal(positions, expect_positions) and torch.allclose(
            momentum, expect_momentum, rtol=3e-7, atol=0
        )
        yield Row(f"enter {rows}x{slots}", {"equal": right}, is_right=right)
        for protected in ((0, 0), (4, slots // 8)):
            marks = momentum.clone()
            moved = torch.where(positions >= 0, momentum * 2, 0.125)  # whatever the layers make of dead slots
            ours, expect = [t.clone() for t in state], [t.clone() for t in state]
            with poisoned_memory(), launching_directly():
                evict(*ours, moved, marks, positions, *protected)
            _evict_by_definition(*expect, moved, marks, positions, *protected)
            right = all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expect, strict=True))
            yield Row(f"evict {rows}x{slots} protect {protected}", {"equal": right}, is_right=right)
    for dtype, width in ((torch.bfloat16, 128), (torch.float32, 80), (torch.float16, 20)):
        buffer = torch.randn(2, 3, 200, width, device=setting.device).to(dtype)
        index = torch.rand(2, 200, device=setting.device).argsort(1)[:, :37]
        with poisoned_memory():
            got = gather(buffer, index, 41)
        taken = torch.zeros(2, 3, 41, width, dtype=dtype, device=setting.device)
        taken[:, :, :37] = buffer.gather(2, index[:, None, :, None].expand(2, 3, 37, width))
        right = torch.equal(got, taken)
        yield Row(f"gather {str(dtype).removeprefix('torch.')} {width}", {"equal": right}, is_right=right)


def bookkeeping_times(setting: Setting) -> Iterator[Row]:
    """What a step pays for it, once for all layers."""
    enter, evict, _ = _launches(setting)
    for rows, slots in ((2, 90),) if setting.tiny else ((1, 65537), (1, 6554), (8, 6554)):
        states = [state_of(rows, slots, setting.device) for _ in range(4)]
        entries, exits = [], []
        for state in states:
            momentum, positions = reference.enter(*state)
            entries.append(functools.partial(enter, *state))
            exits.append(functools.partial(evict, *state, momentum, momentum, positions, 0, 0))
        with launching_directly():
            times = {
                "enter us": setting.seconds_per_call(entries) * 1e6,
                "evict us": setting.seconds_per_call(exits) * 1e6,
            }
        yield Row(f"{slots:,} slots x {rows}", times)


def _launches(setting: Setting) -> tuple[Callable[..., Any], ...]:
    """Enter, evict and gather: the kernels, or their definitions where there is no GPU to run them."""
    if setting.on_gpu:
        from inertia_fx.kernels.triton import state

        return state.enter, state.evict, state.gather
    from inertia_fx.kernels.targets import REFERENCE

    return reference.enter, _evict_by_definition, REFERENCE.gather


def _evict_by_definition(
    momentum: Tensor, positions: Tensor, free: Tensor, length: Tensor,
    moved: Tensor, marks: Tensor, new_positions: Tensor, protect_first: int, protect_recent: int,
) -> None:  # fmt: skip
    momentum.copy_(torch.where(new_positions >= 0, moved, marks))
    free.copy_(reference.next_free(momentum, new_positions, length, protect_first, protect_recent))
    positions.copy_(new_positions)
    length.add_(1)
