"""Decode graphs of tiny decoders, as Dynamo hands them to a backend, and what tests of passes ask of them."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx import debug
from inertia_fx.cache import SlotCache
from inertia_fx.kernels import targets
from inertia_fx.passes import PASSES, Marker, PassOptions, PassResult, find_marker, name_of, run_passes
from tests.common import spellings

CONFIG = inertia_fx.Config(ratio=0.5, min_budget=2)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """All decoders here share the code object of `TinyDecoder.step`, and with it Dynamo's recompile limit."""
    torch._dynamo.reset()


def prompted(model: spellings.TinyDecoder, length: int = 10, rows: int = 1, config: Any = CONFIG) -> SlotCache:
    """A cache that holds a prompt of `length` tokens per row."""
    cache = SlotCache(config)
    model.prompt(torch.arange(rows * length).reshape(rows, length) % 50, cache)
    return cache


class _Caught(Exception):
    pass


def traced(
    attention: Any = spellings.sdpa_gqa,
    layers: int = 2,
    decoder: Any = spellings.TinyDecoder,
    rows: int = 1,
    runs: bool = True,
) -> torch.fx.GraphModule:
    """The decode step's graph as Dynamo hands it to a backend. `runs` is False where it cannot run."""
    graphs = []

    def catch(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        if not runs:
            raise _Caught
        return gm

    model = decoder(attention, layers)
    cache = prompted(model, rows=rows)
    with contextlib.suppress(torch._dynamo.exc.BackendCompilerFailed), torch.no_grad(), cache.step(rows):
        torch.compile(model.step, backend=catch, fullgraph=True)(torch.ones(rows, 1, dtype=torch.int64), cache)
    assert len(graphs) == 1
    return graphs[0]


def marker_of(gm: torch.fx.GraphModule) -> Marker:
    marker = find_marker(gm.graph)
    assert marker is not None
    return marker


def options_of(**options: Any) -> PassOptions:
    return PassOptions(**({"backend": "eager"} | options))


def run_until(gm: torch.fx.GraphModule, last: str, **options: Any) -> torch.fx.GraphModule:
    """Run the passes up to and including one of them, without what is done around them."""
    for run in PASSES:
        gm = run(gm, [], options=options_of(**options))
        if name_of(run) == last:
            return gm
    raise AssertionError(last)


def run_all(gm: torch.fx.GraphModule, **options: Any) -> dict[str, PassResult]:
    """Run all passes; their results by name."""
    inputs: list[Any] = [None] * len(gm.graph.find_nodes(op="placeholder"))
    with debug.record() as seen:
        run_passes(gm, inputs, options=options_of(**options))
    return {result.name: result for result in seen[0].results}


def count(gm: torch.fx.GraphModule) -> collections.Counter[Any]:
    """How often each function and method is called."""
    return collections.Counter(node.target for node in gm.graph.nodes if node.op in ("call_function", "call_method"))


def steps(model: spellings.TinyDecoder, cache: SlotCache, number: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Greedy steps through `torch.compile(step, backend="inertia_fx")`: tokens and retained positions."""
    step = torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"} | options, fullgraph=True)
    tokens, retained = [torch.full((cache.rows, 1), 3)], []
    with torch.no_grad():
        for _ in range(number):
            with cache.step(cache.rows):
                tokens.append(step(tokens[-1], cache).argmax(-1, keepdim=True))
            retained.append([row.tolist() for row in cache.retained_positions()])
    return [token.tolist() for token in tokens], retained


class OtherwiseInOneLayer(spellings.TinyDecoder):
    """A decoder one of whose layers attends otherwise."""

    other: Any = None
    usual: Any = None
    place = 1

    @classmethod
    def attending(cls, other: Any, place: int = 1, usual: Any = spellings.sdpa_repeat) -> type[OtherwiseInOneLayer]:
        members = {"other": staticmethod(other), "usual": staticmethod(usual), "place": place}
        return type("OtherwiseInOneLayer", (cls,), members)

    def blocks(self, tokens: Any, attend: Any, cache: Any) -> Any:
        x = self.embed(tokens) * 2
        for index, (qkv, out) in enumerate(zip(self.qkv, self.out, strict=True)):
            q, k, v = qkv(x).unflatten(-1, (-1, self.width)).transpose(1, 2).split([4, 2, 2], dim=1)
            keys, values = cache.update(k, v, index)
            self.attention = self.other if index == self.place else self.usual
            x = x + out(attend(q, keys, values).transpose(1, 2).flatten(2))
        return self.head(x)


class Step:
    """A decode step's graph with what it was called with, on a cache of ten tokens and on one of several hundred.

    Args:
        dead: slots that hold no token any more; what they held is still in K and V.
        decoder: makes the model, from `attention` and layers=1.

    Raises whatever tracing raises: an attention that torch.compile does not take is no case for us.
    """

    def __init__(
        self,
        attention: Any,
        lengths: tuple[int, ...] = (10, 330),
        dead: tuple[int, ...] = (),
        decoder: Any = spellings.TinyDecoder,
    ) -> None:
        self.calls: list[list[Any]] = []
        torch._dynamo.reset()
        model = decoder(attention, layers=1)
        step = torch.compile(model.step, backend=self._catch, fullgraph=True)
        for length in lengths:
            cache = prompted(model, length, config=inertia_fx.Config(budget=1000))
            cache.state.momentum[:, dead], cache.state.positions[:, dead] = -math.inf, -1
            with torch.no_grad(), cache.step(1):
                step(torch.tensor([[1]]), cache)

    def _catch(self, gm: torch.fx.GraphModule, inputs: Any) -> Any:
        self.gm = gm

        def run(*arguments: Any) -> Any:
            self.calls.append([value.clone() if isinstance(value, torch.Tensor) else value for value in arguments])
            return gm(*arguments)

        return run

    def rewritten(self) -> torch.fx.GraphModule:
        """The graph after all passes; the traced one stays as it is.

        Raises:
            InertiaError: it is refused.
        """
        gm = torch.fx.GraphModule(self.gm, copied(self.gm.graph))
        return run_passes(gm, [None] * len(self.calls[0]), options=options_of())  # type: ignore[list-item]

    @torch.no_grad()
    def difference(self, gm: torch.fx.GraphModule) -> float:
        """How far another graph is from the traced one, over all calls: outputs, and floating-point memory written into.

        The momentum is left out: as traced it never moves.
        """
        names = [node.name for node in self.gm.graph.find_nodes(op="placeholder")]
        worst = 0.0
        for arguments in self.calls:
            given = [[value.clone() if isinstance(value, torch.Tensor) else value for value in arguments] for _ in "ab"]
            results = [list(run(*values)) for run, values in zip((self.gm, gm), given, strict=True)]
            for place, name in enumerate(names):
                if isinstance(arguments[place], torch.Tensor) and "momentum" not in name and "free" not in name:
                    for result, values in zip(results, given, strict=True):
                        result.append(values[place])
            for expect, got in zip(*results, strict=True):
                if not torch.equal(expect.isnan(), got.isnan()):  # max() does not see NaN
                    return math.inf
                expect, got = expect.nan_to_num(), got.nan_to_num()
                size = max(float(expect.abs().max()), 1e-30)
                worst = max(worst, float((expect.double() - got.double()).abs().max()) / size)
        return worst


def copied(graph: torch.fx.Graph) -> torch.fx.Graph:
    """A graph like this one, with its nodes' `meta`."""
    result = torch.fx.Graph()
    nodes: dict[Any, Any] = {}
    for node in graph.nodes:
        nodes[node] = result.node_copy(node, nodes.__getitem__)
    return result


def lower_to_triton(patch: pytest.MonkeyPatch) -> None:
    """Lower as on a CUDA device. The operators' bodies are then their definitions, as the tensors are on the CPU."""
    target = dataclasses.replace(targets._triton(), gather=targets.REFERENCE.gather)
    patch.setattr(targets, "target_for", lambda device, inner=None: target)
