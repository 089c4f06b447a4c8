"""Losses that compare the samples of the whole global batch with each other (contrastive ones), in two passes.

Method: L. Gao et al., Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup, 2021 (arXiv:2101.06983).
First the embeddings of every micro-batch, without a graph, and from all of them the loss and its gradient with respect
to the embeddings; then each micro-batch once more, with a graph, whose backward pass begins with its rows of that
gradient. So a micro-batch is a leaf like any other, and accumulation on any number of processes gives what the big
batch gives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from evenstep.errors import LossError, UsageError
from evenstep.train.batch import tensors, to_device
from evenstep.train.casts import no_cast_cache
from evenstep.train.loss import naming_nondeterministic
from evenstep.train.meeting import peer_failed
from evenstep.train.models import buffers
from evenstep.train.purity import Untouched, refuse_strangers
from evenstep.train.state import decode_tree, encode_tree
from evenstep.train.statistics import refuse_statistics
from evenstep.train.synchronised import working

if TYPE_CHECKING:
    from evenstep.train.step import Step

Nest = Any  # a tensor, or a dict or tuple of nests

_KIND = "step.backward_whole"


@dataclass(frozen=True)
class Second:
    """What the second pass begins with: `loss` and `metrics` of the global batch, and its gradients."""

    loss: float
    metrics: Mapping[str, float]
    embed_fn: Callable[..., Any]
    first: Mapping[int, list[Tensor]]  # embeddings of the first pass, by micro-batch
    gradients: Mapping[int, list[Tensor | None]]  # with respect to them
    parameters: list[Tensor | None]  # with respect to what `loss_fn` itself uses of the models
    compare: bool  # whether the embeddings are to be the same again

    def loss_of(self, i: int) -> Callable[..., Any]:
        """A loss function of micro-batch i, whose gradient is that of the whole loss."""

        def loss_fn(*given: Any) -> tuple[Tensor, None]:
            flat = tensors(_plain(self.embed_fn(*given)))
            self._check(i, flat)
            terms = [
                (e.to(g.dtype) * g.to(e.device)).sum()
                for e, g in zip(flat, self.gradients[i], strict=True)
                if g is not None and e.requires_grad
            ]
            if i == min(self.gradients):  # once, with whichever process has it
                own = zip(_parameters(given[:-1]), self.parameters, strict=True)
                terms += [(p * g.to(p.device)).sum() for p, g in own if g is not None]
            if not terms:
                return torch.zeros((), device=flat[0].device), None
            total = terms[0]
            for term in terms[1:]:
                total = total + term
            return total, None

        return loss_fn

    def _check(self, i: int, flat: Sequence[Tensor]) -> None:
        before = self.first[i]
        same = [e.shape for e in flat] == [e.shape for e in before]
        if same and self.compare:
            same = all(_near(e.detach(), b) for e, b in zip(flat, before, strict=True))
        if not same:
            raise LossError(
                f"the embeddings of micro-batch {i}, computed twice, are not the same: the embedding function or the "
                "model has a state or a random generator of its own",
                do="draw from the global generators of torch, numpy and random, which are keyed for every micro-batch; "
                "keep no hidden state from one call for the next",
            )


class Whole:
    """One call of step.backward_whole."""

    def __init__(
        self,
        step: Step,
        embed_fn: Callable[..., Any],
        loss_fn: Callable[..., Any],
        models: Sequence[nn.Module],
        call: int,
        site: str,
    ) -> None:
        for name, fn in (("embed_fn", embed_fn), ("loss_fn", loss_fn)):
            if not callable(fn):
                raise LossError(
                    f"step.backward_whole got {type(fn).__name__} as {name}, expected a function",
                    do="step.backward_whole(embed_fn, loss_fn): embed_fn(model, batch) gives embeddings with a row a "
                    "sample, loss_fn(model, embeddings) the loss of the whole global batch",
                )
        if step._layout.grid.stages > 1:
            raise UsageError(
                "step.backward_whole is not offered with --stages: the embeddings are on the last stage alone",
                do="use --processes, --thread-replicas or --shard instead of --stages",
            )
        self._step, self._embed_fn, self._loss_fn, self._models = step, embed_fn, loss_fn, models
        self._call, self._site = call, site
        self._first = step.number == step._models.first_step and call == 0
        self._embeddings: dict[int, Nest] | None = None  # of all micro-batches, on every process

    def trial(self, batch: Any) -> Tensor:
        """For a look at what the second pass of a micro-batch needs."""
        floats = [t for t in tensors(_plain(self._embed_fn(*self._models, batch))) if t.is_floating_point()]
        return torch.stack([t.float().sum() for t in floats]).sum()

    def differentiate(self) -> Second:
        """The first pass (once), and the loss with its gradients at the scale of now."""
        step = self._step
        modules = step._models.modules(self._models)
        refuse_statistics(modules.items())
        step._layout.statistics.watch(step._models.modules().items())
        named = dict(step._models.parameters(self._models))
        untouched = Untouched(named, lambda: buffers(step._models.named(self._models)), modules)
        if step._layout.grid.some_wait:
            step._meeting.exchange(f"{_KIND}, its beginning", signature=f"step {step.number}", site=self._site)
        with (
            step._randomness.keyed(),
            step._layout.statistics.active(),  # and nothing counts: the second pass does
            naming_nondeterministic(self._first),
            no_cast_cache(),
        ):
            if self._embeddings is None:
                self._embeddings = self._gathered(lambda: self._own(untouched))
            passes = step._layout.lockstep.passes(self._models, "the loss of step.backward_whole", self._site)
            second = passes.run(partial(self._second, self._embeddings, untouched), "whole")
        self._agree(second, passes.failed)
        assert second is not None
        return second

    def _own(self, untouched: Untouched) -> list[tuple[int, Nest]]:
        """The embeddings of this process's micro-batches."""
        step, found = self._step, []
        layout, plan = step._layout, step._plan

        def embed(i: int) -> None:
            batch = step._batch(i)
            step._randomness.begin_micro_batch(step.number, self._call, i)
            with torch.no_grad(), untouched.while_computing(batch), step._precision.computing():
                found.append((i, _plain(self._embed_fn(*self._models, batch))))

        mine = step._share
        shares = [plan.among(layout.grid.leaves(plan.micro_batches, rank)) for rank in layout.lockstep.ranks]
        passes = layout.lockstep.passes(self._models, "the embeddings of step.backward_whole", self._site)
        for number in range(max(map(len, shares))):
            passes.run(partial(embed, mine[number]) if number < len(mine) else None)
        passes.check()
        return found

    def _gathered(self, own: Callable[[], list[tuple[int, Nest]]]) -> dict[int, Nest]:
        step = self._step
        alone = step._meeting.world_size == 1
        try:
            with working(step._layout.together):
                rows = own()
            payload = b"" if alone else b"+" + encode_tree([[i, _moved(nest, "cpu")] for i, nest in rows])
        except Exception as error:
            payload = f"-{type(error).__name__}: {error}".encode()
            step._meeting.exchange(_KIND, payload, signature=f"step {step.number}", site=self._site)
            raise
        answers = step._meeting.exchange(_KIND, payload, signature=f"step {step.number}", site=self._site)
        if not alone:
            for rank, answer in enumerate(answers):
                if answer[:1] == b"-":
                    raise peer_failed(rank, f"failed in step {step.number}: {answer[1:].decode()}")
            rows = [(i, to_device(nest, step._device)) for answer in answers for i, nest in decode_tree(answer[1:])]
        found = dict(sorted(rows, key=lambda row: row[0]))
        forms = {i: _form(nest) for i, nest in found.items()}
        first = min(forms)
        for i, form in forms.items():
            if form != forms[first]:
                raise LossError(
                    f"the embedding function returned {forms[first]} for micro-batch {first} and {form} for "
                    f"micro-batch {i}",
                    do="return the same nest of tensors for every micro-batch, with one size behind dimension 0 "
                    "(the rows); pad what differs",
                )
        return found

    def _second(self, embeddings: dict[int, Nest], untouched: Untouched) -> Second:
        step = self._step
        columns = list(zip(*map(tensors, embeddings.values()), strict=True))
        joined = [_leaf(torch.cat(column), step._precision.name != "fp32") for column in columns]
        parameters = _parameters(self._models)
        trained = [p for p in parameters if p.requires_grad]
        step._randomness.begin("whole", step.number, self._call)
        whole = _filled(embeddings[min(embeddings)], iter(joined))
        with torch.enable_grad(), untouched.while_computing(None), step._precision.computing():
            total, metrics = _checked(self._loss_fn(*self._models, whole))
        if self._first:
            self._refuse_strangers(total, parameters)
        inputs = [t for t in [*joined, *trained] if t.requires_grad]
        factor = 1.0 if step._precision.scaler is None else step._precision.scaler.factor(None)
        found: Sequence[Tensor | None] = torch.autograd.grad(
            step._precision.scaled(total, None), inputs, allow_unused=True
        )
        by_input = {id(t): None if g is None else g / factor for t, g in zip(inputs, found, strict=True)}
        sizes = {i: [len(t) for t in tensors(nest)] for i, nest in embeddings.items()}
        gradients: dict[int, list[Tensor | None]] = {i: [] for i in embeddings}
        for k, t in enumerate(joined):
            gradient = by_input.get(id(t))
            rows = [size[k] for size in sizes.values()]
            pieces = [None] * len(rows) if gradient is None else gradient.split(rows)
            for i, piece in zip(embeddings, pieces, strict=True):
                gradients[i].append(piece)
        return Second(
            float(total.detach()),
            metrics,
            self._embed_fn,
            {i: tensors(nest) for i, nest in embeddings.items()},
            gradients,
            [by_input.get(id(p)) for p in parameters],
            self._first,
        )

    def _refuse_strangers(self, total: Tensor, parameters: Sequence[nn.Parameter]) -> None:
        known = {id(p) for p in parameters} | {id(p) for _, p in self._step._models.parameters()}
        try:
            refuse_strangers(total, known)
        except LossError as error:
            if self._step._layout.grid.shards == 1:
                raise
            raise UsageError(
                "the loss function of step.backward_whole calls a module whose parameters are cut by themselves",
                do="call it in the embedding function; or name the modules that are: prepare(..., shard=[...])",
            ) from error

    def _agree(self, second: Second | None, error: Exception | None) -> None:
        """Every process has computed the same loss, or all raise."""
        step = self._step
        said = {
            "failed": None if error is None else f"{type(error).__name__}: {error}",
            "loss": None if second is None else repr(second.loss),
        }
        answers = step._exchange(f"{_KIND}, its loss", said, self._site)
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer["failed"] is not None:
                raise peer_failed(rank, f"failed in step {step.number}: {answer['failed']}")
            there, here = answers[0]["loss"], answer["loss"]
            if here != there:
                raise LossError(
                    f"the loss of the whole batch is {there} on rank 0 and {here} on rank {rank}",
                    do="compute it from the models and the embeddings alone; random numbers from torch's, numpy's and "
                    "random's global generators are the same everywhere",
                )


