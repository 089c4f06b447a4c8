"""A model over several devices of one process: the same bits, and activations that move where they must."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import evenstep
from evenstep.errors import UsageError
from evenstep.train.parallel.fan_out import Uses, in_order, refuse_other_order
from evenstep.train.parallel.split import Split, split_model
from evenstep.train.sizes import unit_sizes
from tests.ranks import run_ranks
from tests.train.scripts import TRAININGS, Transformer, train_batchnorm, train_cnn, train_transformer, training_run
from tests.train.test_threads import train_checkpointed

CPU = torch.device("cpu")
TWO = ["cpu:0", "cpu:1"]


def split(model: nn.Module, devices: Any = TWO, example: Any = None) -> Split:
    return split_model(model, devices, CPU, exact=True, example=example)


@pytest.mark.parametrize("name", [*TRAININGS, "checkpointed", "batchnorm"])
def test_same_bits(name: str, tmp_path: Path) -> None:
    train = {**TRAININGS, "checkpointed": train_checkpointed, "batchnorm": train_batchnorm}[name]
    alone = train(tmp_path / "alone")
    assert train(tmp_path / "split", split=2) == alone
    assert train(tmp_path / "threads", split=2, thread_replicas=2) == alone


def test_with_processes(tmp_path: Path) -> None:
    alone = train_transformer(tmp_path / "alone")
    env = {"EVENSTEP_SPLIT": "3", "EVENSTEP_THREAD_REPLICAS": "2"}
    with pytest.raises(UsageError, match="only 3 share no parameter with an earlier one"):
        train_transformer(tmp_path / "four", split=4)
    for found in run_ranks(train_transformer, 2, tmp_path / "both", env=env):
        assert found == alone


def test_activations_move_and_come_back() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    parameters = list(model.parameters())
    expected = model(torch.ones(2, 4))
    got: dict[str, Tensor] = {}
    gave: dict[str, Tensor] = {}
    for name, unit in model.named_children():
        unit.register_forward_hook(lambda _, args, output, name=name: gave.update({name: output}))
    placed = split(model, ["cpu:0", "cpu:1", "cpu:2"])
    for name, unit in model.named_children():
        unit.register_forward_pre_hook(lambda _, args, name=name: got.update({name: args[0]}))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert placed.places == {"0": 0, "1": 0, "2": 1, "3": 2}
    output = model(torch.ones(2, 4))
    assert torch.equal(output, expected)
    assert placed.moves == 3
    assert got["1"] is gave["0"]
    assert got["2"].data_ptr() != gave["1"].data_ptr()
    assert got["3"].data_ptr() != gave["2"].data_ptr()
    assert output.data_ptr() != gave["3"].data_ptr()
    output.sum().backward()
    assert all(p.grad is not None for p in parameters)
    assert "activations move 3 times" in placed.said()


Pair = namedtuple("Pair", "first second")


class Nested(nn.Module):
    """Keyword arguments and nests between units; a unit that is called twice; a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.encoder = nn.ModuleDict({"a": Unit(), "b": Unit()})
        self.head = Unit()

    def forward(self, x: Tensor) -> Any:
        first = self.encoder["a"](x * self.scale)
        second = self.encoder["b"](first["pair"].first, extra=(first["pair"].second, "text", None))
        return self.head(x, extra=[second["pair"].first]), self.encoder["a"](x)


class Unit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor, extra: Any = ()) -> Any:
        y = super().forward(x)
        for tensor in extra:
            y = y + tensor if isinstance(tensor, Tensor) else y
        return {"pair": Pair(y, [y * 2][0]), "n": 3}


def test_any_nest_moves_by_hand() -> None:
    model = Nested()
    x = torch.ones(2, 3)
    expected = model(x)
    placed = split(model, {"encoder": "cpu:1", "encoder.b": "cpu:2"})
    assert placed.places == {"encoder.a": 1, "encoder.b": 2, "head": 0}
    assert [d.index for d in placed.devices] == [0, 1, 2]
    output = model(x)
    # x to a; two to b; one to head; x to a again; the output of the second call of a, and none of head's, come back
    assert placed.moves == 1 + 2 + 1 + 1 + 2
    assert type(output[0]["pair"]) is Pair
    assert output[0]["n"] == 3
    for a, b in zip(expected, output, strict=True):
        assert torch.equal(a["pair"].first, b["pair"].first)


def test_an_operation_on_two_devices_is_explained() -> None:
    """As GPUs would say it: there a sum of what two devices hold is an error."""

    class Apart(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            self[1](self[0](x))
            raise RuntimeError("Expected all tensors to be on the same device, but found at least two devices")

    model = Apart(nn.Linear(2, 2), nn.Linear(2, 2))
    split(model)
    with pytest.raises(RuntimeError, match="on the same device") as caught:
        model(torch.ones(1, 2))
    assert "Apart is split over 2 devices: cpu:0 has 0" in caught.value.__notes__[0]


class Several(nn.Module):
    """What `first` returns is used by `second`, more than once, and again by the model."""

    def __init__(self, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), second, nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = self.second(x, x, x)
        found: Tensor = self.last(x + (y[0] if isinstance(y, tuple) else y))
        return found


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, *x: Tensor) -> Tensor:
        q, k, v = (part(y) for part, y in zip(self.parts, x, strict=True))
        gated: Tensor = q.sigmoid() * k + v
        return gated


