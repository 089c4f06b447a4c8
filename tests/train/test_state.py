from __future__ import annotations

import math
import os
import struct
import tempfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from evenstep.errors import CheckpointError, MachineError, UsageError
from evenstep.train.state import damage_named, decode_tree, encode_tree, filled, read_tree, save_tree
from evenstep.train.tensor_file import is_kept
from evenstep.train.weights import save_model
from tests.record.small_disk import on_a_small_disk

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.complex64, torch.complex128, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def load_tree(folder: Path) -> Any:
    tree = read_tree(folder)
    with damage_named(folder):
        return filled(tree)


def raw(tensor: Tensor) -> bytes:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def strides(array: Tensor | np.ndarray[Any, Any]) -> list[int]:
    """The strides that mean something: those of more than one element."""
    of = array.stride() if isinstance(array, Tensor) else array.strides
    return [] if 0 in array.shape else [stride for stride, n in zip(of, array.shape, strict=True) if n > 1]


def same(a: object, b: object) -> bool:
    """Whether two trees have the same types, order and bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return (a.dtype, a.shape, strides(a), raw(a)) == (b.dtype, b.shape, strides(b), raw(b))
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return (a.dtype, a.shape, strides(a), a.tobytes()) == (b.dtype, b.shape, strides(b), b.tobytes())
    if isinstance(a, np.generic) and isinstance(b, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, dict) and isinstance(b, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex) and isinstance(b, complex):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    return a == b


def through(tree: object) -> Any:
    return decode_tree(encode_tree(tree))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any bits at all as a tensor of any dtype, also empty, 0-d, transposed and sliced."""
    dtype: torch.dtype = draw(st.sampled_from(DTYPES))
    shape: list[int] = draw(st.lists(st.integers(0, 4), max_size=3))
    size = math.prod(shape) * dtype.itemsize
    data: bytes = draw(st.binary(min_size=size, max_size=size))
    if dtype == torch.bool:
        data = bytes(byte & 1 for byte in data)
    flat = torch.frombuffer(bytearray(data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
    tensor: Tensor = flat.reshape(shape)
    turned: bool = draw(st.booleans())
    return tensor.movedim(0, -1) if shape and turned else tensor


arrays = st.builds(
    lambda data, dtype, fortran: (
        np.frombuffer(data, dtype).reshape(2, -1, order="F" if fortran else "C").astype(dtype, order="K", copy=True)
    ),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(["<f8", ">f4", "<f2", "u1", "<i8", "<c16", "<M8[ns]", "?", "S4"]),
    st.booleans(),
)
numbers = st.one_of(
    st.integers(), st.integers(2**62, 2**70), st.floats(), st.complex_numbers(), st.booleans(),
    st.binary(min_size=8, max_size=8).map(lambda data: struct.unpack("d", data)[0]),  # NaN payloads
)  # fmt: skip
leaves = st.one_of(
    st.none(),
    numbers,
    st.text(),
    st.text(st.characters(categories=["Cs"])),
    st.binary(),
    tensors(),
    arrays,
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int64, st.integers(-(2**63), 2**63 - 1)),
    st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda:1"), torch.Size([2, 3])]),
)
keys = st.one_of(
    st.text(), st.integers(), st.booleans(), st.none(), st.floats(), st.binary(), st.tuples(st.integers(), st.text())
)
trees: st.SearchStrategy[object] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(st.text(), inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
        st.dictionaries(keys, inner, max_size=4).map(lambda d: defaultdict(list, d)),
    ),
    max_leaves=12,
)


@given(trees)
def test_any_tree_comes_back_with_the_same_types_and_bits(tree: object) -> None:
    assert same(through(tree), tree)


@given(trees)
def test_the_same_tree_gives_the_same_bytes(tree: object) -> None:
    assert encode_tree(tree) == encode_tree(through(tree))


def test_a_folder_holds_the_same(tmp_path: Path) -> None:
    tree: dict[Any, Any] = {"a": torch.randn(3, 4), "b": [1, (2.5, None)], 3: {"c": np.arange(3)}}
    save_tree(tmp_path, tree)
    assert same(load_tree(tmp_path), tree)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tensors.safetensors", "tree.json"]
    # Plain tools can read the tensors by their paths.
    assert torch.equal(safetensors.torch.load_file(tmp_path / "tensors.safetensors")["a"], tree["a"])


