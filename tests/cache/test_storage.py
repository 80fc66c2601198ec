"""Slot buffers and the retention state, without a cache around them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from inertia_fx.cache import RetentionState, SlotLayer, storage
from inertia_fx.cache.storage import CLOSED, DEAD


def filled(momentum: list[list[float]], positions: list[list[int]], free: list[int]) -> RetentionState:
    length = [max(row) + 1 for row in positions]
    return RetentionState(
        torch.tensor(momentum), torch.tensor(positions), torch.tensor(free), torch.tensor(length)
    )  # fmt: skip


def layer(slots: int, rows: int = 1) -> SlotLayer:
    """Key and value of slot s in row r are 10 r + s and its negation; two heads, widths 3 and 2."""
    result = SlotLayer()
    number = torch.arange(slots) + 10.0 * torch.arange(rows)[:, None]
    expanded = number[:, None, :, None].expand(rows, 2, slots, 3)
    result.append(expanded.contiguous(), -expanded[..., :2].contiguous())
    return result


def shown(layer: SlotLayer) -> list[list[float]]:
    """[B, S] numbers that the buffers hold, having checked that all heads and widths, keys and values agree."""
    keys, values = layer.buffers
    assert (keys == keys[:, :1, :, :1]).all() and (values == -keys[:, :1, :, :1]).all()
    assert keys.is_contiguous() and values.is_contiguous()
    return keys[:, 0, :, 0].tolist()


def test_columns_of_numbers() -> None:
    like = torch.zeros(1)
    assert storage.column([3, 3], like).tolist() == [[3], [3]]
    assert storage.column([3, 4], like).tolist() == [[3], [4]]
    assert storage.column([3, 3], like).dtype == storage.column([3, 4], like).dtype == torch.int64
    assert storage.column([True, True], like).dtype == storage.column([True, False], like).dtype == torch.bool


def test_bytes_are_those_of_storages_each_counted_once() -> None:
    whole = torch.zeros(10, 4)
    assert storage.nbytes([]) == 0
    assert storage.nbytes([None, whole]) == 160
    assert storage.nbytes([whole, whole[:2], whole.T]) == 160
    assert storage.nbytes(iter([whole[3:4]])) == 160
    assert storage.nbytes([whole, torch.zeros(3, dtype=torch.bfloat16)]) == 166


def test_a_state_is_copied_and_mapped_whole() -> None:
    state = filled([[0.5, DEAD]], [[0, -1]], [1])
    assert [tensor.tolist() for tensor in state.tensors] == [[[0.5, DEAD]], [[0, -1]], [1], [1]]
    copy = state.clone()
    assert not {t.data_ptr() for t in state.tensors} & {t.data_ptr() for t in copy.tensors}
    copy.momentum.zero_()
    assert state.momentum.tolist() == [[0.5, DEAD]]
    twice = state.map(lambda tensor: tensor.repeat_interleave(2, 0))
    assert (twice.free.tolist(), twice.positions.tolist()) == ([1, 1], [[0, -1], [0, -1]])
    empty = RetentionState.empty(2, torch.device("cpu"))
    assert [(tuple(t.shape), t.dtype) for t in empty.tensors] == [
        ((2, 0), torch.float32), ((2, 0), torch.int64), ((2,), torch.int64), ((2,), torch.int64),
    ]  # fmt: skip
    assert empty.free.data_ptr() != empty.length.data_ptr()


def test_a_layer_appends_detached_columns_and_writes_single_slots() -> None:
    one = SlotLayer()
    key = torch.ones(2, 1, 3, 4, requires_grad=True)
    keys, values = one.append(key, key[..., :2])
    assert keys is key and values.requires_grad
    held, _ = one.buffers
    assert not held.requires_grad
    keys, _ = one.append(2 * key, 2 * key[..., :2])
    assert keys.requires_grad and keys.shape == (2, 1, 6, 4)
    assert one.buffers[0].shape == (2, 1, 6, 4) and one.buffers[1].shape == (2, 1, 6, 2)
    new = torch.tensor([7.0, 8.0]).view(2, 1, 1, 1)
    keys, values = one.write(new.expand(2, 1, 1, 4), -new.expand(2, 1, 1, 2), torch.arange(2), torch.tensor([5, 0]))
    assert keys[:, 0, :, 3].tolist() == [[1, 1, 1, 2, 2, 7], [8, 1, 1, 2, 2, 2]]
    assert values[:, 0, :, 1].tolist() == [[1, 1, 1, 2, 2, -7], [-8, 1, 1, 2, 2, 2]]
    assert keys.data_ptr() == one.buffers[0].data_ptr()


def test_a_prompts_tokens_join_at_the_mean_and_at_their_positions() -> None:
    state = filled([[0.25, 0.75, CLOSED], [0.5, CLOSED, CLOSED]], [[1, 0, -1], [3, -1, -1]], [2, 1])
    real = torch.tensor([[True, True], [False, True]])
    joined = storage.join(state, real)
    assert joined.momentum.tolist() == [[0.25, 0.75, CLOSED, 0.5, 0.5], [0.5, CLOSED, CLOSED, CLOSED, 0.5]]
    assert joined.positions.tolist() == [[1, 0, -1, 2, 3], [3, -1, -1, -1, 4]]
    assert joined.length.tolist() == [4, 5]
    assert state.length.tolist() == [2, 4] and state.positions.shape == (2, 3)
    first = storage.join(RetentionState.empty(2, torch.device("cpu")), real)
    assert first.momentum.tolist() == [[0, 0], [CLOSED, 0]]
    assert first.positions.tolist() == [[0, 1], [-1, 0]]


def test_gathered_slots_are_followed_by_dead_and_closed_ones() -> None:
    state = filled([[0.0, 0.1, 0.2], [0.3, 0.4, 0.5]], [[2, 0, 1], [1, 2, 0]], [0, 0])
    layers = [layer(3, 2), layer(3, 2)]
    gathered = storage.gather(layers, state, torch.tensor([[1, 2], [2, 2]]), [2, 1], [3, 2], 4)
    assert gathered.momentum.tolist() == [
        pytest.approx([0.1, 0.2, DEAD, CLOSED]), pytest.approx([0.5, DEAD, CLOSED, CLOSED])
    ]  # fmt: skip
    assert gathered.positions.tolist() == [[0, 1, -1, -1], [0, -1, -1, -1]]
    assert state.momentum.shape == (2, 3)
    for one in layers:
        first, second = shown(one)
        assert first[:2] == [1, 2] and second[0] == 12 and len(first) == len(second) == 4
    assert _is_marked(gathered.tensors[0], 1) and all(_is_marked(buffer, 2) for buffer in storage.buffers_of(layers))


def test_added_slots_are_dead_up_to_the_limit_and_full_rows_take_the_first() -> None:
    state = filled([[0.5, 0.25], [0.5, DEAD]], [[0, 1], [0, -1]], [1, 1])
    layers = [layer(2, 2)]
    more = storage.extend(layers, state, 3, [5, 3], [True, False])
    assert more.momentum.tolist() == [[0.5, 0.25, DEAD, DEAD, DEAD], [0.5, DEAD, DEAD, CLOSED, CLOSED]]
    assert more.positions.tolist() == [[0, 1, -1, -1, -1], [0, -1, -1, -1, -1]]
    assert more.free.tolist() == [2, 1]
    assert shown(layers[0]) == [[0, 1, 0, 0, 0], [10, 11, 0, 0, 0]]
    assert _is_marked(more.positions, 1)
    less = storage.narrow(layers, more, 2)
    assert less.positions.tolist() == [[0, 1], [0, -1]]
    assert shown(layers[0]) == [[0, 1], [10, 11]]
    assert storage.nbytes(storage.buffers_of(layers)) == 2 * 2 * 2 * (3 + 2) * 4


def test_as_many_rows_are_exchanged_in_place() -> None:
    state = filled([[0.5], [0.25]], [[4], [7]], [0, 0])
    layers = [layer(1, 2)]
    held = [tensor.data_ptr() for tensor in (*storage.buffers_of(layers), *state.tensors)]
    assert storage.select_rows(layers, state, torch.tensor([1, 1])) is state
    assert [tensor.data_ptr() for tensor in (*storage.buffers_of(layers), *state.tensors)] == held
    assert state.length.tolist() == [8, 8] and shown(layers[0]) == [[10], [10]]
    three = storage.select_rows(layers, state, torch.tensor([0, 1, 0]))
    assert three.positions.tolist() == [[7]] * 3 and shown(layers[0]) == [[10]] * 3
    assert state.positions.tolist() == [[7]] * 2


def test_what_inference_mode_made_is_copied_before_it_is_written() -> None:
    with torch.inference_mode():
        layers, state = [layer(2)], filled([[0.5, DEAD]], [[0, -1]], [1])
        assert storage.is_writable(layers, state)
    assert not storage.is_writable(layers, state)
    writable = storage.make_writable(layers, state)
    assert storage.is_writable(layers, writable)
    writable.momentum.fill_(1.0)
    assert state.momentum.tolist() == [[0.5, -math.inf]]
    assert shown(layers[0]) == [[0, 1]]


def test_no_more_than_one_layer_is_held_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first eviction beside a cache that fills the device needs one layer's memory, not a second cache."""
    state, layers = filled([[0.5, 0.5]], [[0, 1]], [0]), [layer(2), layer(2), layer(2)]
    alive = []

    def widen(buffer: Tensor, room: int) -> Tensor:
        alive.append(storage.nbytes(storage.buffers_of(layers)))
        return buffer.repeat(1, 1, room + 1, 1)

    monkeypatch.setattr(storage, "_widen", widen)
    storage.extend(layers, state, 1, [3], [True])
    assert alive == [240, 240, 320, 320, 400, 400]


def _is_marked(tensor: Tensor, dimension: int) -> bool:
    return dimension in getattr(tensor, "_dynamo_dynamic_indices", ())