def test_a_tensor_with_several_uses_has_the_same_gradient_or_is_refused() -> None:
    attention, gate = Several(nn.MultiheadAttention(8, 2)), Several(Gate())  # the first looks whether q is k and k is v
    for model, exact in ((attention, True), (gate, False)):
        alone, x = copy.deepcopy(model), torch.rand(3, 5, 8)
        split(model, {"second": "cpu:1", "last": "cpu:1"})
        losses = [m(x).square().sum() for m in (model, alone)]
        if exact:
            refuse_other_order(losses[0])
        else:
            with pytest.raises(UsageError, match="moved to another device for second is used several times"):
                refuse_other_order(losses[0])
        for loss in losses:
            loss.backward()
        grads = [[p.grad for p in m.parameters() if p.grad is not None] for m in (model, alone)]
        assert all(map(torch.equal, *grads)) == exact
    orders: list[tuple[Uses, bool]] = [
        ([[3, 2, 1]], True),
        ([[3, 2], 1], True),
        ([2, [1]], True),
        ([3, [2], [1]], True),
        ([[2], [3, 1]], False),
        ([3, [2, 1]], False),
        ([[2], 3, 1], False),
        ([[[5], [4, 3]], 1], False),
    ]
    for uses, same in orders:
        assert in_order(uses) == same, uses


def train_unfreezing(directory: Path) -> None:
    with training_run(directory) as run:
        model = run.prepare(Several(Gate()), devices={"second": "cpu:1", "last": "cpu:1"})
        optimizer = torch.optim.SGD(model.parameters())
        for step in run.steps(torch.utils.data.TensorDataset(torch.rand(32, 8)), epochs=1):
            model.first.requires_grad_(step.number > 0)
            step.backward(lambda model, batch: (model(batch[0]).sum(), len(batch[0])))
            optimizer.step()
            optimizer.zero_grad()
            assert step.number == 0


def test_that_is_seen_after_an_unfreezing_too(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="moved to another device for second is used several times"):
        train_unfreezing(tmp_path)


def test_balanced_by_size() -> None:
    wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 200), nn.Linear(200, 2), nn.Linear(2, 2))
    sizes = unit_sizes(wide)
    assert [size.state for size in sizes] == [24, 2400, 1608, 24]
    assert [size.training for size in sizes] == [96, 9600, 6432, 96]
    assert split(wide).places == {"0": 0, "1": 0, "2": 1, "3": 1}
    heavy = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in heavy.state_dict().items()}
    stands = torch.get_rng_state()
    kept = {size.name: size.activations for size in unit_sizes(heavy, torch.ones(1000, 2))}
    assert torch.equal(torch.get_rng_state(), stands)
    assert all(torch.equal(before[name], value) for name, value in heavy.state_dict().items())
    assert not heavy[0]._forward_hooks
    assert kept["0"] == 2 * 8000  # what it gets and gives
    assert kept["1"] == kept["3"] == 8000
    assert 8000 < kept["2.0"] < 8100  # with the statistics
    assert kept["2.1"] > 8000  # with the mask
    wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2000))
    assert split(wide).places == {"0": 0, "1": 0, "2": 0, "3": 1}
    narrow = nn.Sequential(
        *(nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Sigmoid()) for _ in range(3)), nn.Linear(2, 9)
    )
    assert split(narrow).places != split(narrow, example=(torch.ones(1000, 2),)).places


def test_tied_units_lie_together() -> None:
    model = Transformer()
    placed = split(model, TWO)
    assert placed.places == {"embed": 0, "blocks.0": 0, "blocks.1": 1, "head": 0}
    assert sum(placed.bytes) == sum(p.numel() * 4 for p in model.parameters())

    words = nn.Sequential(nn.Embedding(500, 8), nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    assert split(words).places == {"0": 0, "1": 0, "2": 1, "3": 1}  # words and positions are added up

    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
            self.own = self.third.weight

    assert split(Owner()).places == {"first": 0, "second": 1, "third": 0}


def test_thread_replicas_move_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Split] = []

    def keep(*about: Any) -> Split:
        made.append(split_model(*about))
        return made[-1]

    monkeypatch.setattr("evenstep.train.parallel.split.split_model", keep)
    train_cnn(tmp_path / "one", split=2)
    train_cnn(tmp_path / "two", split=2, thread_replicas=2)
    assert made[0].moves == made[1].moves > 100


@pytest.mark.parametrize(
    ("make", "devices", "message"),
    [
        (Transformer, ["cpu:0", "cpu:0"], "expected one or more different devices"),
        (Transformer, ["cpu:0", "disk"], "'disk' is no device"),
        (Transformer, ["cpu:0", "cuda:0"], "cuda:0 was asked for"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), TWO, "has 1 units .0., and 2 devices were asked for"),
        (Transformer, {"head": "cpu:1"}, "head.weight and embed.weight are one parameter"),
        (Transformer, {"nothing": "cpu:1"}, "names 'nothing', which is no submodule"),
        (lambda: torch.compile(nn.Linear(2, 2), backend="eager"), TWO, "is compiled"),
    ],
)
def test_refused(make: Callable[[], nn.Module], devices: Any, message: str) -> None:
    if torch.cuda.is_available() and "cuda" in message:
        pytest.skip("there are GPUs")
    with pytest.raises(UsageError, match=message):
        split(make(), devices)


def test_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_cnn(tmp_path / "run", split=2)
    assert "evenstep: split over 2 devices: cpu:0 has features.0" in capsys.readouterr().err
    alone = train_cnn(tmp_path / "alone")
    devices = {"classify.2": "cpu:1"}
    prepare = evenstep.Run.prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evenstep.Run, "prepare", lambda run, model: prepare(run, model, devices=devices))
        assert train_cnn(tmp_path / "by hand", thread_replicas=2) == alone
    assert "cpu:1 has classify.2 (20.5 kB)" in capsys.readouterr().err
    with pytest.raises(UsageError, match="--split together with --shard"):
        training_run(tmp_path / "stages", split=2, stages=1, shard=True)