@pytest.mark.parametrize(
    "value",
    [
        {"a": {1, 2}, "b": frozenset({"x", (1, 2)}), "empty": set()},
        Counter({3: 2, "a": 1}),
        OrderedDict([("b", 1), ("a", 2)]),
        bytearray(b"\0\xff"),
        {True: 1, 2: 2, "1": 3, None: 4, (1, "a"): 5},
        {"dict": {}, "items": [], "tensor": "x", "": {"int": "0x0"}},
        {"__metadata__": torch.ones(1), "a#2": torch.zeros(1), "a": torch.ones(2)},
        {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
        pytest.param(1 << 20_000, id="huge"),
        -(2**53),
        -0.0,
        float("-inf"),
        torch.tensor(-0.0),
        {"\ud89c\udcab": "\ud89c\udcab"},
        np.str_("x"),
        np.datetime64("2024-01-01"),
        np.empty((0, 3)),
        np.float64(0.1),
    ],
)
def test_odd_values_come_back(value: object) -> None:
    assert same(through(value), value)


def test_one_tensor_under_two_names_stays_one() -> None:
    weight = nn.Parameter(torch.randn(3, 2))
    tree = through({"embed": weight, "head": [weight.data], "turned": weight.data.T, "empty": torch.empty(0)})
    assert tree["embed"] is tree["head"][0]
    assert tree["embed"].requires_grad is False
    assert torch.equal(tree["turned"], weight.T)
    assert tree["turned"].stride() == weight.T.stride()


def test_parts_of_one_memory_come_back_each_in_its_own() -> None:
    whole = torch.arange(6.0)
    tree = {"whole": whole, "front": whole[:3], "back": whole[3:], "none": whole[:0], "bits": whole.view(torch.int32)}
    back = through(tree)
    assert same(back, tree)
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values() if tensor.numel()}) == 4


def test_what_was_loaded_does_not_lie_in_the_file(tmp_path: Path) -> None:
    save_tree(tmp_path, {"a": torch.arange(100_000), "b": np.arange(100_000)})
    tree = load_tree(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    (tmp_path / "tensors.safetensors").write_bytes(bytes(2_000_000))
    assert same(tree, {"a": torch.arange(100_000), "b": np.arange(100_000)})


def test_strides_come_back_for_channels_last_but_not_for_expanded() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    back = through([image, torch.ones(1).expand(3), torch.arange(10)[::2]])
    assert back[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(back[0], image)
    assert back[1].tolist() == [1.0] * 3
    assert back[2].tolist() == [0, 2, 4, 6, 8]


def test_lazy_conjugates_and_negatives() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    assert torch.equal(through(value.conj()), value.conj())
    assert torch.equal(through(value.conj().imag), value.conj().imag)


class Point(NamedTuple):
    x: int


class Odd(Tensor):
    pass


loop: list[object] = []
loop.append(loop)


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ({"scheduler": {"foo": [1, 2, print]}}, r"state at scheduler\.foo\[2\] holds a builtins\.builtin_function"),
        ({"scheduler": {"foo": [1, 2, lambda x: x]}}, r"scheduler\.foo\[2\]"),
        ({"a b": {1: {"c": object()}}}, r"\['a b'\]\[1\]\.c holds a builtins\.object"),
        (object(), "at the top"),
        ([Point(1)], r"\[0\] holds a .*Point"),
        ([deque([1])], "deque"),
        (defaultdict(lambda: 1), "default_factory"),
        ({"x": np.array([object()])}, "x holds a numpy array of object"),
        ({"x": np.zeros(2, [("a", "i4")])}, "x holds a numpy array"),
        ({"x": torch.eye(2).to_sparse()}, "x holds a tensor of layout torch.sparse_coo"),
        ({"x": torch.empty(2, device="meta")}, "x holds a tensor on the meta device"),
        ({"x": torch.ones(2).as_subclass(Odd)}, "x holds a Odd"),
        ({"x": loop}, "x.* contains itself"),
    ],
    ids=lambda value: None if not isinstance(value, str) else value,
)
def test_what_cannot_be_kept_is_named_by_its_path(tree: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode_tree(tree)


def test_the_same_list_twice_is_no_loop() -> None:
    one = [1]
    assert through([one, one]) == [[1], [1]]


# What PyTorch's own objects have in their state_dict.


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))

        def closure(x: Tensor = x) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(x).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)  # type: ignore[arg-type]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "sgd-plain": lambda p: torch.optim.SGD(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True),
    "rprop": lambda p: torch.optim.Rprop(p),
    "asgd": lambda p: torch.optim.ASGD(p),
    "nadam": lambda p: torch.optim.NAdam(p),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizers_state_goes_on_with_the_same_bits(name: str) -> None:
    model = net()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    back = through(state)
    assert same(back, state)

    other = net()
    other_optimizer = OPTIMIZERS[name](other.parameters())
    other.load_state_dict(back["model"])
    other_optimizer.load_state_dict(back["optimizer"])
    train(model, optimizer, 3)
    train(other, other_optimizer, 3)
    assert same(
        {"m": other.state_dict(), "o": other_optimizer.state_dict()},
        {"m": model.state_dict(), "o": optimizer.state_dict()},
    )


