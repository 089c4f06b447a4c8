"""Messages between stages."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.parallel.pipe import DOWN, UP, Message, Pipe
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 6, 5, generator=generator)
    return [
        x,
        x.transpose(0, 2),
        x[:, 0],
        x[:, :1].expand(4, 7, 5),
        torch.ones(()).expand(3, 2),
        torch.randn(2, 3, 4, 4, generator=generator).to(memory_format=torch.channels_last),
        torch.randn(2, 3, 1, 1, generator=generator).to(memory_format=torch.channels_last),
        x[:0],
        x.to(torch.bfloat16),
        torch.arange(3),
        x > 0,
        torch.tensor(2.5, dtype=torch.float64),
    ]


def test_tensors_arrive_with_their_shapes_strides_and_dtypes() -> None:
    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pipe = Pipe(rank, [0, 1], dist.new_group(backend="gloo"), None)
        said = {"long": ["words"] * 1000, "more": None}
        if rank == 0:
            pipe.send(1, DOWN, Message(said, [None, *tensors()]))
            assert pipe.receive(1, UP, CPU).failed
        else:
            pipe.send(0, UP, Message(failed=True))
            message = pipe.receive(0, DOWN, CPU)
            assert not message.failed
            assert message.said == said
            nothing, *arrived = message.tensors
            assert nothing is None
            for sent, came in zip(tensors(), arrived, strict=True):
                assert came is not None
                assert (came.shape, came.stride(), came.dtype) == (sent.shape, sent.stride(), sent.dtype)
                assert torch.equal(came, sent)
        pipe.settle()
        dist.destroy_process_group()

    run_ranks(body, 2)


def test_many_tensors_of_one_message_wait_for_nobody() -> None:
    """Both send at the same time, more than a pipe keeps under way."""

    def body() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        pipe = Pipe(rank, [0, 1], dist.new_group(backend="gloo"), None)
        pipe.send(1 - rank, DOWN, Message(tensors=[torch.full((1000,), float(k)) for k in range(100)]))
        came = pipe.receive(1 - rank, DOWN, CPU).tensors
        assert [t is not None and t[0].item() for t in came] == list(range(100))
        pipe.settle()
        dist.destroy_process_group()

    run_ranks(body, 2, timeout=20)


def test_what_cannot_travel_is_refused() -> None:
    for tensor in (torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex64)):
        with pytest.raises(UsageError, match="from one stage to the next"):
            Message(tensors=[tensor])
