"""Explain what the passes did to a model's decode step, as text."""

from __future__ import annotations

import re
from typing import Any

import torch

from .. import api, debug
from ..errors import UnsupportedAttentionError, UnsupportedModelError
from ..huggingface.cache import InertiaCache
from ..passes import PassResult

LONGEST_LIST = 6
"""A pass matches once per layer; more lines than this are cut to their beginning and end."""
LONGEST_EXCERPT = 60


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


def report(result: PassResult) -> str:
    """Write a pass's report; of a long list of matches the first three and the last."""
    matched = list(result.matched)
    if len(matched) > LONGEST_LIST:
        matched[3:-1] = [f"... {len(matched) - 4} more like these ..."]
    lines = [f"{result.name}: {len(result.matched)} matched, {len(result.skipped)} skipped"]
    lines += [f"  + {line}" for line in matched]
    lines += [f"  - {line}" for line in result.skipped]
    return "\n".join(lines)


def refusal(error: UnsupportedModelError) -> list[str]:
    """Write why a model is refused: the class, layer, node and reason, then the rest of the message."""
    lines = [f"refused: {type(error).__name__}"]
    if not isinstance(error, UnsupportedAttentionError):
        return [*lines, "  layer   (the whole model)", "  node    (none)", f"  reason  {error}"]
    layer = "(the whole model)" if error.layer is None else error.layer
    lines += [f"  layer   {layer}", f"  node    {error.node or '(none)'}", f"  reason  {error.reason}"]
    return [*lines, *str(error).splitlines()[1:]]


# ---------------------------------------------------------------------- excerpts of the graphs' text


def excerpts(explanation: debug.Explanation) -> list[tuple[str, list[str]]]:
    """Cut out of the graphs what tells the story: the first layer's attention, the step's end.

    Returns:
        (title, lines) of each part.
    """
    before, after = _statements(explanation.before), _statements(explanation.after)
    marker = next(line for line in before if ".inertia_fx.retain" in line)
    keys = re.search(r"\[(\w+)", marker)
    site = re.search(r" at '(\w+)'", explanation.results[0].matched[0])
    assert keys is not None
    assert site is not None
    write = f"{keys[1]}["  # the first layer's keys take the new token: its attention begins here
    names = [_assigned(line) for line in before]
    output = names.index(site[1])
    # The first statement behind the attention is in both graphs under the same name.
    behind = names[output + 1]
    result = [
        ("before: the first layer's attention", _between(before, write, behind)),
        ("after: the first layer's attention, with its scores and momentum", _between(after, write, behind)),
    ]
    last = names[before.index(marker) - 1]
    return [
        *result,
        ("before: the end of the step", [marker]),
        ("after: the end of the step", [line for line in _following(after, last) if not line.startswith("return")]),
    ]


def _statements(graph: str) -> list[str]:
    """List the graph's statements, without comments, names of inputs and the `; x = None` behind a last use."""
    lines = [line.strip() for line in graph.splitlines()]
    lines = [line.split(";  ")[0] for line in lines if line and not line.startswith(("#", "class ", "def "))]
    return [_as_written(line) for line in lines if not re.fullmatch(r"(\w+) = (?i:\1)", line)]


def _as_written(line: str) -> str:
    """Write indexing as one would by hand, and a long list of nodes by its ends."""
    line = line.replace("slice(None, None, None)", ":").replace("Ellipsis", "...")
    line = re.sub(r"\[\(([^()]*)\)\]", r"[\1]", line)
    return re.sub(r"\[(l_\w+), (?:\w+, ){2,}(\w+)\]", r"[\1, ..., \2]", line)


def _assigned(line: str) -> str:
    """Find the name that a statement defines."""
    return re.split(r"[:\s\[]", line, maxsplit=1)[0]


def _following(lines: list[str], name: str) -> list[str]:
    return lines[1 + next(index for index, line in enumerate(lines) if _assigned(line) == name) :]


def _between(lines: list[str], start: str, behind: str) -> list[str]:
    first = next(index for index, line in enumerate(lines) if line.startswith(start))
    chosen = lines[first:]
    stop = next((index for index, line in enumerate(chosen) if _assigned(line) == behind), len(chosen))
    if stop > LONGEST_EXCERPT:
        return [*chosen[:LONGEST_EXCERPT], f"... {stop - LONGEST_EXCERPT} more lines ..."]
    return chosen[:stop]