def test_a_state_dict_keeps_the_versions_of_its_modules() -> None:
    state = net().state_dict()
    assert through(state)._metadata == state._metadata  # type: ignore[attr-defined]


class Ramp:
    """A callable with state, as LambdaLR keeps it."""

    def __init__(self) -> None:
        self.scale = 3.0

    def __call__(self, step: int) -> float:
        return step / self.scale


lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one-cycle": lambda o: lr.OneCycleLR(o, 0.1, total_steps=50),
    "lambda": lambda o: lr.LambdaLR(o, lambda step: 1 / (step + 1)),
    "lambda-object": lambda o: lr.LambdaLR(o, Ramp()),
    "multiplicative": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "multi-step": lambda o: lr.MultiStepLR(o, [2, 4, 4]),
    "step": lambda o: lr.StepLR(o, 2),
    "cosine": lambda o: lr.CosineAnnealingLR(o, 10),
    "restarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "plateau": lambda o: lr.ReduceLROnPlateau(o),
    "cyclic": lambda o: lr.CyclicLR(o, 0.01, 0.1, mode="exp_range", cycle_momentum=False),
    "sequential": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.1), lr.ExponentialLR(o, 0.9)], [3]),
    "chained": lambda o: lr.ChainedScheduler([lr.ConstantLR(o), lr.PolynomialLR(o)]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning", "ignore:The epoch parameter:UserWarning")
def test_a_schedulers_state_goes_on(name: str) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.1)
        return optimizer, SCHEDULERS[name](optimizer)

    def advance(scheduler: Any, steps: int) -> None:
        for step in range(steps):
            scheduler.step(*([float(step)] if name == "plateau" else []))

    optimizer, scheduler = make()
    advance(scheduler, 5)
    state = (scheduler.state_dict(), optimizer.state_dict())
    back = through(state)
    assert same(back, state)
    other_optimizer, other = make()
    other.load_state_dict(back[0])
    other_optimizer.load_state_dict(back[1])
    advance(scheduler, 4)
    advance(other, 4)
    assert same(other_optimizer.state_dict(), optimizer.state_dict())


def test_averages_scalers_and_generators() -> None:
    import random

    model = net()
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    state = {
        "average": average.state_dict(),
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "torch": torch.get_rng_state(),
        "numpy": np.random.RandomState(0).get_state(),
        "numpy generator": np.random.default_rng(0).bit_generator.state,
        "random": random.getstate(),
    }
    back = through(state)
    assert same(back, state)
    average.load_state_dict(back["average"])
    random.setstate(back["random"])


# Damage.


def test_a_tree_that_is_cut_short_is_named() -> None:
    data = encode_tree({"a": torch.arange(5), "b": 1})
    for end in range(len(data)):
        with pytest.raises(CheckpointError):
            decode_tree(data[:end])


def test_a_flipped_bit_never_gives_another_kind_of_error() -> None:
    data = encode_tree({"a": torch.arange(5), "b": (1, -0.0, {"c": b"x"})})
    for position in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[position] ^= 1 << bit
            with suppress(CheckpointError):
                decode_tree(bytes(flipped))  # checksums are the checkpoint's: some flips only change a value


