from __future__ import annotations

import copy
import time
from collections import OrderedDict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import UsageError
from evenstep.train.fingerprint import add, fingerprint, runs, tensor_key, to_hex, total
from evenstep.train.state import decode_tree, encode_tree

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex64, torch.complex128,
    torch.int64, torch.int32, torch.int16, torch.uint8, torch.uint32, torch.bool,
]  # fmt: skip


def draw(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A tensor of random bits."""
    numel = int(np.prod(shape))
    data = np.random.default_rng(seed).bytes(numel * dtype.itemsize)
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape) if numel else torch.empty(shape, dtype=dtype)


def bits(tensor: Tensor) -> Tensor:
    """The tensor's memory, to write to."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).view(-1).view(torch.uint8)


def tensor_part(key: int, part: Tensor, start: int) -> int:
    """What the elements from `start` on, in C order, add to a tensor's fingerprint."""
    return total(runs(key, part.reshape(-1), start))


def tree() -> dict[str, Any]:
    return {
        "model": {f"w{i}": draw((100 + i, 50), dtype, i) for i, dtype in enumerate(DTYPES)} | {"empty": torch.empty(0)},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "lr": 0.1, "betas": (0.9, 0.95), "other": [1, None]},
    }


def test_the_value_never_changes() -> None:
    """Recorded fingerprints must stay comparable from one version to the next."""
    small = {"b": torch.arange(5000.0), "a": [torch.tensor(1), 2.5, None, {"x": True}], 3: torch.ones(2, 2)}
    assert to_hex(fingerprint(small)) == "dbd4b97326258a26"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8, 100])
def test_any_number_of_processes_finds_the_same(world_size: int) -> None:
    state = tree()
    parts = [fingerprint(state, rank, world_size) for rank in range(world_size)]
    assert add(parts) == fingerprint(state)


def test_more_processes_than_elements() -> None:
    state = {"a": torch.ones(2)}
    assert add(fingerprint(state, rank, 7) for rank in range(7)) == fingerprint(state)


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 30_000), max_size=5))
def test_any_split_of_a_tensor_adds_up(dtype: torch.dtype, cuts: list[int]) -> None:
    tensor = draw((30_000,), dtype)
    key = tensor_key("w", dtype, tensor.shape)
    ends = [0, *sorted(cuts), 30_000]
    parts = [tensor_part(key, tensor[a:b], a) for a, b in pairwise(ends)]
    assert add(parts) == tensor_part(key, tensor, 0)
    assert add([*parts, fingerprint({"w": torch.empty(0)})]) != fingerprint({"w": tensor})  # the rest is rank 0's


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_shows(dtype: torch.dtype) -> None:
    tensor = draw((9000,), dtype)
    key = tensor_key("w", dtype, tensor.shape)
    before = tensor_part(key, tensor, 0)
    memory = bits(tensor)
    for place in [0, 1, 7, *range(8, memory.numel(), 997), memory.numel() - 1]:
        for bit in range(8) if dtype != torch.bool else [0]:
            memory[place] ^= 1 << bit
            assert tensor_part(key, tensor, 0) != before
            memory[place] ^= 1 << bit
    assert tensor_part(key, tensor, 0) == before


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float32, torch.bfloat16, torch.complex128])
def test_two_flipped_bits_do_not_cancel(dtype: torch.dtype) -> None:
    """Sign bits above all: in a sum of whole 64-bit words any two of them would."""
    tensor = draw((9000,), dtype)
    key = tensor_key("w", dtype, tensor.shape)
    seen = {tensor_part(key, tensor, 0)}
    memory = bits(tensor)
    size = dtype.itemsize
    pairs = [(0, 4096), (1, 8999), (4095, 4096), (100, 4196), *((i, i + 1) for i in range(500))]
    for a, b in pairs:
        for bit in (0x80, 0x01):
            for place in (a, b):
                memory[place * size + size - 1] ^= bit
            seen.add(tensor_part(key, tensor, 0))
            for place in (a, b):
                memory[place * size + size - 1] ^= bit
    assert len(seen) == 1 + 2 * len(pairs)


