"""What passes agree on: their options, the marker, attention sites, refusals, and records of what was matched.

A pass is a function ``x_pass(gm, example_inputs, *, options) -> gm``. All that one pass leaves for the next is in the
graph: the marker operator (until `evict_pass` replaces it) carries the state and the slot buffers, an attention site is in
the `meta` of its output node, scores are outputs of the scored attention, the momentum is an operand of the marker.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..debug import MatchRecord
from ..errors import UnsupportedAttentionError

SITE = "inertia_fx.site"
"""Key of `node.meta` under which an attention's output node carries its :class:`AttentionSite`."""

LAYER = "inertia_fx.layer"
"""Key of `node.meta` that tells which cache layer a node of ours belongs to."""

_MATCHES = "inertia_fx.matches"
_MOVED = "inertia_fx.moved"


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """What is compiled into a decode graph.

    Args:
        alpha, alpha_time, alpha_layer, aggregator, scorer: as in `inertia_fx.Config`.
        score: False compiles a step that leaves the momentum alone (Lazy's and Score-Free's other steps).
        backend: the inner compiler that the graph is rewritten for, a name that torch.compile knows or a callable.
        regions: False is short for ``disable_passes=["outline_layers"]``.
        disable_passes: names of optional passes that are left out, for bisecting.
    """

    alpha: float = 0.8
    alpha_time: float | None = None
    alpha_layer: float | None = None
    aggregator: str = "ema"
    scorer: str = "attention"
    score: bool = True
    backend: str | Callable[..., Any] = "inductor"
    regions: bool = True
    disable_passes: Sequence[str] = ()

    @property
    def last_layer_alone(self) -> bool:
        """Whether every layer's weight but the last one's is 0 (SPEC D11)."""
        layer_weight = self.alpha if self.alpha_layer is None else self.alpha_layer
        return self.aggregator == "single_step" or (self.aggregator == "ema" and layer_weight == 0)


class Pass(Protocol):
    """A graph pass. `example_inputs` are what the graph is going to be compiled with, and may be replaced in place."""

    def __call__(self, gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule: ...


# ---------------------------------------------------------------------- the marker


@dataclasses.dataclass(frozen=True)
class Marker:
    """The call of `inertia_fx::commit_step` in a graph, with its arguments by name (see `inertia_fx.ops.commit_step`)."""

    node: fx.Node
    momentum: fx.Node
    positions: fx.Node
    free: fx.Node
    length: fx.Node
    new_momentum: fx.Node
    new_positions: fx.Node
    keys: tuple[fx.Node, ...]
    values: tuple[fx.Node, ...]
    protect_first: int | fx.Node
    protect_recent: int | fx.Node

    @property
    def state(self) -> tuple[fx.Node, ...]:
        """The retention state's four tensors, as the step finds them."""
        return (self.momentum, self.positions, self.free, self.length)

    @property
    def device(self) -> torch.device:
        """Where the first layer's slots are."""
        return self.keys[0].meta["example_value"].device

    def set_momentum(self, moved: fx.Node) -> None:
        """Make the momentum `moved` [B, S] what the step writes back, where `moved` holds a token.

        Slots without a token keep their marks: the operand becomes ``where(valid, moved, entered)``.
        """
        graph, entered = self.node.graph, self.new_momentum
        with graph.inserting_before(self.node):
            valid = graph.call_function(operator.ge, (self.new_positions, 0))
            chosen = graph.call_function(torch.where, (valid, moved, entered))
        chosen.meta[_MOVED] = True
        self.node.replace_input_with(entered, chosen)

    @property
    def moved_and_entered(self) -> tuple[fx.Node, fx.Node]:
        """The momentum once scores have moved it, and as it was when the new token had entered; the same on other steps."""
        if _MOVED not in self.new_momentum.meta:
            return self.new_momentum, self.new_momentum
        _, moved, entered = self.new_momentum.args
        return moved, entered  # type: ignore[return-value]


_ARGUMENTS = tuple(field.name for field in dataclasses.fields(Marker))[1:]


def find_marker(graph: fx.Graph) -> Marker | None:
    """Find the graph's marker; ``None`` if the graph is not a decode step, or not one any more.

    Raises:
        UnsupportedAttentionError: the graph holds more than one.
    """
    packet = torch.ops.inertia_fx.commit_step
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in (packet, packet.default)]
    if not nodes:
        return None
    if len(nodes) > 1:
        raise UnsupportedAttentionError(
            None, nodes[1].name, f"{len(nodes)} decode steps in one graph; compile one step at a time"
        )
    arguments = dict(zip(_ARGUMENTS, nodes[0].args, strict=False)) | dict(nodes[0].kwargs)
    arguments["keys"], arguments["values"] = tuple(arguments["keys"]), tuple(arguments["values"])  # type: ignore[arg-type]
    return Marker(nodes[0], **arguments)  # type: ignore[arg-type]