@pytest.mark.parametrize("name", ["tree.json", "tensors.safetensors"])
def test_a_missing_or_foreign_file_is_named(tmp_path: Path, name: str) -> None:
    save_tree(tmp_path, {"a": torch.ones(2)})
    (tmp_path / name).write_bytes(b'{"v":9,"tree":1}')
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        load_tree(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        load_tree(tmp_path)


# A disk that takes no more.


def test_a_full_disk_is_an_error_of_the_system_that_names_the_file(tmp_path: Path) -> None:
    out = on_a_small_disk(
        tmp_path,
        """
        import errno, os, sys
        from pathlib import Path
        import torch
        from evenstep.errors import MachineError
        from evenstep.record.checkpoints import Checkpoints
        from evenstep.record.paths import RunPaths
        from evenstep.train.state import filled, read_tree, save_tree
        from evenstep.train.weights import save_model
        root = Path(sys.argv[1])
        small, big = torch.arange(50_000.0), torch.arange(300_000.0)
        (root / "bare").mkdir()
        try:
            save_tree(root / "bare", {"big": big})
        except OSError as error:
            assert error.errno == errno.ENOSPC
            print(error)
        (root / "bare" / "tensors.safetensors").unlink()
        (root / "bare").rmdir()

        checkpoints = Checkpoints(RunPaths(root))
        checkpoints.write(1, lambda folder: save_tree(folder, {"small": small}), {})
        model = torch.nn.Linear(1, 10_000)
        save_model(root / "model.safetensors", {"model": model.state_dict()})
        before, free = (root / "model.safetensors").read_bytes(), os.statvfs(root).f_bavail
        try:
            checkpoints.write(2, lambda folder: save_tree(folder, {"big": big}), {})
        except MachineError as error:
            print(error.message)
        try:
            save_model(root / "model.safetensors", {"model": torch.nn.Linear(1, 300_000).state_dict()})
        except MachineError as error:
            print(error.message)
        assert os.statvfs(root).f_bavail == free, "something was left"
        assert sorted(path.name for path in root.iterdir()) == ["checkpoints", "model.safetensors"]
        assert (root / "model.safetensors").read_bytes() == before
        assert checkpoints.newest_whole() == (1, {})
        assert torch.equal(filled(read_tree(checkpoints.folder(1)))["small"], small)
        """,
    )
    bare, checkpoint, model = out.splitlines()
    assert "No space left on device" in bare
    assert bare.endswith("bare/tensors.safetensors'")
    assert checkpoint.endswith("step-0000000002: No space left on device")
    assert model.endswith("model.safetensors: No space left on device")


def test_files_may_be_read_by_whom_the_umask_lets(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tree(tmp_path, {"a": torch.ones(1)})
        save_model(tmp_path / "model.safetensors", {"model": net().state_dict()})
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o640}


# model.safetensors


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))
        self.register_buffer("mask", torch.tensor([True, False, True]))


def test_a_model_loads_strictly_into_the_plain_module(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Tied()
    path = tmp_path / "model.safetensors"
    assert save_model(path, {"model": model.state_dict()}) == []
    plain = Tied()
    plain.load_state_dict(safetensors.torch.load_file(path), strict=True)
    assert same(dict(plain.state_dict()), dict(model.state_dict()))
    assert plain.head.weight is plain.embed.weight
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_compiled_model_has_no_prefix_either(tmp_path: Path) -> None:
    compiled = nn.Module()
    compiled._orig_mod = net()  # the form of what torch.compile returns
    save_model(tmp_path / "m", {"model": compiled.state_dict()})
    net().load_state_dict(safetensors.torch.load_file(tmp_path / "m"), strict=True)


def test_several_models_are_told_apart_by_name(tmp_path: Path) -> None:
    generator, critic = nn.Linear(2, 3), nn.Linear(3, 1)
    save_model(tmp_path / "m", {"generator": generator.state_dict(), "critic": critic.state_dict()})
    loaded = safetensors.torch.load_file(tmp_path / "m")
    assert sorted(loaded) == ["critic.bias", "critic.weight", "generator.bias", "generator.weight"]
    assert torch.equal(loaded["critic.weight"], critic.weight)


def test_what_is_no_tensor_is_left_out_of_the_model_and_named(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"a": 1}

    assert save_model(tmp_path / "m", {"model": Extra(2, 2).state_dict()}) == ["_extra_state"]


def test_a_place_that_takes_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError, match="file/model"):
        save_model(tmp_path / "file" / "model", {"model": net().state_dict()})


@given(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), tensors(), max_size=5))
def test_safetensors_itself_reads_the_same_tensors(named: dict[str, Tensor]) -> None:
    named = {f"a{name}": tensor for name, tensor in named.items() if is_kept(tensor.dtype)}
    with tempfile.TemporaryDirectory() as folder:
        save_tree(Path(folder), named)
        read = safetensors.torch.load_file(Path(folder) / "tensors.safetensors")
        read = {name: tensor.clone() for name, tensor in read.items()}
    assert sorted(map(raw, read.values())) == sorted(map(raw, named.values()))
    for name in read.keys() & named.keys():
        assert same(read[name], named[name].contiguous())
