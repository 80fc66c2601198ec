"""Find every layer's attention over the slot buffers, or say why not.

Two forms are read, each with or without the expansion of KV heads to query heads:

    SDPA      scaled_dot_product_attention(q, K, V, attn_mask=mask)
    softmax   matmul(q, K^T) [* or / scale] + mask -> softmax [-> cast, dropout(0)] -> matmul(., V)

K and V must be a layer's slot buffers as the marker lists them; the mask, added or filled in, must be the validity of the
slots. Reading is a proposal: `prove_attention_pass` runs what was read beside what it is replaced by.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..errors import UnsupportedAttentionError
from .check_mask import check_fill, check_mask
from .contract import SITE, AttentionSite, Marker, PassOptions, Refusal, record_match, record_skip, require_marker
from .nodes import (
    adds,
    ancestors,
    argument,
    calls,
    describe,
    dtype_of,
    is_softmax,
    multiplies_matrices,
    named_arguments,
    operands,
    shape_of,
    unwrap_cast,
    unwrap_repeat,
    unwrap_transpose,
    user_line,
)
from .slices import Slicer


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """An attention as it stands in the graph, nothing checked yet."""

    form: str
    output: fx.Node
    query: Any
    key: Any
    value: Any
    mask: Any
    mask_kind: str
    scale: Any
    fill: Any = None
    """What hidden slots get as logits, where the mask is filled in."""


def find_attention_pass(gm: fx.GraphModule, example_inputs: list[Tensor], *, options: PassOptions) -> fx.GraphModule:
    """Find the attention of every cache layer and leave an :class:`AttentionSite` in its output node's `meta`.

    Raises:
        UnsupportedAttentionError: a layer has no attention, more than one, or one that is not understood.
        PositionBiasError: the reason is a bias that depends on positions.
    """
    marker = require_marker(gm)
    slicer = Slicer(gm.graph, marker)
    layer_of = {key: index for index, key in enumerate(marker.keys)}
    sites: dict[int, AttentionSite] = {}
    refused: dict[int, tuple[fx.Node, Refusal]] = {}
    masks: set[tuple[fx.Node, str]] = set()
    for node in gm.graph.nodes:
        if not _is_attention(node):
            continue
        reached = [layer_of[up] for up in ancestors(node) if up in layer_of and _feeds(node, up)]
        try:
            candidate = _read(node, marker)
            root = unwrap_repeat(candidate.key)
            if root not in layer_of:
                raise Refusal("its keys are not a slot buffer of the cache, but computed by " + describe(root))
            layer = layer_of[root]
            if layer in sites:
                raise Refusal(f"a second attention reads the keys of layer {layer} (first: '{sites[layer].output}')")
            sites[layer] = _check(candidate, layer, marker, slicer, masks)
        except Refusal as refusal:
            for layer in reached:
                refused.setdefault(layer, (node, refusal))
            record_skip(gm, refusal.reason, node=node.name)
    for layer in range(len(marker.keys)):
        if layer in refused:
            node, why = refused[layer]
            raise why.kind(layer, node.name, why.reason, user_line(node)) from None
        if layer not in sites:
            raise _missing(marker, layer)
    for layer, site in sorted(sites.items()):
        site.output.meta[SITE] = site
        record_match(gm, str(site), layer=layer, node=site.output.name)
    return gm


def _is_attention(node: fx.Node) -> bool:
    return calls(node, "", F.scaled_dot_product_attention) or is_softmax(node)


def _feeds(node: fx.Node, buffer: fx.Node) -> bool:
    """Whether a buffer reaches an attention without passing through another attention: whose layer it may be."""
    todo, seen = list(node.all_input_nodes), set()
    while todo:
        current = todo.pop()
        if current is buffer:
            return True
        if current not in seen and not _is_attention(current):
            seen.add(current)
            todo.extend(current.all_input_nodes)
    return False


def _missing(marker: Marker, layer: int) -> UnsupportedAttentionError:
    readers = [
        user for user in marker.keys[layer].users if user is not marker.node and not calls(user, "", operator.setitem)
    ]
    if not readers:
        return UnsupportedAttentionError(layer, None, "nothing in the step reads its cached keys")
    reason = f"its cached keys are read by {describe(readers[0])}, which leads to no attention"
    return UnsupportedAttentionError(layer, readers[0].name, reason, user_line(readers[0]))


# ---------------------------------------------------------------------- reading


def _read(node: fx.Node, marker: Marker) -> _Candidate:
    return _read_sdpa(node) if calls(node, "", F.scaled_dot_product_attention) else _read_softmax(node, marker)


def _read_sdpa(node: fx.Node) -> _Candidate:
    arguments = named_arguments(node)
    if arguments is None:
        raise Refusal("its arguments do not fit the signature of scaled_dot_product_attention")
    if arguments["dropout_p"] != 0:
        raise Refusal(f"it drops attention weights (dropout_p={arguments['dropout_p']}): call model.eval() first")
    if arguments["is_causal"]:
        raise Refusal("is_causal=True lets a single query see the first slot only")
    scale = arguments["scale"]
    if scale is None:
        shape = shape_of(arguments["query"])
        if shape is None:
            raise Refusal("the width of its queries is unknown, and with it its default scale")
        scale = 1 / math.sqrt(shape[-1])
    mask = arguments["attn_mask"]
    kind = "keep" if isinstance(mask, fx.Node) and dtype_of(mask) == torch.bool else "add"
    return _Candidate("sdpa", node, arguments["query"], arguments["key"], arguments["value"], mask, kind, scale)


def _read_softmax(node: fx.Node, marker: Marker) -> _Candidate:
    if argument(node, 1, "dim") not in (-1, 3):
        raise Refusal("its softmax does not run over the last dimension")
    logits, scale, masks, fill = _read_logits(argument(node, 0, "input"), marker)
    query, key = _read_product(logits)
    output, value = _read_output(node)
    if len(masks) > 1:
        raise Refusal(
            f"{len(masks)} tensors are added to its logits where the mask alone was expected;"
            f" beneath them is {describe(logits)}"
        )
    mask, kind = masks[0] if masks else (None, "add")
    return _Candidate("softmax", output, query, key, value, mask, kind, scale, fill)


def _read_logits(logits: Any, marker: Marker) -> tuple[Any, Any, list[tuple[Any, str]], Any]:
    """Walk from softmax's input to the product with the keys: (product, scale, masks with their kinds, what is filled in)."""
    scale: Any = 1.0
    fill: Any = None
    masks: list[tuple[Any, str]] = []
    while True:
        logits = unwrap_cast(logits)
        if adds(logits):
            # The summand that is computed from a slot buffer is the logits, the other one the mask.
            if argument(logits, 2, "alpha", 1) != 1:
                raise Refusal("what is added to its logits is scaled by alpha=")
            left, right = map(unwrap_cast, operands(logits))
            logits, mask = (left, right) if _reads(left, marker) else (right, left)
            masks.append((mask, "add"))
        elif calls(logits, "masked_fill", torch.masked_fill):
            masks.append((argument(logits, 1, "mask"), "hide"))
            fill = argument(logits, 2, "value")
            logits = argument(logits, 0, "input")
        elif calls(logits, "", torch.where) and (chosen := _read_where(logits, marker)) is not None:
            logits, mask, fill = chosen
            masks.append(mask)
        elif calls(logits, "mul", operator.mul, torch.mul) or calls(logits, "div", operator.truediv, torch.div):
            logits, scale = _read_scale(logits, scale, marker)
        else:
            return logits, scale, masks, fill


