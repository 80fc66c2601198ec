"""Prove each rewrite where it is made: run the traced attention beside what replaces it, on small states.

What `find_attention_pass` read is a proposal. Here the slice of the graph that computes a layer's attention is run as it
was traced, and the replacement on the same inputs:

    output     both must agree to rounding, and leave the memory they may write into the same
    weights    attention is linear in V: on values that are unit rows its output is the weights that it really uses. They
               must be non-negative, sum to 1 at most, and explain its output on other values
    scores     s must be what `pooled_scores` makes of those weights (the mean over the query heads, SPEC D4)

on a handful and on several hundred slots, with dead and closed ones, rows of unequal length, positions near 0 and near
10^6, attention from flat to a single slot; in fp64 and in the model's dtype. Layers whose slices read alike are proved once.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, fx

from ..errors import UnsupportedAttentionError
from ..kernels import reference
from .aliasing import described
from .contract import AttentionSite, PassOptions, Refusal, attention_sites, record_match, require_marker
from .emit_scores import additive_mask, is_valid
from .metadata import frozen
from .nodes import attribute, describe, dtype_of, example, user_line
from .slices import Slice, Slicer
from .small_states import Runner, SmallState

STATES = (
    SmallState(slots=7, seed=2, query=3.0),
    SmallState(slots=320, seed=3, query=0.05),
    SmallState(slots=300, seed=4, query=30.0),
)
"""In fp64. The model's dtype runs on the first two with queries of size 1, as larger logits are rounded too coarsely."""

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}
"""Largest difference, relative to the largest number compared. Constants of a graph may be rounded to fp32, so in fp64 too."""