def require_marker(gm: fx.GraphModule) -> Marker:
    """Find the graph's marker.

    Raises:
        UnsupportedAttentionError: the graph has none: it is no decode step, or `evict_pass` has run already.
    """
    marker = find_marker(gm.graph)
    if marker is None:
        raise UnsupportedAttentionError(
            None, None, "it has no marker: it is no decode step over a SlotCache, or its marker is replaced already"
        )
    return marker


# ---------------------------------------------------------------------- attention


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One layer's attention in the graph.

    Attributes:
        layer: index into the cache's layers.
        form: "sdpa" or "softmax".
        output: the node to replace, [B, H, 1, Dv].
        query: [B, H, 1, D]; key: [B, N, S, D] and value: [B, N, S, Dv] are the slot buffers themselves.
        mask: [B or 1, 1, 1, S]; ``None`` if it has none: then it attends to the valid slots.
        mask_kind: "add" (summands), "keep" (bool, true where attended) or "hide" (bool, true where not).
        scale: factor of the logits, a number or a node.
        kv_heads, groups: N and H / N.
    """

    layer: int
    form: str
    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: fx.Node | None
    mask_kind: str
    scale: float | fx.Node
    kv_heads: int
    groups: int

    def __str__(self) -> str:
        heads = f"{self.kv_heads * self.groups} query / {self.kv_heads} key-value heads"
        scale = f"{self.scale:.6g}" if isinstance(self.scale, float) else self.scale
        return f"{self.form}, {heads}, scale {scale}"


def attention_sites(graph: fx.Graph) -> tuple[AttentionSite, ...]:
    """Collect the sites that `find_attention_pass` left in the graph, in the cache's order."""
    sites = (node.meta[SITE] for node in graph.nodes if SITE in node.meta)
    return tuple(sorted(sites, key=lambda site: site.layer))


class Refusal(Exception):
    """Why a candidate is not an attention that can be rewritten; becomes an error that names layer, node and line."""

    def __init__(self, reason: str, kind: type[UnsupportedAttentionError] = UnsupportedAttentionError) -> None:
        super().__init__(reason)
        self.reason, self.kind = reason, kind


# ---------------------------------------------------------------------- records


def record_match(gm: fx.GraphModule, detail: str, **where: Any) -> None:
    """Note that the running pass matched something. `where` is layer, node, into, as in :class:`MatchRecord`."""
    gm.meta.setdefault(_MATCHES, []).append(MatchRecord(True, detail, **where))


def record_skip(gm: fx.GraphModule, detail: str, **where: Any) -> None:
    """Note what the running pass left as it is, and why."""
    gm.meta.setdefault(_MATCHES, []).append(MatchRecord(False, detail, **where))


def take_matches(gm: fx.GraphModule) -> tuple[MatchRecord, ...]:
    """Remove and return what has been noted on a graph so far."""
    return tuple(gm.meta.pop(_MATCHES, ()))