def _read_where(node: fx.Node, marker: Marker) -> tuple[Any, tuple[Any, str], Any] | None:
    """(the logits, the mask with its kind, what is filled in)."""
    condition, chosen, other = (argument(node, i, name) for i, name in enumerate(("condition", "input", "other")))
    if _reads(chosen, marker):
        return chosen, (condition, "keep"), other
    return (other, (condition, "hide"), chosen) if _reads(other, marker) else None


def _read_scale(node: fx.Node, scale: Any, marker: Marker) -> tuple[Any, Any]:
    """(what is scaled, the scale with this factor in it)."""
    left, right = operands(node)
    divides = calls(node, "div", operator.truediv, torch.div)
    logits, factor = (right, left) if not divides and not _reads(left, marker) else (left, right)
    if isinstance(factor, fx.Node):
        if shape_of(factor) is not None:
            raise Refusal(f"its logits are {'divided' if divides else 'multiplied'} by a tensor")
        if divides or scale != 1.0:
            raise Refusal("its scale is computed in the graph, together with another one")
        return logits, factor
    if isinstance(scale, fx.Node):
        raise Refusal("its scale is computed in the graph, together with another one")
    if not isinstance(factor, (int, float)) or factor == 0:
        raise Refusal(f"its logits are scaled by {factor!r}")
    return logits, scale / factor if divides else scale * factor


def _read_product(logits: Any) -> tuple[Any, Any]:
    """(query, key) of the product of the query with the keys."""
    if _einsum(logits) == "abcd,abed->abce":
        return logits.args[1], logits.args[2]
    if not multiplies_matrices(logits):
        raise Refusal(f"its logits come from {describe(logits)}, not from matmul(query, keys transposed)")
    query, keys = operands(logits)
    key = unwrap_transpose(keys)
    if key is None:
        raise Refusal(
            f"the right side of its logits, {describe(keys)}, is not the keys with their last two dimensions swapped"
        )
    return query, key


