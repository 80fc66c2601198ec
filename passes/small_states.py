"""Run pieces of a decode graph on small states, made up for it.

On the CPU, whatever device the graph is for; without gradients, guards or a trace in the global random state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from .aliasing import call, default_device, hint, on_device
from .contract import Marker, Refusal
from .nodes import attribute, describe, example
from .slices import Slice

LARGEST_TENSOR = 2**23
"""Elements of the largest tensor that slices are run with, if 16 slots leave the choice."""


@dataclasses.dataclass(frozen=True)
class SmallState:
    """A retention state to run slices on: [rows, slots], in no order of the text.

    Between 15 and 35 % of a row's slots are dead or closed, in each row another number.

    Args:
        slots: its size.
        seed: what it is drawn with.
        query: size of the queries' elements: small ones make attention flat, large ones pick out single slots.
        text: tokens that the longest row has seen, not fewer than slots.
        rows: the batch's, which :class:`Runner` fills in.
    """

    slots: int
    seed: int
    query: float = 1.0
    text: int = 1_000_000
    rows: int = 1

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw momentum fp32 and positions int64 [rows, slots], free and length int64 [rows].

        Positions lie near 0, near the end of the text and between in every row, so that a window or a bias of any width
        shows; momenta are 0, tiny, below 1 and large, so that a threshold does.
        """
        generator = torch.Generator().manual_seed(self.seed)
        near, far = (self.slots + 1) // 2, (self.slots + 2) // 4
        between = self.slots - near - far
        step = (self.text - far - near) / max(1, between)
        middle = near + ((torch.arange(between) + 0.5) * step).long()
        text = torch.cat([torch.arange(near), middle, self.text - far + torch.arange(far)])
        order = torch.stack([torch.randperm(self.slots, generator=generator) for _ in range(self.rows)])
        shorter = torch.arange(self.rows) % 500 if self.text >= 1_000_000 else torch.zeros(self.rows, dtype=torch.int64)
        positions = text[order]
        positions = torch.where(positions < near, positions, positions - shorter[:, None])
        sizes = torch.tensor([0.0, 1e-9, 1.0, 1e4], dtype=torch.float32)
        momentum = sizes[torch.randint(len(sizes), (self.rows, self.slots), generator=generator)]
        momentum = momentum * torch.rand(self.rows, self.slots, generator=generator, dtype=torch.float32)
        length = self.text - shorter
        free = torch.randint(self.slots, (self.rows,), generator=generator)
        share = 0.15 + 0.2 * torch.arange(self.rows) / max(1, self.rows)
        drawn = torch.rand(self.rows, self.slots, generator=generator)
        dead, closed = drawn < share[:, None] / 2, (drawn >= share[:, None] / 2) & (drawn < share[:, None])
        dead[torch.arange(self.rows), free] = True  # the slot that the new token takes
        closed &= ~dead
        keep = (free + 1) % self.slots  # a row is never empty
        for marks in (dead, closed):
            marks[torch.arange(self.rows), keep] = False
        momentum = torch.where(dead, -math.inf, torch.where(closed, math.inf, momentum))
        positions = torch.where(dead | closed, -1, positions)
        return momentum, positions, free, length