def prove_attention_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Run every attention site beside its replacement; change nothing.

    Raises:
        UnsupportedAttentionError: they disagree, the weights are not those of an attention, or the site cannot be run.
    """
    marker = require_marker(gm)
    slicer = Slicer(gm.graph, marker)
    proved: dict[Any, AttentionSite] = {}
    for site in attention_sites(gm.graph):
        where = {"layer": site.layer, "node": site.output.name}
        try:
            proof = _Proof.of(site, slicer, options)
            key = proof.signature()
            if key in proved:
                record_match(gm, f"reads like layer {proved[key].layer}", **where)
                continue
            worst = proof.run()
        except Refusal as refusal:
            raise UnsupportedAttentionError(
                site.layer, site.output.name, refusal.reason, user_line(site.output)
            ) from refusal.__cause__
        proved[key] = site
        record_match(
            gm, f"proved on {len(STATES)} states, output and scores off by at most {worst:.1g} in fp64", **where
        )
    return gm


@dataclasses.dataclass(frozen=True)
class _Proof:
    """One site with the two slices that are compared: all of it, and what is left once it is replaced."""

    site: AttentionSite
    slicer: Slicer
    options: PassOptions
    traced: Slice
    kept: Slice
    queries: tuple[fx.Node, ...]

    @classmethod
    def of(cls, site: AttentionSite, slicer: Slicer, options: PassOptions) -> _Proof:
        marker, buffers = slicer.marker, (site.key, site.value)
        if slicer.place[marker.new_positions] > slicer.place[site.output]:
            raise Refusal("the new token enters the state after it: call cache.enter() at the start of the step")
        brought = [site.query, *buffers, marker.new_positions]
        brought += [node for node in (site.mask, site.scale) if isinstance(node, fx.Node)]
        path = slicer.between((site.query, *buffers), site.output)
        if slicer.memory.effects[site.output].writes:
            raise Refusal("its output writes into memory")
        kept = slicer.cut(brought, site.output, path, buffers)
        traced = slicer.cut([site.output, *brought], site.output, path, buffers)
        above, run = {site.query}, set(kept.nodes)
        for node in reversed(kept.nodes):
            if node in above:
                above.update(node.all_input_nodes)
        above = {node for node in above if node not in run and node not in buffers and node not in slicer.state}
        return cls(site, slicer, options, traced, kept, tuple(node for node in kept.given if node in above))

    def signature(self) -> Any:
        """What the proof depends on, hashable: equal ones need no second proof."""
        given = dict.fromkeys(other for node in self.traced.nodes for other in node.all_input_nodes)
        given |= dict.fromkeys(self.traced.given)  # in the order of their first use: placeholders stand in any
        run = set(self.traced.nodes)
        start = [node for node in given if node not in run]
        number = {node: index for index, node in enumerate((*start, *self.traced.nodes))}
        flows_in = [(described(node), str(_shape(node)), self._role(node)) for node in start]
        runs = [
            (node.op, _constant(node) or node.target, frozen(node.args, number), frozen(dict(node.kwargs), number))
            for node in self.traced.nodes
        ]
        site = self.site
        named = (site.query, site.mask, site.output, self.slicer.marker.new_positions)
        places = [None if node is None else number.get(node) for node in named]
        scale = number[site.scale] if isinstance(site.scale, fx.Node) else repr(site.scale)
        return (tuple(flows_in), tuple(runs), tuple(places), scale, site.mask_kind, site.kv_heads)

    def _role(self, node: fx.Node) -> str:
        state = self.slicer.marker.state
        if node in state:
            return f"state {state.index(node)}"
        return {self.site.key: "key", self.site.value: "value"}.get(node, "query" if node in self.queries else "")

    def run(self) -> float:
        """Compare on every state; the largest relative difference in fp64."""
        dtype = dtype_of(self.site.key) or torch.float32
        worst = 0.0
        for state in STATES:
            worst = max(worst, self._compare(state, dtype, wide=True))
        for state in STATES[:2] if dtype != torch.float64 else ():
            self._compare(dataclasses.replace(state, query=1.0), dtype, wide=False)
        return worst

    def _compare(self, state: SmallState, dtype: torch.dtype, wide: bool) -> float:
        site, marker = self.site, self.slicer.marker
        elements = site.kv_heads * max(int(example(node).shape[3]) for node in (site.key, site.value))
        runner = Runner(marker, state, dtype, wide, elements)
        drawn = runner.draw(self.traced, self.queries)
        on = (
            f"on a small state ({runner.state.slots} slots, {'float64' if wide else str(dtype).removeprefix('torch.')})"
        )
        tolerance = TOLERANCE.get(torch.float64 if wide else dtype, TOLERANCE[torch.bfloat16])
        traced = runner.run(self.traced, _copied(drawn))
        output = traced[site.output]
        values = runner.run(self.kept, _copied({node: drawn[node] for node in self.kept.given}))
        with runner.arithmetic():
            valid = is_valid(values[marker.new_positions])
            if site.mask is None:  # traced it reads every slot; that its replacement hides some is SPEC E8
                valid = torch.ones_like(valid)
            mask = additive_mask(None if site.mask is None else values[site.mask], site.mask_kind, valid)
            scale = values[site.scale] if isinstance(site.scale, fx.Node) else site.scale
            buffers = values[site.key], values[site.value]
            arguments = (values[site.query], *buffers, mask, valid, scale, site.kv_heads, self.options.scorer)
            try:
                expect, scores = reference.scored_attention(*arguments)
            except RuntimeError as failure:
                raise Refusal(f"what would replace it does not run on its inputs: {failure}, tried {on}") from failure
        if (output.shape, output.dtype) != (expect.shape, expect.dtype):
            raise Refusal(
                f"its output is {tuple(output.shape)} in {output.dtype} {on} where {tuple(expect.shape)} in"
                f" {expect.dtype} would replace it"
            )
        for node in self.traced.nodes if not wide else ():
            seen, known = traced[node], example(node)
            if isinstance(seen, Tensor) and isinstance(known, Tensor) and seen.dtype != known.dtype:
                raise Refusal(
                    f"{describe(node)} is computed in {known.dtype} in the step and in {seen.dtype} by itself, as under"
                    " torch.autocast"
                )
        worst = _agree(output, expect, tolerance, "its output differs from that of what would replace it", on)
        for node in self.kept.given:
            if isinstance(values[node], Tensor) and not torch.equal(_bits(values[node]), _bits(traced[node])):
                raise Refusal(f"'{node.name}' would not be left with the same contents, tried {on}")
        with runner.arithmetic():
            for buckets in self._bucketings(runner.state):
                sums = self._weights(runner, drawn, buckets)
                _check_weights(sums, tolerance, on)
                if buckets is None:  # a weight for every slot
                    grouped = sums.unflatten(1, (site.kv_heads, -1))
                    held = traced[site.value].to(sums.dtype)
                    explained = torch.matmul(grouped, held).flatten(1, 2).unsqueeze(2)
                    _agree(explained, output.to(sums.dtype), tolerance, "its weights depend on its values", on)
                    seen = reference.pooled_scores(grouped, traced[site.value], valid, self.options.scorer)
                    expected = scores
                elif self.options.scorer == "attention":  # the one that is linear: sums over the slots of a bucket
                    seen, expected = sums.mean(1), _in_buckets(scores, buckets, sums.shape[-1])
                else:
                    continue
                worst = max(
                    worst, _agree(seen.to(scores.dtype), expected, tolerance, "its weights are not its scores", on)
                )
        return worst

    def _bucketings(self, state: SmallState) -> list[Tensor | None]:
        """How slots share the columns of the values: one each where they fit, else twice at random."""
        width = example(self.site.value).shape[3]
        if state.slots <= width:
            return [None]
        generator = torch.Generator().manual_seed(state.seed)
        return [torch.randint(int(width), (state.slots,), generator=generator) for _ in range(2)]

    def _weights(self, runner: Runner, drawn: dict[fx.Node, Any], buckets: Tensor | None) -> Tensor:
        """[B, H, slots or buckets]: what the traced attention makes of values whose rows are unit vectors."""
        site = self.site
        values = _copied(drawn)
        held = values[site.value]
        slots, width = held.shape[2:]
        unit = torch.zeros(slots, width, dtype=held.dtype)
        unit[torch.arange(slots), torch.arange(slots) if buckets is None else buckets] = 1
        writers = set(self.slicer.memory.writers(site.value))

        def again(node: fx.Node) -> None:
            if node in writers:  # the new token's value too is a unit row
                held.copy_(unit)

        held.copy_(unit)
        weights = runner.run(self.traced, values, again)[site.output][:, :, 0]
        weights = weights.float() if weights.dtype.itemsize == 2 else weights
        return weights[..., :slots] if buckets is None else weights


def _check_weights(weights: Tensor, tolerance: float, on: str) -> None:
    if (
        bool((weights < -tolerance).any())
        or bool((weights.sum(-1) > 1 + tolerance).any())
        or bool(weights.isnan().any())
    ):
        raise Refusal(
            f"its weights over the values are not those of an attention: from {weights.min():.3g}, with sums up to"
            f" {weights.sum(-1).max():.3g}, tried {on}"
        )


def _in_buckets(scores: Tensor, buckets: Tensor, width: int) -> Tensor:
    return scores.new_zeros(scores.shape[0], width).index_add_(1, buckets, scores)


def _agree(one: Tensor, other: Tensor, tolerance: float, what: str, on: str) -> float:
    """The largest difference, relative to the largest number; a refusal if it is more than rounding."""
    size = max(float(other.abs().max()), float(one.abs().max()), 1e-30)
    difference = float((one.double() - other.double()).abs().max()) / size
    if not difference <= tolerance:  # NaN is no agreement
        raise Refusal(f"{what}: by {difference:.2g} relative, tried {on}")
    return difference


def _copied(values: dict[fx.Node, Any]) -> dict[fx.Node, Any]:
    """Copies, which share memory where the values do."""
    memory: dict[int, Any] = {}
    copies: dict[fx.Node, Any] = {}
    for node, value in values.items():
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in memory:
                memory[storage._cdata] = storage.clone()
            value = value.new_empty(0).set_(
                memory[storage._cdata], value.storage_offset(), value.size(), value.stride()
            )
        copies[node] = value
    return copies


def _bits(tensor: Tensor) -> Tensor:
    """NaN equals itself here."""
    return torch.nan_to_num(tensor, nan=1.25e30) if tensor.dtype.is_floating_point else tensor


def _shape(node: fx.Node) -> Any:
    value = example(node)
    return tuple(value.shape) if isinstance(value, Tensor) else value


def _constant(node: fx.Node) -> Any:
    """A constant's contents: its name says nothing."""
    if node.op != "get_attr":
        return None
    value = attribute(node)
    return ("constant", repr(value.tolist())) if isinstance(value, Tensor) else ("constant", id(value))