def _read_output(node: fx.Node) -> tuple[fx.Node, Any]:
    """(the product of the weights with the values, the values)."""
    output = node
    while True:
        users = [user for user in output.users if user.users or multiplies_matrices(user)]
        if len(users) != 1:
            raise Refusal(f"its weights are used {len(users)} times (softcap, sinks or returned weights?)")
        user = users[0]
        if multiplies_matrices(user) and operands(user)[0] is output:
            return user, operands(user)[1]
        if _einsum(user) == "abcd,abde->abce" and user.args[1] is output:
            return user, user.args[2]
        if calls(user, "dropout", F.dropout, torch.dropout):
            if argument(user, 2, "training", True) and argument(user, 1, "p", 0.5) != 0:
                raise Refusal("it drops attention weights: call model.eval() first")
        elif unwrap_cast(user) is not unwrap_cast(output) or (calls(user, "type_as") and user.args[0] is not output):
            raise Refusal(f"its weights go through {describe(user)} before they meet the values")
        output = user


def _einsum(node: Any) -> str | None:
    """An einsum's equation with its letters renamed in order, if it has two operands, each with four dimensions."""
    if not calls(node, "", torch.einsum) or len(node.args) != 3 or not isinstance(node.args[0], str):
        return None
    letters: dict[str, str] = {}
    spelled = node.args[0].replace(" ", "")
    return "".join(
        letters.setdefault(sign, "abcdefgh"[len(letters) % 8]) if sign.isalpha() else sign for sign in spelled
    )


def _reads(node: Any, marker: Marker) -> bool:
    """Whether a node is computed from a slot buffer."""
    return isinstance(node, fx.Node) and any(up in marker.keys or up in marker.values for up in ancestors(node))


# ---------------------------------------------------------------------- checking


def _check(
    candidate: _Candidate, layer: int, marker: Marker, slicer: Slicer, masks: set[tuple[fx.Node, str]]
) -> AttentionSite:
    value = unwrap_repeat(candidate.value)
    if value is not marker.values[layer]:
        raise Refusal(f"its values are not the slot buffer of layer {layer}, but computed by {describe(value)}")
    query = candidate.query
    if not isinstance(query, fx.Node):
        raise Refusal("its query is not a tensor")
    while dtype_of(query) != dtype_of(marker.keys[layer]) and unwrap_cast(query) is not query:
        query = argument(query, 0, "input")  # as far as the keys' dtype: above it, a rotary embedding may be in fp32
    shape, cached = shape_of(query), shape_of(marker.keys[layer])
    if shape is None or cached is None or len(shape) != 4 or len(cached) != 4:
        raise Refusal(f"its query has shape {shape} where [batch, heads, 1, width] was expected")
    if shape[2] != 1:
        raise Refusal(f"its query has {shape[2]} tokens; a decode step has one")
    heads, kv_heads = int(shape[1]), int(cached[1])
    if heads % kv_heads or shape[3] != cached[3]:
        raise Refusal(f"its query {shape} does not fit keys of shape {cached}")
    dtypes = {dtype_of(node) for node in (query, marker.keys[layer], value, candidate.output)}
    if len(dtypes) != 1:
        raise Refusal(
            f"its query, keys, values and output are not of one dtype, but {', '.join(sorted(map(str, dtypes)))}"
        )
    mask, kind = candidate.mask, candidate.mask_kind
    if mask is not None and not isinstance(mask, fx.Node):
        raise Refusal(f"its mask is {mask!r}, not a tensor")
    site = AttentionSite(
        layer, candidate.form, candidate.output, query, marker.keys[layer], value,
        mask, kind, candidate.scale, kv_heads, heads // kv_heads,
    )  # fmt: skip
    _check_unwritten(site, marker, slicer)
    if mask is not None and (mask, kind) not in masks:  # checked once, as layers mostly share it
        if kind == "add" and dtype_of(mask) == torch.bool:
            raise Refusal("its mask is boolean and added to the logits, as 0 and 1")
        check_mask(mask, kind, site.output, marker, slicer)
        masks.add((mask, kind))
    if kind != "add" and candidate.form != "sdpa":
        check_fill(candidate.fill, site.output, slicer)
    return site


def _check_unwritten(site: AttentionSite, marker: Marker, slicer: Slicer) -> None:
    """Nothing between the inputs and the output may be written into: what is replaced would not see it."""
    inputs = {site.query, *marker.keys, *marker.values, *marker.state, marker.new_momentum, marker.new_positions}
    memory, place = slicer.memory, slicer.place
    read = [marker.new_positions] if site.mask is None else [site.mask, marker.new_positions]
    for node in read:  # the replacement reads them where they are made
        for writer in memory.writers(node):
            if place[node] < place[writer] < place[site.output]:
                raise Refusal(f"'{node.name}', a part of it, is written into by {describe(writer)}")
    brought = {memory.root(node) for node in inputs}
    todo, seen = [site.output], set()
    while todo:
        current = todo.pop()
        if current in inputs or current in seen:
            continue
        seen.add(current)
        todo.extend(current.all_input_nodes)
        if current is site.output or memory.root(current) in brought:
            continue  # writes into what is brought are run, when the rewrite is proved
        for writer in memory.writers(current):
            if place[current] < place[writer] < place[site.output]:
                raise Refusal(f"'{current.name}', a part of it, is written into by {describe(writer)}")