class Runner:
    """Runs slices on one small state.

    Args:
        marker: the graph's marker.
        state: the state to run on; its size is ignored where the graph has fixed it.
        dtype: the model's dtype.
        wide: run in fp64, in place of the model's dtype and fp32 alike.
        elements: of the largest tensor per slot of a row; a large batch that the graph has fixed gets fewer slots.
    """

    def __init__(self, marker: Marker, state: SmallState, dtype: torch.dtype, wide: bool, elements: int = 1) -> None:
        self.marker, self.dtype, self.wide = marker, dtype, wide
        rows, slots = example(marker.positions).shape
        self.sizes: dict[Any, int] = {}
        # As many rows as when it was traced: other sizes that are the batch's may be spelled with symbols of their own.
        state = dataclasses.replace(state, rows=hint(rows))
        state = dataclasses.replace(state, slots=min(state.slots, max(LARGEST_TENSOR // (elements * state.rows), 16)))
        slotted = [
            (marker.positions, 1),
            (marker.momentum, 1),
            *((buffer, 2) for buffer in (*marker.keys, *marker.values)),
        ]
        for node, dimension in slotted:
            self._fix(example(node).shape[dimension], state.slots)
        for node in marker.state:
            self._fix(example(node).shape[0], state.rows)
        self.state = dataclasses.replace(state, slots=self.size(slots), rows=self.size(rows))
        self.generator = torch.Generator().manual_seed(state.seed)

    def _fix(self, size: Any, value: int) -> None:
        if isinstance(size, torch.SymInt):
            for symbol in size.node.expr.free_symbols:
                self.sizes.setdefault(symbol, value)

    def size(self, size: Any) -> int:
        """Evaluate a size for this state, without fixing it for the compile."""
        if not isinstance(size, torch.SymInt):
            return int(size)
        expression = size.node.expr.subs(self.sizes)
        return hint(size) if expression.free_symbols else int(expression)

    def draw(self, piece: Slice, queries: Iterable[fx.Node] = ()) -> dict[fx.Node, Any]:
        """Draw a value for everything that a slice is given; the memory of `queries` at the state's query size."""
        state = dict(zip(self.marker.state, self.state.tensors(), strict=True))
        large = set(queries)
        values: dict[fx.Node, Any] = self._shared(piece, set(state))
        for node in piece.given:
            known = example(node)
            if node in values:
                continue
            if node in state:
                values[node] = state[node]
            elif isinstance(known, Tensor):
                values[node] = self._random(known, self.state.query if node in large else 1.0)
            elif isinstance(known, torch.SymInt):
                values[node] = self.size(known)
            elif isinstance(known, (int, float, bool)):
                values[node] = known
            elif isinstance(known, (torch.SymFloat, torch.SymBool)):
                values[node] = known.node.hint
            else:
                raise Refusal(f"'{node.name}', which it reads, is neither a tensor nor a number")
        return values

    def _shared(self, piece: Slice, state: set[fx.Node]) -> dict[fx.Node, Any]:
        """Draw inputs of the step that are views of one memory: what is written into one shows in the others."""
        groups: dict[int, list[fx.Node]] = {}
        for node in piece.given:
            if node.op == "placeholder" and isinstance(example(node), Tensor):
                groups.setdefault(example(node).untyped_storage()._cdata, []).append(node)
        values: dict[fx.Node, Any] = {}
        for group in groups.values():
            if len(group) == 1:
                continue
            if not state.isdisjoint(group) or len({example(node).dtype for node in group}) > 1:
                raise Refusal(f"{', '.join(node.name for node in group)} are one memory")
            views = []
            for node in group:
                known = example(node)
                sizes, strides = map(self.size, known.shape), map(self.size, known.stride())
                views.append((tuple(sizes), tuple(strides), self.size(known.storage_offset())))
            ends = [
                first + sum((n - 1) * step for n, step in zip(sizes, steps, strict=True))
                for sizes, steps, first in views
            ]
            memory = self._random(example(group[0]).new_empty(max(ends) + 1, device="cpu"), 1.0)
            values |= {node: memory.as_strided(*view) for node, view in zip(group, views, strict=True)}
        return values

    def _random(self, like: Tensor, scale: float) -> Tensor:
        sizes, strides = [self.size(size) for size in like.shape], [self.size(stride) for stride in like.stride()]
        if not like.dtype.is_floating_point:
            drawn = torch.randint(0, 2, sizes, generator=self.generator)
        else:
            drawn = torch.randn(sizes, generator=self.generator, dtype=torch.float64) * scale
        return torch.empty_strided(sizes, strides, dtype=self.cast(like.dtype)).copy_(drawn)

    def cast(self, dtype: torch.dtype) -> torch.dtype:
        """Map a dtype to the one that is run with."""
        return torch.float64 if self.wide and dtype in (torch.float32, self.dtype) else dtype

    def run(
        self, piece: Slice, values: dict[fx.Node, Any], after: Callable[[fx.Node], None] | None = None
    ) -> dict[fx.Node, Any]:
        """Run a slice; returns the values of all of its nodes.

        Args:
            values: what is given; tensors are written into where the slice writes.
            after: called with each node that has run.

        Raises:
            Refusal: a node cannot be run.
        """
        values = dict(values)
        with self.arithmetic():
            for node in piece.nodes:
                try:
                    values[node] = self._run(node, values)
                except Exception as failure:
                    raise Refusal(
                        f"it cannot be tried out, as {describe(node)} does not run on the CPU with example values"
                        f" ({type(failure).__name__}: {str(failure).splitlines()[0] if str(failure) else ''})"
                    ) from failure
                if after is not None:
                    after(node)
        return values

    def arithmetic(self) -> Any:
        """Enter what slices, and what they are compared with, run under."""
        return _Arithmetic(self.cast if self.wide else None)

    def _run(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "get_attr":
            value = attribute(node)
            return value.detach().cpu().to(self.cast(value.dtype)) if isinstance(value, Tensor) else value
        args, kwargs = on_device(fx.node.map_arg((node.args, dict(node.kwargs)), values.__getitem__), "cpu")
        return call(node, args, kwargs)


class _Arithmetic:
    """No gradients, factories on the CPU, the global random state untouched, dtypes mapped."""

    def __init__(self, cast: Callable[[torch.dtype], torch.dtype] | None) -> None:
        self._contexts: list[Any] = [torch.no_grad(), torch.random.fork_rng(devices=[]), default_device("cpu")]
        if cast is not None:
            self._contexts.append(_Cast(cast))

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *raised: Any) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*raised)


class _Cast(TorchDispatchMode):
    """Maps every dtype that an operator is given: a cast that changes no value of interest becomes none at all."""

    def __init__(self, cast: Callable[[torch.dtype], torch.dtype]) -> None:
        super().__init__()
        self.cast = cast

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self.cast(value) if isinstance(value, torch.dtype) else value for value in args]
        named = {
            name: self.cast(value) if isinstance(value, torch.dtype) else value
            for name, value in (kwargs or {}).items()
        }
        result = func(*args, **named)
        if isinstance(result, Tensor) and not any(
            map(_is_floating, (*args, *named.values()))
        ):  # made in the default dtype
            return result.to(self.cast(result.dtype))
        return result


def _is_floating(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return any(map(_is_floating, value))
    return isinstance(value, Tensor) and value.dtype.is_floating_point
