"""Run named passes over a decode graph: check, time, print and trace each one."""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from .. import debug
from ..errors import ConfigError, InertiaError, PassError
from .contract import Pass, PassOptions, find_marker, take_matches
from .emit_scores import emit_scores_pass
from .evict import evict_pass
from .find_attention import find_attention_pass
from .inline_regions import inline_regions_pass
from .lower import lower_pass
from .lower_enter import lower_enter_pass
from .outline_layers import outline_layers_pass
from .prove_attention import prove_attention_pass
from .share_symbols import share_symbols_pass
from .update_momentum import update_momentum_pass

PASSES: tuple[Pass, ...] = (
    inline_regions_pass,
    find_attention_pass,
    prove_attention_pass,
    lower_enter_pass,
    emit_scores_pass,
    update_momentum_pass,
    lower_pass,
    outline_layers_pass,
    evict_pass,
    share_symbols_pass,
)
"""All of them, in the order in which they run."""

OPTIONAL = ("lower_enter", "lower", "outline_layers", "share_symbols")
"""Names of the passes that may be left out: without them the step is slower, or takes longer to compile, and the same."""


def name_of(run: Any) -> str:
    """Name a pass: its function's name without ``_pass``, looked for through `functools.partial`."""
    while isinstance(run, functools.partial):
        run = run.func
    return getattr(run, "__name__", type(run).__name__).removesuffix("_pass")


def check_passes(passes: Sequence[Pass], disabled: Sequence[str]) -> None:
    """Check a list of passes, and the names of those that are left out of it.

    Raises:
        ConfigError: something is not a pass, a name is unknown or its pass needed, or the order cannot be right.
    """
    if isinstance(disabled, str) or not all(isinstance(name, str) for name in disabled):
        raise ConfigError(f"disable_passes={disabled!r} is not a list of names.")
    for run in passes:
        if not callable(run):
            raise ConfigError(
                f"passes has {run!r} in it, which is not a function (gm, example_inputs, *, options) -> gm."
            )
    names = [name_of(run) for run in passes]
    for name in disabled:
        if name not in names:
            raise ConfigError(f"disable_passes names {name!r}, which is no pass: there are {', '.join(names)}.")
        if name in map(name_of, PASSES) and name not in OPTIONAL:
            raise ConfigError(
                f"disable_passes names {name!r}, which the step needs to be right: only {', '.join(OPTIONAL)} may be left"
                " out. To see the step as traced, use passes=False."
            )
    needed = [name_of(run) for run in PASSES if name_of(run) not in OPTIONAL]
    missing = [name for name in needed if name not in names]
    if missing:
        raise ConfigError(f"passes lacks {', '.join(missing)}, which the step needs to be right.")
    ours = [name for name in names if name in map(name_of, PASSES)]
    if ours != [name for name in map(name_of, PASSES) if name in ours]:
        raise ConfigError(
            f"passes has {', '.join(ours)} in another order than {', '.join(map(name_of, PASSES))}, or one twice."
        )


def run_passes(
    gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions, passes: Sequence[Pass] = PASSES
) -> fx.GraphModule:
    """Run passes over one decode graph, one after the other.

    Each is timed, and its graph checked (`fx.Graph.lint`) and recompiled. :func:`inertia_fx.debug.record` blocks get the
    graph before and after every pass; with ``TORCH_TRACE`` set, `tlparse` shows them as artifacts.

    Args:
        gm: the graph as Dynamo traced it; changed in place.
        example_inputs: what it is going to be compiled with; entries may be replaced in place.
        options: what is compiled into it.
        passes: :data:`PASSES`, or your own list with all of the needed ones in it, in their order.

    Returns:
        The rewritten graph.

    Raises:
        ConfigError: `passes` or ``options.disable_passes`` is not usable.
        UnsupportedAttentionError: an attention is not understood.
        PassError: a pass raised something else, returned no graph, or left a broken one.
    """
    check_passes(passes, options.disable_passes)
    shown = debug.is_recorded() or debug.log.isEnabledFor(10)  # DEBUG
    before = text = debug.readable(gm) if shown else ""
    before_graph = _copy(gm.graph) if debug.is_recorded() else None
    results = []
    for number, run in enumerate(passes, 1):
        name = name_of(run)
        if name in options.disable_passes:
            results.append(debug.PassResult(name, (), (debug.MatchRecord(False, "switched off (disable_passes)"),)))
            continue
        _trace(gm, f"{number:02}_{name}_before")
        began = time.perf_counter()
        gm = _run(run, name, gm, example_inputs, options)
        records = take_matches(gm)
        seconds = time.perf_counter() - began
        _trace(gm, f"{number:02}_{name}_after")
        left, text = text, debug.readable(gm) if shown else ""
        matched = tuple(record for record in records if record.matched)
        skipped = tuple(record for record in records if not record.matched)
        results.append(debug.PassResult(name, matched, skipped, seconds, left, text))
        debug.log.debug("%s took %.0f ms and left\n%s", name, seconds * 1e3, text)
    if find_marker(gm.graph) is not None:
        raise PassError("the passes", "the marker is still in the graph, so the state would never move")
    after_graph = _copy(gm.graph) if debug.is_recorded() else None
    debug.publish(debug.Explanation(tuple(results), before, text, before_graph, after_graph))
    return gm


def _run(
    run: Pass, name: str, gm: fx.GraphModule, example_inputs: list[Tensor], options: PassOptions
) -> fx.GraphModule:
    try:
        result = run(gm, example_inputs, options=options)
    except InertiaError:
        raise
    except Exception as failure:
        raise PassError(name, f"it raised {type(failure).__name__}: {failure}") from failure
    if not isinstance(result, fx.GraphModule):
        raise PassError(name, f"it returned {type(result).__name__} instead of the graph module")
    try:
        result.graph.lint()
        result.recompile()
    except Exception as failure:
        raise PassError(name, f"it left a broken graph: {failure}") from failure
    return result


def _trace(gm: fx.GraphModule, name: str) -> None:
    """An artifact in torch's structured trace, where there is one."""
    torch._logging.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": f"inertia_fx_{name}", "encoding": "string"},
        payload_fn=lambda: debug.readable(gm),
    )


def _copy(graph: fx.Graph) -> fx.Graph:
    copied = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        values[node] = copied.node_copy(node, values.__getitem__)
    return copied
