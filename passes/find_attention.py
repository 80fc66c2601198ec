"""Find every layer's attention over the slot buffers, or say why not.

Two forms are understood, each with or without the expansion of KV heads to query heads:

    SDPA      scaled_dot_product_attention(q, K, V, attn_mask=mask)
    softmax   matmul(q, K^T) [* or / scale] + mask -> softmax [-> cast, dropout(0)] -> matmul(., V)

K and V must be a layer's slot buffers as the marker lists them, nothing computed from them; the mask must be computed
from the retention state alone, so that it says which slots are live and cannot be a bias that depends on positions.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.fx.operator_schemas import normalize_function

from ..errors import UnsupportedAttentionError
from .check_mask import check_mask
from .graph_utils import (
    Marker,
    PassResult,
    Refusal,
    Rewrite,
    ancestors,
    argument,
    calls,
    dtype_of,
    mutation_of,
    shape_of,
    unwrap_cast,
    unwrap_repeat,
    unwrap_transpose,
    user_line,
)


@dataclasses.dataclass(frozen=True)
class AttentionSite:
    """One layer's attention in the graph.

    Attributes:
        layer: index into the cache's layers.
        form: "sdpa" or "softmax".
        output: the node to replace, [B, H, 1, Dv].
        query: [B, H, 1, D]; key: [B, N, S, D] and value: [B, N, S, Dv] are the slot buffers themselves.
        mask: [B or 1, 1, 1, S], bool or additive; ``None`` if it has none: then it attends to the live slots.
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
    scale: float | fx.Node
    kv_heads: int
    groups: int

    def __str__(self) -> str:
        heads = f"{self.kv_heads * self.groups} query / {self.kv_heads} key-value heads"
        return f"layer {self.layer}: {self.form} at '{self.output.name}', {heads}, scale {self.scale}"


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """An attention as it stands in the graph, nothing checked yet."""

    form: str
    output: fx.Node
    query: Any
    key: Any
    value: Any
    mask: Any
    scale: Any


def find_attention(rewrite: Rewrite) -> PassResult:
    """Fill `rewrite.sites`, one per cache layer, in the cache's order.

    Raises:
        UnsupportedAttentionError: a layer has no attention, more than one, or one that is not understood.
        PositionBiasError: the reason is a bias that depends on positions.
    """
    marker = rewrite.marker
    layer_of = {key: index for index, key in enumerate(marker.keys)}
    sites: dict[int, AttentionSite] = {}
    refused: dict[int, tuple[fx.Node, Refusal]] = {}
    masks: set[fx.Node] = set()
    skipped = []
    for node in rewrite.graph.nodes:
        if not _is_attention(node):
            continue
        reached = [layer_of[up] for up in ancestors(node) if up in layer_of and _feeds(node, up)]
        try:
            candidate = _read(node, marker)
            root = unwrap_repeat(candidate.key)
            if root not in layer_of:
                raise Refusal("its keys are not a slot buffer of the cache, but computed by " + _describe(root))
            layer = layer_of[root]
            if layer in sites:
                raise Refusal(f"a second attention reads the keys of layer {layer} (first: '{sites[layer].output}')")
            sites[layer] = _check(candidate, layer, marker, masks)
        except Refusal as refusal:
            for layer in reached:
                refused.setdefault(layer, (node, refusal))
            skipped.append(f"'{node.name}': {refusal.reason}")
    for layer in range(len(marker.keys)):
        if layer in refused:
            node, why = refused[layer]
            raise why.kind(layer, node.name, why.reason, user_line(node)) from None
        if layer not in sites:
            raise _missing(marker, layer)
    rewrite.sites = tuple(sites[layer] for layer in range(len(marker.keys)))
    return PassResult("find_attention", tuple(map(str, rewrite.sites)), tuple(skipped))


def _is_attention(node: fx.Node) -> bool:
    return calls(node, "", F.scaled_dot_product_attention) or calls(node, "softmax", F.softmax, torch.softmax)


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
    reason = f"its cached keys are read by {_describe(readers[0])}, which leads to no attention"
    return UnsupportedAttentionError(layer, readers[0].name, reason, user_line(readers[0]))


def _describe(node: Any) -> str:
    if not isinstance(node, fx.Node):
        return repr(node)
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name} ('{node.name}')"


# ---------------------------------------------------------------------- reading


def _read(node: fx.Node, marker: Marker) -> _Candidate:
    return _read_sdpa(node) if calls(node, "", F.scaled_dot_product_attention) else _read_softmax(node, marker)


def _read_sdpa(node: fx.Node) -> _Candidate:
    normal = normalize_function(node.target, node.args, node.kwargs, normalize_to_only_use_kwargs=True)
    if normal is None:
        raise Refusal("its arguments do not fit the signature of scaled_dot_product_attention")
    arguments = normal.kwargs
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
    return _Candidate(
        "sdpa", node, arguments["query"], arguments["key"], arguments["value"], arguments["attn_mask"], scale
    )