def _plain(nest: Any) -> Nest:
    """`nest` in dicts and tuples. LossError for what is no tensor with rows."""
    if isinstance(nest, Tensor):
        if nest.dim() == 0:
            raise LossError(
                "the embedding function returned one number, expected tensors with a row a sample",
                do="return the embeddings; the loss is computed from all of them, in the second function",
            )
        return nest
    if isinstance(nest, Mapping) and nest:
        return {str(name): _plain(value) for name, value in nest.items()}
    if isinstance(nest, (tuple, list)) and nest:
        return tuple(map(_plain, nest))
    raise LossError(
        f"the embedding function returned {type(nest).__name__}, expected tensors with a row a sample",
        do="return a tensor, or a dict or tuple of tensors: embeddings, and whatever else the loss needs (labels)",
    )


def _moved(nest: Nest, device: str) -> Nest:
    return to_device(nest, device)


def _form(nest: Nest) -> str:
    if isinstance(nest, dict):
        return "{" + ", ".join(f"{name!r}: {_form(value)}" for name, value in nest.items()) + "}"
    if isinstance(nest, tuple):
        return "(" + ", ".join(map(_form, nest)) + ")"
    sizes = ", ".join(["rows", *map(str, nest.shape[1:])])
    return f"{str(nest.dtype).removeprefix('torch.')}[{sizes}]"


