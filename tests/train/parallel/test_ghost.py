"""What stands on a stage for the tensors of earlier ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from evenstep.errors import UsageError
from evenstep.train.parallel.ghost import Ghost, blank, find, put_together, take_apart

CPU = torch.device("cpu")


def ghost(*shape: int, dtype: torch.dtype = torch.float32) -> Ghost:
    return Ghost.of("a unit", CPU, lambda: blank(shape, dtype, CPU))


def test_what_is_made_of_a_ghost_is_one_and_knows_its_shape() -> None:
    x, weight = ghost(2, 3), torch.randn(5, 3)
    for made, shape in (
        (x + 1, (2, 3)),
        (torch.randn(3) * x, (2, 3)),
        (F.linear(x, weight), (2, 5)),
        (x.flatten().relu(), (6,)),
        (x[:, None, 1:], (2, 1, 2)),
        (torch.cat([x, torch.zeros(1, 3)]), (3, 3)),
        (F.dropout(x), (2, 3)),
        (x.view(3, 2).transpose(0, 1), (2, 3)),
        (F.max_pool2d(ghost(1, 1, 4, 4), 2), (1, 1, 2, 2)),
        (x.mul_(2), (2, 3)),
        (torch.nn.Parameter(torch.zeros(3, device="meta")) + x, (2, 3)),
    ):
        assert isinstance(made, Ghost)
        assert tuple(made.shape) == shape
        assert made.source == "a unit"
    first, second = x.chunk(2, dim=0)
    assert isinstance(first, Ghost)
    assert second.size(0) == 1
    assert x.to(torch.bfloat16).dtype == torch.bfloat16
    assert (x.device, x.dim(), len(x), x.is_cuda) == (CPU, 2, 2, False)
    assert find({"more": [1, (x,)]}) is x
    assert find([torch.zeros(1), None]) is None


def test_what_takes_only_a_form_of_it_is_a_tensor() -> None:
    x = ghost(2, 3, dtype=torch.bfloat16)
    for made in (x.new_zeros(4), torch.zeros_like(x), torch.ones(2, 3).to(x), torch.arange(3).type_as(x)):
        assert type(made) is torch.Tensor
        assert made.dtype == torch.bfloat16
    torch.manual_seed(1)
    noise = torch.randn_like(ghost(2, 3))
    torch.manual_seed(1)
    assert torch.equal(noise, torch.randn(2, 3))


def test_random_numbers_are_drawn_as_for_the_tensor() -> None:
    def after(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(2)
        F.dropout(x, 0.5).bernoulli_(0.5)
        return torch.rand(4)

    assert torch.equal(after(ghost(3, 5)), after(torch.ones(3, 5)))


def test_its_values_cannot_be_read_or_written_elsewhere() -> None:
    x = ghost(2, 2)
    for read in (
        lambda: bool(x.sum() > 0),
        lambda: float(x.sum()),
        lambda: x.tolist(),
        lambda: x.numpy(),
        lambda: x[x > 0],
        lambda: torch.nonzero(x),
    ):
        with pytest.raises(UsageError, match="a value of a unit, which lies on another stage, is read"):
            read()
    here = torch.zeros(2, 2)
    for write in (
        lambda: here.add_(x),
        lambda: here.__setitem__(0, x[0]),
        lambda: here.__iadd__(x),
        lambda: torch.add(here, x, out=here),
    ):
        with pytest.raises(UsageError, match="written into a tensor"):
            write()
    assert not here.any()


def test_nests_are_taken_apart_and_put_together() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    nest = (x, {"more": [y, x, None, 2, 0.5, "word", True]})
    tensors: list[torch.Tensor] = []
    structure = take_apart(nest, tensors, "it")
    assert [id(t) for t in tensors] == [id(x), id(y)]
    assert put_together(structure, tensors) == nest
    for strange in (object(), {1: x}, {x}):
        with pytest.raises(UsageError, match="it is, or holds, a"):
            take_apart([strange], [], "it")
