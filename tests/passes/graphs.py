"""Decode graphs of tiny decoders, as Dynamo hands them to a backend, and what tests of passes ask of them."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch

import inertia_fx
from inertia_fx import debug
from inertia_fx.cache import SlotCache
from inertia_fx.passes import PASSES, Marker, PassOptions, PassResult, find_marker, name_of, run_passes
from tests.common import spellings

CONFIG = inertia_fx.Config(ratio=0.5, min_budget=2)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """All decoders here share the code object of `PlainDecoder.step`, and with it Dynamo's recompile limit."""
    torch._dynamo.reset()


def prompted(model: spellings.PlainDecoder, length: int = 10, rows: int = 1, config: Any = CONFIG) -> SlotCache:
    """A cache that holds a prompt of `length` tokens per row."""
    cache = SlotCache(config)
    model.prompt(torch.arange(rows * length).reshape(rows, length) % 50, cache)
    return cache


def traced(attention: Any = spellings.sdpa_gqa, layers: int = 2, **decoder: Any) -> torch.fx.GraphModule:
    """The decode step's graph as Dynamo hands it to a backend."""
    graphs = []

    def catch(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(gm)
        return gm

    model = spellings.PlainDecoder(attention, layers, **decoder)
    cache = prompted(model)
    with torch.no_grad(), cache.step(1):
        torch.compile(model.step, backend=catch, fullgraph=True)(torch.tensor([[1]]), cache)
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


def steps(model: spellings.PlainDecoder, cache: SlotCache, number: int, **options: Any) -> tuple[list[Any], list[Any]]:
    """Greedy steps through `torch.compile(step, backend="inertia_fx")`: tokens and retained positions."""
    step = torch.compile(model.step, backend="inertia_fx", options={"backend": "eager"} | options, fullgraph=True)
    tokens, retained = [torch.full((cache.rows, 1), 3)], []
    with torch.no_grad():
        for _ in range(number):
            with cache.step(cache.rows):
                tokens.append(step(tokens[-1], cache).argmax(-1, keepdim=True))
            retained.append([row.tolist() for row in cache.retained_positions()])
    return [token.tolist() for token in tokens], retained
