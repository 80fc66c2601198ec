"""Explain what the passes did to a model's decode step, as text: their records, and the nodes that tell the story."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .. import api, debug
from ..errors import UnsupportedAttentionError, UnsupportedModelError
from ..huggingface.cache import InertiaCache
from ..passes import Marker, PassResult, find_marker
from ..passes.aliasing import Memory
from ..passes.contract import LAYER
from ..passes.metadata import fill_metadata

LONGEST_LIST = 6
"""A pass matches once per layer; more lines than this are cut to their beginning and end."""
LONGEST_EXCERPT = 60
"""Nodes of an excerpt; more are cut off and counted."""


def explain(model: Any) -> debug.Explanation:
    """Compile one decode step of a model (with backend "eager", so in seconds) and record what the passes did.

    Raises:
        UnsupportedModelError: the model, or an attention of its decode step, is refused.
    """
    compiled = api.compile(model, backend="eager")
    tokens = torch.arange(8, device=model.device).remainder(model.config.get_text_config(decoder=True).vocab_size)
    cache = InertiaCache()
    with debug.record() as collected, torch.no_grad():
        # A compiled model takes its cache under this name with every version of transformers.
        compiled(tokens[None], past_key_values=cache)
        compiled(tokens[None, -1:], past_key_values=cache)
    return collected[0]


def report(result: PassResult, width: int = 80) -> str:
    """Write a pass's records and how long it took; of a long list of matches, or of skips, the first three and the last."""
    milliseconds = result.seconds * 1e3
    took = f"{milliseconds:.0f}" if milliseconds >= 10 else f"{milliseconds:.1f}"
    lines = [f"{result.name}: {len(result.matched)} matched, {len(result.skipped)} skipped, {took} ms"]
    for sign, records in (("+", result.matched), ("-", result.skipped)):
        for record in _shortened(records):
            lines += _wrapped(f"  {sign} {record}", width)
    return "\n".join(lines)


def _shortened(records: Sequence[debug.MatchRecord]) -> list[str]:
    lines = [str(record) for record in records]
    if len(lines) > LONGEST_LIST:
        lines[3:-1] = [f"... {len(lines) - 4} more like these ..."]
    return lines


def _wrapped(line: str, width: int, indent: str = "      ") -> list[str]:
    """Break a line at its spaces; names that are longer than a line stay whole."""
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def refusal(error: UnsupportedModelError) -> list[str]:
    """Write why a model is refused: the class, layer, node and reason, then the rest of the message."""
    lines = [f"refused: {type(error).__name__}"]
    if not isinstance(error, UnsupportedAttentionError):
        return [*lines, "  layer   (the whole model)", "  node    (none)", f"  reason  {error}"]
    layer = "(the whole model)" if error.layer is None else error.layer
    lines += [f"  layer   {layer}", f"  node    {error.node or '(none)'}", f"  reason  {error.reason}"]
    return [*lines, *str(error).splitlines()[1:]]


# ---------------------------------------------------------------------- excerpts of the graphs


def excerpts(explanation: debug.Explanation, width: int = 80) -> list[tuple[str, list[str]]]:
    """Print the nodes that tell the story: the first layer's attention and the step's end, before and after.

    Returns:
        (title, lines of code) of each part; none of a graph in which the step is inside a region of the user's.
    """
    before, after = explanation.before_graph, explanation.after_graph
    if before is None or after is None or (marker := find_marker(before)) is None:
        return []
    fill_metadata(after)
    parts = {
        "before: the first layer's attention": traced_attention(explanation, marker),
        "after: the first layer's attention, with its scores and momentum": nodes_of_layer(after, 0),
        "before: the end of the step": [marker.node],
        "after: the end of the step": write_back(after, marker),
    }
    return [(title, code(nodes, width)) for title, nodes in parts.items() if nodes]


def traced_attention(explanation: debug.Explanation, marker: Marker) -> list[fx.Node]:
    """Collect the first layer's attention as traced: from the write into its key slots to its output."""
    nodes = list(marker.node.graph.nodes)
    name = next(record.node for record in explanation.result("find_attention").matched if record.layer == 0)
    output = next((place for place, node in enumerate(nodes) if node.name == name), None)
    if output is None:
        return []
    writers = set(Memory(marker.node.graph).writers(marker.keys[0]))
    begin = next((place for place, node in enumerate(nodes) if node in writers), output)
    return nodes[begin : output + 1]


def nodes_of_layer(graph: fx.Graph, layer: int) -> list[fx.Node]:
    """Collect the nodes that passes made for one cache layer."""
    return [node for node in graph.nodes if node.meta.get(LAYER) == layer]


def write_back(graph: fx.Graph, marker: Marker) -> list[fx.Node]:
    """Collect what took the marker's place: writes into the retention state, and what passes made to compute them."""
    traced = {node.name for node in marker.node.graph.nodes}
    memory, state = Memory(graph), {node.name for node in marker.state}
    todo = [
        node for holder in graph.find_nodes(op="placeholder") if holder.name in state for node in memory.writers(holder)
    ]
    chosen: set[fx.Node] = set()
    while todo:
        node = todo.pop()
        if node not in chosen and node.name not in traced and LAYER not in node.meta:
            chosen.add(node)
            todo.extend(node.all_input_nodes)
    return [node for node in graph.nodes if node in chosen]


# ---------------------------------------------------------------------- code


def code(nodes: Sequence[fx.Node], width: int = 80) -> list[str]:
    """Generate the Python code of some nodes of a graph, with the shapes that are known."""
    shown = nodes[:LONGEST_EXCERPT]
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in _flowing_in(shown):
        copies[node] = graph.placeholder(node.name)
    for node in shown:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].args = tuple(map(_by_its_ends, copies[node].args))
        copies[node].stack_trace = None  # or the user's lines are printed in between
    source = [
        line.strip() for line in graph.python_code("self", verbose=True).src.splitlines() if line.startswith("    ")
    ]
    statements = [line for line in source if line and not line.startswith("#")]
    lines = [part for line in statements for part in _statement(line, width)]
    return lines if len(shown) == len(nodes) else [*lines, f"... {len(nodes) - len(shown)} more ..."]


def _flowing_in(nodes: Sequence[fx.Node]) -> Iterable[fx.Node]:
    inside = set(nodes)
    return dict.fromkeys(other for node in nodes for other in node.all_input_nodes if other not in inside)


def _by_its_ends(value: Any) -> Any:
    """Shorten a list that has an entry per layer."""
    return [value[0], ..., value[-1]] if isinstance(value, (list, tuple)) and len(value) > LONGEST_LIST else value


def _statement(line: str, width: int) -> list[str]:
    """Write a statement as one would by hand: indexing, without ``x = None`` behind a last use, broken at `width`."""
    line = line.partition(";  ")[0].replace("slice(None, None, None)", ":").replace("Ellipsis", "...")
    line = re.sub(r"(?<=\w)\[\(([^()]*)\)\]", r"[\1]", line)  # x[(:, None)] -> x[:, None]
    target, sign, call = line.partition('" = ')
    if sign:  # a shape stays whole, and so does the name of an argument with its value
        line = target.replace(" ", "\xa0") + sign + call.replace(" = ", "\xa0=\xa0")
    return [part.replace("\xa0", " ") for part in _wrapped(line, width, "    ")]