def _read_softmax(node: fx.Node, marker: Marker) -> _Candidate:
    if argument(node, 1, "dim") not in (-1, 3):
        raise Refusal("its softmax does not run over the last dimension")
    logits = unwrap_cast(argument(node, 0, "input"))
    masks = []
    while calls(logits, "add", operator.add, torch.add):
        # The summand that is computed from a slot buffer is the logits, the other one the mask.
        if logits.kwargs.get("alpha", 1) != 1:
            raise Refusal("what is added to its logits is scaled by alpha=")
        left, right = (unwrap_cast(argument(logits, place, name)) for place, name in enumerate(("input", "other")))
        logits, mask = (left, right) if _reads(left, marker) else (right, left)
        masks.append(mask)
    if len(masks) > 1:
        raise Refusal(
            f"{len(masks)} tensors are added to its logits where the mask alone was expected;"
            f" beneath them is {_describe(logits)}"
        )
    scale: Any = 1.0
    if calls(logits, "mul", operator.mul, torch.mul):
        logits, scale = logits.args[:2]
        if isinstance(scale, fx.Node) and calls(scale, "matmul", torch.matmul, operator.matmul):
            logits, scale = scale, logits
    elif calls(logits, "div", operator.truediv, torch.div):
        logits, scale = logits.args[:2]
        if isinstance(scale, fx.Node):
            raise Refusal("its logits are divided by a tensor")
        scale = 1 / scale
    if isinstance(scale, fx.Node) and shape_of(scale) is not None:
        raise Refusal("its logits are multiplied by a tensor")
    logits = unwrap_cast(logits)
    if not calls(logits, "matmul", torch.matmul, operator.matmul):
        raise Refusal(f"its logits come from {_describe(logits)}, not from matmul(query, keys transposed)")
    query, keys = logits.args[:2]
    key = unwrap_transpose(keys)
    if key is None:
        raise Refusal(
            f"the right side of its logits, {_describe(keys)}, is not the keys with their last two dimensions swapped"
        )
    output = node
    while True:
        users = [user for user in output.users if user.users or calls(user, "matmul", torch.matmul, operator.matmul)]
        if len(users) != 1:
            raise Refusal(f"its weights are used {len(users)} times (softcap, sinks or returned weights?)")
        user = users[0]
        if calls(user, "matmul", torch.matmul, operator.matmul) and user.args[0] is output:
            return _Candidate("softmax", user, query, key, user.args[1], masks[0] if masks else None, scale)
        if calls(user, "dropout", F.dropout, torch.dropout):
            if argument(user, 2, "training", True) and argument(user, 1, "p", 0.5) != 0:
                raise Refusal("it drops attention weights: call model.eval() first")
        elif unwrap_cast(user) is not unwrap_cast(output) or (calls(user, "type_as") and user.args[0] is not output):
            raise Refusal(f"its weights go through {_describe(user)} before they meet the values")
        output = user


def _reads(node: Any, marker: Marker) -> bool:
    """Whether a node is computed from a slot buffer."""
    return isinstance(node, fx.Node) and any(up in marker.keys or up in marker.values for up in ancestors(node))


# ---------------------------------------------------------------------- checking


def _check(candidate: _Candidate, layer: int, marker: Marker, masks: set[fx.Node]) -> AttentionSite:
    value = unwrap_repeat(candidate.value)
    if value is not marker.values[layer]:
        raise Refusal(f"its values are not the slot buffer of layer {layer}, but computed by {_describe(value)}")
    query = unwrap_cast(candidate.query)
    if not isinstance(query, fx.Node):
        raise Refusal("its query is not a tensor")
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
    _check_untouched(candidate, query, marker)
    mask = candidate.mask
    if mask is not None and mask not in masks:  # checked once, as layers mostly share it
        masks.add(check_mask(mask, marker))
    if mask is not None and candidate.form == "softmax" and dtype_of(mask) == torch.bool:
        raise Refusal("its mask is boolean and added to the logits, as 0 and 1")
    return AttentionSite(
        layer, candidate.form, candidate.output, query, marker.keys[layer], value,
        mask, candidate.scale, kv_heads, heads // kv_heads,
    )  # fmt: skip


def _check_untouched(candidate: _Candidate, query: fx.Node, marker: Marker) -> None:
    """Nothing between the inputs and the output may be written into: what is replaced would not see it."""
    inputs = {query, *marker.keys, *marker.values, *marker.state, marker.new_momentum, marker.new_positions}
    todo, seen = [candidate.output], set()
    while todo:
        current = todo.pop()
        if current in inputs or current in seen:
            continue
        seen.add(current)
        if current is not candidate.output and (writer := mutation_of(current)) is not None:
            raise Refusal(f"'{current.name}', a part of it, is written into by {_describe(writer)}")
        todo.extend(current.all_input_nodes)
