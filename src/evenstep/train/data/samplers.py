"""torch's samplers and loaders, and what to write in place of each: evenstep chooses who reads what."""

from __future__ import annotations

from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
    default_convert,
)

from evenstep.errors import UsageError

_SHUFFLED = "nothing: shuffling, another order in every epoch, is the default"


def instead_of(sampler: object, name: str = "sampler") -> str:
    """What to write in `run.steps` for what `sampler` does."""
    kind = type(sampler)
    if kind is SequentialSampler:
        return "shuffle=False"
    if isinstance(sampler, RandomSampler) and kind is RandomSampler:
        count = len(sampler.data_source)
        if sampler.replacement or sampler.num_samples != count:
            alike = f"weights=[1.0] * {count}, num_samples={sampler.num_samples}"
            return alike if sampler.replacement else alike + ", replacement=False"
        return _SHUFFLED
    if isinstance(sampler, WeightedRandomSampler):
        words = f"weights={name}.weights, num_samples={sampler.num_samples}"
        return words if sampler.replacement else words + ", replacement=False"
    if kind is SubsetRandomSampler:
        return f"torch.utils.data.Subset(data, {name}.indices) as the data set"
    if isinstance(sampler, DistributedSampler):
        return "nothing: every process gives the whole data set, and evenstep chooses what each one reads"
    if isinstance(sampler, BatchSampler) and kind is BatchSampler:
        return f"{instead_of(sampler.sampler, name + '.sampler')}; the batch is start(micro_batch={sampler.batch_size})"
    if isinstance(sampler, BatchSampler):
        return "lengths= if it puts samples of similar length together, else order=, a function epoch -> indices"
    return f"order={name}, which is read anew for every epoch"


def instead_of_loader(loader: DataLoader[Any]) -> str:
    """What to write in `run.steps` for what `loader` does."""
    words = []
    sampler = loader.sampler if loader.batch_sampler is None or type(loader.batch_sampler) is BatchSampler else None
    if loader.batch_size is not None:
        words.append(f"batch_size={loader.batch_size} is start(micro_batch={loader.batch_size})")
    if loader.num_workers:
        words.append(f"num_workers becomes loaders={loader.num_workers}")
    if loader.collate_fn not in (default_collate, default_convert):
        words.append("collate_fn becomes collate=loader.collate_fn")
    if loader.drop_last:
        words.append("drop_last=True stays")
    if sampler is None:
        words.append(f"for the {type(loader.batch_sampler).__name__}: {instead_of(loader.batch_sampler)}")
    elif instead_of(sampler) != _SHUFFLED:
        words.append(f"for the {type(sampler).__name__}: {instead_of(sampler, 'loader.sampler')}")
    return "; ".join(["give loader.dataset", *words])


def check_order(sampler: Sampler[Any]) -> None:
    """UsageError for a sampler whose order is not that of all samples of an epoch."""
    if isinstance(sampler, BatchSampler):
        raise UsageError(
            f"order= is a {type(sampler).__name__}, which gives batches, expected single indices",
            do=f"write {instead_of(sampler)}",
        )
    if isinstance(sampler, DistributedSampler):
        raise UsageError(
            f"order= is a {type(sampler).__name__}, which gives each process a part of the data set only",
            do="leave it out: evenstep chooses what each process reads, and shuffles anew in every epoch",
        )
