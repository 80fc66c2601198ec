"""Cut a piece out of a decode graph: what an attention site, or its mask, is computed from.

A slice goes from what the layer brings (the memory that holds its query, its slot buffers, the retention state) to a
target, in graph order, with every node that writes into memory that the slice reads before the target is computed. What
else flows in (a new key, a parameter) is drawn at random, when it is run (`small_states.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor, fx

from .aliasing import Memory, hint
from .contract import Marker, Refusal
from .nodes import ancestors, describe, example

LARGEST_CONSTANT = 2**20
"""Elements of the largest constant that is run with as it is; larger ones are weights, and drawn at random."""


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
