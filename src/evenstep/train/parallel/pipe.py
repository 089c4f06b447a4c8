"""Messages between the stages of one replica: nests of tensors, of any shapes, that are not known beforehand."""

from __future__ import annotations

import json
import threading
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from evenstep.errors import UsageError
from evenstep.train.meeting import Meeting, lost_contact

_HEADER = 1024  # bytes that come first, with the length and the beginning of what is said

DOWN, UP, ACROSS = 0, 1, 2
"""What a message is: an activation to the next stage, its gradient back, or a gradient of a shared parameter."""


@dataclass
class Message:
    """What one stage tells another for a micro-batch. `failed`: it could not compute it, and sends nothing."""

    said: dict[str, Any] = field(default_factory=dict)
    tensors: list[Tensor | None] = field(default_factory=list)
    failed: bool = False

    def __post_init__(self) -> None:
        self.forms = [None if t is None else _form(t) for t in self.tensors]


class Pipe:
    """The stages of a replica. `words` is a gloo group of them; tensors on a GPU travel over `lanes`, a group for each
    kind of message, since the sends of one group wait for each other there."""

    def __init__(
        self, stage: int, ranks: list[int], words: dist.ProcessGroup, lanes: list[dist.ProcessGroup] | None
    ) -> None:
        self.stage, self.ranks = stage, ranks
        self.meeting = Meeting(stage, len(ranks), words)
        self._words, self._lanes = words, lanes
        self._leaving: deque[list[tuple[dist.Work, Tensor]]] = deque()  # by message; what is sent must stay
        self._coming: dict[tuple[int, int], SimpleQueue[Message | BaseException]] = {}  # by sender and kind

    def send(self, to: int, kind: int, message: Message) -> None:
        """Waits only where far more messages are under way than 1F1B has. PeerFailed where the other stage has gone."""
        text = json.dumps([message.failed, message.said, message.forms]).encode()
        raw = len(text).to_bytes(8, "little") + text
        head = raw[:_HEADER].ljust(_HEADER, b"\0")
        parts = [_bytes(head)] + ([_bytes(raw[_HEADER:])] if len(raw) > _HEADER else [])
        self._leaving.append([])
        try:
            for part in parts:
                self._push(part, to, kind, self._words)
            for tensor in message.tensors:
                if tensor is not None and tensor.numel():
                    packed = _packed(tensor.detach())
                    self._push(packed if self._lanes else packed.cpu(), to, kind, self._lane(kind))
            while len(self._leaving) > 4 * len(self.ranks):
                self._taken()
        except RuntimeError as error:
            raise self._lost(to, error) from error

    def expect(self, sender: int, kind: int, count: int, device: torch.device) -> None:
        """So many messages will come. They are taken while this stage computes, by a thread, so that `receive` has them
        at once. A GPU's come over its own stream, and need none."""
        if self._lanes or not count:
            return
        coming = self._coming[sender, kind] = SimpleQueue[Message | BaseException]()

        def take() -> None:
            try:
                for _ in range(count):
                    coming.put(self._receive(sender, kind, device))
            except Exception as error:
                coming.put(error)

        threading.Thread(target=take, name="evenstep-pipe", daemon=True).start()

    def receive(self, sender: int, kind: int, device: torch.device) -> Message:
        """Waits for the message. PeerFailed where the other stage has gone."""
        coming = self._coming.get((sender, kind))
        if coming is None:
            return self._receive(sender, kind, device)
        came = coming.get()
        if isinstance(came, BaseException):
            raise came
        return came

    def _receive(self, sender: int, kind: int, device: torch.device) -> Message:
        try:
            head = self._pull(_HEADER, sender, kind)
            length = int.from_bytes(head[:8], "little")
            text = head[8 : 8 + length]
            if length > _HEADER - 8:
                text += self._pull(length - (_HEADER - 8), sender, kind)
            failed, said, about = json.loads(text)
            tensors = [None if form is None else self._tensor(form, sender, kind, device) for form in about]
        except RuntimeError as error:
            raise self._lost(sender, error) from error
        return Message(said, tensors, failed)

    def settle(self) -> None:
        """Waits until all that was sent has been taken. All that was expected has come by now."""
        self._coming.clear()
        try:
            while self._leaving:
                self._taken()
        except RuntimeError as error:
            raise self._lost(None, error) from error

    def _push(self, tensor: Tensor, to: int, kind: int, group: dist.ProcessGroup) -> None:
        work = dist.isend(tensor, self.ranks[to], group=group, tag=kind)
        assert work is not None
        self._leaving[-1].append((work, tensor))

    def _taken(self) -> None:
        """Waits until the oldest message has been."""
        for work, _ in self._leaving.popleft():
            work.wait()

    def _pull(self, size: int, sender: int, kind: int) -> bytes:
        buffer = torch.empty(size, dtype=torch.uint8)
        dist.recv(buffer, self.ranks[sender], group=self._words, tag=kind)
        return buffer.numpy().tobytes()

    def _tensor(self, form: list[Any], sender: int, kind: int, device: torch.device) -> Tensor:
        shape, strides, name = form
        once = [size if stride else min(size, 1) for size, stride in zip(shape, strides, strict=True)]
        packed = torch.empty(once, dtype=getattr(torch, name), device=device if self._lanes else "cpu")
        if packed.numel():
            dist.recv(packed, self.ranks[sender], group=self._lane(kind), tag=kind)
        packed = packed.to(device)
        if packed.stride() != tuple(strides):
            packed = torch.empty_strided(once, strides, dtype=packed.dtype, device=device).copy_(packed)
        return packed if once == shape else packed.expand(shape)

    def _lane(self, kind: int) -> dist.ProcessGroup:
        return self._lanes[kind] if self._lanes else self._words

    def _lost(self, stage: int | None, error: RuntimeError) -> Exception:
        when = "in the pipeline" if stage is None else f"(stage {stage}, rank {self.ranks[stage]}) in the pipeline"
        return lost_contact(self.ranks[self.stage], error, when)


def _form(tensor: Tensor) -> list[Any]:
    """Shape, strides and dtype. Kernels take other paths for other strides, so these travel too."""
    if tensor.layout is not torch.strided or tensor.is_complex():
        raise UsageError(
            f"a {tensor.layout} tensor of {tensor.dtype} goes from one stage to the next", do="cut elsewhere"
        )
    return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype).removeprefix("torch.")]


def _packed(tensor: Tensor) -> Tensor:
    """The values without gaps; what is repeated along a dimension of stride 0 only once."""
    for dimension, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor.contiguous()


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
