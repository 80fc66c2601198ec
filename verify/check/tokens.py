"""Read the inputs of :func:`inertia_fx.verify.check` as rows of token ids without padding."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ...errors import InputError


def token_rows(inputs: Any, vocabulary: int) -> list[list[int]]:
    """Return the real tokens of each row.

    Args:
        inputs: a list of ints, a list of such lists (of any lengths), a tensor or array [P] or [B, P], or a tokenizer's
            output: input_ids, and attention_mask of the same shape where rows are padded.
        vocabulary: number of token ids.

    Raises:
        InputError: nothing to run, unequal shapes, something that is no token id.
    """
    mask = None
    if isinstance(inputs, Mapping) or hasattr(inputs, "input_ids"):
        field = inputs.get if isinstance(inputs, Mapping) else lambda name: getattr(inputs, name, None)
        mask, inputs = field("attention_mask"), field("input_ids")
    rows = _rows("The inputs", inputs)
    if mask is not None:
        keep = _rows("The attention_mask", mask)
        if [len(row) for row in keep] != [len(row) for row in rows]:
            raise InputError(f"attention_mask has shape {_shape(keep)} and input_ids {_shape(rows)}: they must agree.")
        rows = [
            [token for token, on in zip(row, real, strict=True) if on] for row, real in zip(rows, keep, strict=True)
        ]
    if not all(rows):
        raise InputError(
            "The inputs hold a row without a token: every row needs at least one (padding does not count)."
        )
    for index, row in enumerate(rows):
        for place, token in enumerate(row):
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InputError(f"Row {index} holds {token!r}: token ids are whole numbers.")
            row[place] = token = operator.index(token)  # numpy's integers too
            if not 0 <= token < vocabulary:
                raise InputError(
                    f"Row {index} holds the token id {token}; the model's vocabulary is 0 ... {vocabulary - 1}."
                )
    return rows


def _rows(what: str, values: Any) -> list[list[Any]]:
    values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(values, (list, tuple)):
        raise InputError(
            f"{what} are {type(values).__name__}, not token ids: pass a list of ints, a list of such lists, [B, P], or a"
            " tokenizer's output."
        )
    values = [row.tolist() if getattr(row, "ndim", 0) else row for row in values]
    nested = [isinstance(row, (list, tuple)) for row in values]
    if any(nested) and not all(nested):
        raise InputError(f"{what} mix token ids and rows of them: pass one list per row.")
    return [list(row) for row in values] if values and all(nested) else [list(values)]


def _shape(rows: list[list[Any]]) -> tuple[int, ...] | list[int]:
    lengths = [len(row) for row in rows]
    return (len(rows), lengths[0]) if len(set(lengths)) == 1 else lengths
