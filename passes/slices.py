"""Run a piece of a decode graph on small states: what an attention site, or its mask, is computed from.

A slice goes from what the layer brings (the memory that holds its query, its slot buffers, the retention state) to a
target, in graph order, with every node that writes into memory that the slice reads before the target is computed. What
else flows in (a new key, a parameter) is drawn at random. It runs on the CPU, whatever device the graph is for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from .aliasing import Memory, call, default_device, hint, on_device
from .contract import Marker, Refusal
from .nodes import ancestors, describe, example

LARGEST_CONSTANT = 2**20
"""Elements of the largest constant that is run with as it is; larger ones are weights, and drawn at random."""

LARGEST_TENSOR = 2**23
"""Elements of the largest tensor that slices are run with, if 16 slots leave the choice."""


@dataclasses.dataclass(frozen=True)
class Slice:
    """A piece of a graph.

    Attributes:
        nodes: what to run, in graph order.
        given: what to start with, in graph order: the slot buffers, the state, whatever else flows in.
        targets: what it is run for.
    """

    nodes: tuple[fx.Node, ...]
    given: tuple[fx.Node, ...]
    targets: tuple[fx.Node, ...]


class Slicer:
    """Cuts slices out of one decode graph.

    Args:
        graph: as traced, with its marker.
        marker: the graph's marker.
    """

    def __init__(self, graph: fx.Graph, marker: Marker) -> None:
        self.marker = marker
        self.memory = Memory(graph)
        self.place = {node: index for index, node in enumerate(graph.nodes)}
        self.state = set(marker.state)
        self._foreign: dict[fx.Node, bool] = {}
        for node in graph.nodes:  # computed from more than the retention state, sizes and constants
            self._foreign[node] = (
                node not in self.state and isinstance(example(node), Tensor)
                if node.op == "placeholder"
                else any(self._foreign[other] for other in node.all_input_nodes)
            )

    def is_foreign(self, node: fx.Node) -> bool:
        """Tell whether a node depends on more than the retention state, sizes and constants."""
        return self._foreign[node]

    def cut(
        self, targets: Sequence[fx.Node], end: fx.Node, path: Iterable[fx.Node] = (), given: Iterable[fx.Node] = ()
    ) -> Slice:
        """Cut the slice for `targets`.

        Args:
            targets: what is wanted.
            end: node up to which writes count: what reads the slice's memory for the last time.
            path: nodes that are run although they depend on more than the retention state.
            given: nodes that are never looked behind.

        Raises:
            Refusal: something may write into the slice's memory, and whether it does cannot be seen.
        """
        always, known = set(path), {*given, *self.state}
        run: set[fx.Node] = set()
        start: set[fx.Node] = set()
        todo = list(targets)
        while todo:
            while todo:
                node = todo.pop()
                if node in run or node in start:
                    continue
                effects = self.memory.effects.get(node)
                shares = () if effects is None or not effects.known else effects.shares
                constant = node.op == "get_attr" and _is_small(example(node))
                if node in known or (node.op in ("placeholder", "get_attr") and not constant):
                    start.add(node)
                elif node in always or constant or not self._foreign[node] or shares:
                    run.add(node)
                    todo.extend(node.all_input_nodes)
                else:
                    start.add(node)
            todo.extend(self._writers([*run, *start], run, start, end))
        return Slice(self._ordered(run), self._ordered(start), tuple(targets))

    def _writers(self, held: list[fx.Node], run: set[fx.Node], start: set[fx.Node], end: fx.Node) -> list[fx.Node]:
        found = []
        for root in {self.memory.root(node) for node in held}:
            begin = min(self.place[node] for node in held if self.memory.root(node) is root)
            for writer in self.memory.writers(root):
                if writer in run or not begin < self.place[writer] < self.place[end]:
                    continue
                if not self.memory.effects[writer].known:
                    raise Refusal(
                        f"{describe(writer)} may write into '{root.name}', which it reads: it has no schema that says"
                        " what it writes, or could not be run on example values"
                    )
                run.add(writer)
                start.discard(writer)
                found.extend(writer.all_input_nodes)
        return found

    def _ordered(self, nodes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(sorted(nodes, key=self.place.__getitem__))

    def between(self, sources: Iterable[fx.Node], target: fx.Node) -> set[fx.Node]:
        """Collect the nodes on the way from any of `sources` to `target`, the sources left out."""
        sources = set(sources)
        above = set(ancestors(target))
        found: set[fx.Node] = set()
        todo = list(sources)
        while todo:
            for user in todo.pop().users:
                if user in above and user not in found and user not in sources:
                    found.add(user)
                    todo.append(user)
        return found


def _is_small(value: Any) -> bool:
    return not isinstance(value, Tensor) or math.prod(map(hint, value.shape)) <= LARGEST_CONSTANT


# ---------------------------------------------------------------------- states


@dataclasses.dataclass(frozen=True)
class SmallState:
    """A retention state to run slices on: [rows, slots], in no order of the text.

    Between 15 and 35 % of a row's slots are dead or closed, in each row another number.

    Args:
        slots, rows: its size.
        seed: what it is drawn with.
        query: size of the queries' elements: small ones make attention flat, large ones pick out single slots.
        text: tokens that the longest row has seen, not fewer than slots.
    """

    slots: int
    rows: int
    seed: int
    query: float = 1.0
    text: int = 1_000_000

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
        owner = piece.nodes[0].graph.owning_module if piece.nodes else None
        with self.arithmetic():
            for node in piece.nodes:
                try:
                    values[node] = self._run(node, values, owner)
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

    def _run(self, node: fx.Node, values: dict[fx.Node, Any], owner: Any) -> Any:
        if node.op == "get_attr":
            value = owner
            for name in str(node.target).split("."):
                value = getattr(value, name)
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