@given(st.integers(0, 8999), st.integers(0, 8999), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_two_swapped_elements_show(a: int, b: int, dtype: torch.dtype) -> None:
    tensor = torch.arange(9000).to(dtype)
    before = fingerprint({"w": tensor})
    values = tensor[a].clone(), tensor[b].clone()
    tensor[b], tensor[a] = values
    assert (fingerprint({"w": tensor}) == before) == bool(values[0] == values[1])


def test_swapped_blocks_show() -> None:
    tensor = draw((5, 4096), torch.float32)
    assert fingerprint([tensor]) != fingerprint([tensor[[1, 0, 2, 3, 4]]])


def change(path: str, value: object) -> dict[str, Any]:
    state = copy.deepcopy(tree())
    *keys, last = path.split("/")
    at = state
    for key in keys:
        at = at[key]
    at[last] = value
    return state


@pytest.mark.parametrize(
    "other",
    [
        change("model/w1", tree()["model"]["w1"].reshape(50, -1)),
        change("model/w1", tree()["model"]["w1"].view(torch.int32)),
        change("model/w99", torch.empty(0)),
        change("model/empty", torch.empty(1, 0)),
        change("optimizer/lr", 0.1000001),
        change("optimizer/lr", torch.tensor(0.1)),
        change("optimizer/betas", [0.9, 0.95]),
        change("optimizer/other", [1, False]),
        change("optimizer/other", [True, None]),
        change("optimizer/other", [1]),
        change("optimizer/other", ["1", None]),
        change("optimizer/state", {"0": {"step": torch.tensor(3.0)}}),
    ],
)
def test_anything_else_that_differs_shows(other: dict[str, Any]) -> None:
    assert fingerprint(other) != fingerprint(tree())


def test_two_swapped_tensors_of_one_shape_show() -> None:
    a, b = torch.randn(4, 4), torch.randn(4, 4)
    assert fingerprint({"a": a, "b": b}) != fingerprint({"a": b, "b": a})
    assert fingerprint([a, b]) != fingerprint([b, a])
    assert fingerprint({"a.b": a, "a": {"b": b}}) != fingerprint({"a.b": b, "a": {"b": a}})
    assert fingerprint({"x": np.arange(3), "y": np.arange(3.0)}) != fingerprint(
        {"y": np.arange(3), "x": np.arange(3.0)}
    )


def test_signs_and_nans_count() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        zero = torch.zeros(3, dtype=dtype)
        assert fingerprint([zero]) != fingerprint([-zero])
        nan = zero / 0
        assert fingerprint([nan]) == fingerprint([nan.clone()])
    assert fingerprint([0.0]) != fingerprint([-0.0])


def test_memory_and_order_of_keys_do_not_count() -> None:
    image = torch.randn(2, 3, 4, 5)
    state = {"a": image, "b": 1}
    same = [
        OrderedDict([("b", 1), ("a", image)]),
        {"a": image.to(memory_format=torch.channels_last), "b": 1},
        {"a": nn.Parameter(image), "b": 1},
        decode_tree(encode_tree(state)),
    ]
    assert {fingerprint(one) for one in same} == {fingerprint(state)}
    tied = torch.randn(3)
    assert fingerprint({"a": tied, "b": tied}) == fingerprint({"a": tied, "b": tied.clone()})


def test_a_whole_training_state() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    before = fingerprint(state)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    after = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert fingerprint(after) != before
    assert fingerprint(decode_tree(encode_tree(after))) == fingerprint(after)
    assert to_hex(5) == "0000000000000005"


def test_what_cannot_be_hashed_is_named() -> None:
    with pytest.raises(UsageError, match=r"scheduler\.foo\[1\]"):
        fingerprint({"scheduler": {"foo": [1, print]}})
    with pytest.raises(UsageError, match="sparse"):
        fingerprint({"x": torch.eye(2).to_sparse()})


def test_it_is_cheap() -> None:
    """About 1.2 ms a million elements on one thread; ten times that would be felt."""
    tensor = torch.randn(1 << 20)
    times = []
    for _ in range(5):
        start = time.thread_time()
        fingerprint({"w": tensor})
        times.append(time.thread_time() - start)
    assert min(times) < 0.02