def _filled(nest: Nest, leaves: Any) -> Nest:
    """`nest` with the next of `leaves` in place of each tensor."""
    if isinstance(nest, dict):
        return {name: _filled(value, leaves) for name, value in nest.items()}
    if isinstance(nest, tuple):
        return tuple(_filled(value, leaves) for value in nest)
    return next(leaves)


def _leaf(joined: Tensor, widen: bool) -> Tensor:
    """A leaf of a graph; with `widen` in 32 bits at least, so that small gradients do not vanish."""
    if not (joined.is_floating_point() or joined.is_complex()):
        return joined
    return (joined.float() if widen and joined.dtype.itemsize < 4 else joined).detach().requires_grad_()


def _checked(returned: Any) -> tuple[Tensor, dict[str, float]]:
    total, metrics = returned, {}
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        total, metrics = returned
    if not isinstance(total, Tensor) or total.numel() != 1 or not total.is_floating_point():
        got = f"tensor of shape {tuple(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
        raise LossError(
            f"the loss of the whole batch is a {got}, expected a tensor of one number",
            do="return the loss, normalised as you like, or (loss, {name: number})",
        )
    if not total.requires_grad:
        raise LossError(
            "the loss of the whole batch depends on no embedding and no parameter: there is nothing to differentiate",
            do="return the loss as computed, without .detach(), torch.no_grad() or .item()",
        )
    if not isinstance(metrics, Mapping):
        raise LossError(f"beside the loss came a {type(metrics).__name__}, expected metrics {{name: number}}")
    return total, {str(name): float(value) for name, value in metrics.items()}


def _parameters(models: Sequence[nn.Module]) -> list[nn.Parameter]:
    """Each parameter once; in the same order for a copy of the models."""
    return list(dict.fromkeys(p for model in models for p in model.parameters()))


def _near(one: Tensor, other: Tensor) -> bool:
    """Equal but for what other kernels (of a pass without a graph) may round."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    finite = other[other.isfinite()]
    size = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0.02, atol=0.02 * size, equal_nan=True)
