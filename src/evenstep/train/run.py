"""A run: what `evenstep.start()` returns, and all that a training script asks of it."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from evenstep.environment import STOPPING
from evenstep.errors import EvenstepError, MachineError, PeerFailed, Stopped, UsageError
from evenstep.plan.bucketed import bucketed
from evenstep.plan.grid import Grid
from evenstep.plan.integers import integer
from evenstep.plan.lanes import Lanes, LaneSchedule, LaneStep, Plan
from evenstep.plan.schedule import Schedule, StepPlan
from evenstep.plan.sizes import micro_batch_sizes
from evenstep.record.activity import ENDING, EVALUATING, LOADING, SAVING
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.identity import read_identity, write_identity
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole
from evenstep.record.uncaught import Uncaught, error_path, type_name, write_uncaught
from evenstep.train import collectives
from evenstep.train.auto import Search
from evenstep.train.checkpoint import Saved, State
from evenstep.train.compiling import Compiled
from evenstep.train.data.dataset import checked_dataset
from evenstep.train.data.identity import DataIdentity
from evenstep.train.data.orders import choose_order, numbers
from evenstep.train.data.reading import Reader, shares
from evenstep.train.data.samples import Collate, MicroBatch, check_reading
from evenstep.train.data.stream import Stream
from evenstep.train.data.streaming import Streaming, refuse_with_stream
from evenstep.train.evaluate import evaluate, predict
from evenstep.train.identity import check_compiled
from evenstep.train.journal import Journal
from evenstep.train.layout import lay_out
from evenstep.train.models import Models, buffers
from evenstep.train.norm import clip_, local, refuse_torch_norms
from evenstep.train.optimizers import OptimizerWatch
from evenstep.train.options import Asked, Devices, Options, workers
from evenstep.train.precision import Precision
from evenstep.train.progress import plan_lines
from evenstep.train.randomness import Randomness
from evenstep.train.statistics import needs_several
from evenstep.train.step import Step
from evenstep.train.steps import Loop, Steps, Turns
from evenstep.train.stopping import Stopping, tell_launcher
from evenstep.train.trace import Trace
from evenstep.train.world import Ground, disconnect

M = TypeVar("M", bound=nn.Module)


class Run:
    """One training run of this process and those beside it. Made by `evenstep.start`.

    Attributes: `rank` and `world_size` as in torch.distributed; `device`, where the model lives; `directory`, where
    everything that the run leaves lies. Every value that a method returns is equal on all processes, unless it says
    otherwise.
    """

    def __init__(self, options: Options, ground: Ground, paths: RunPaths, put_back: Callable[[], None]) -> None:
        self.rank, self.world_size, self.device = ground.world.rank, ground.world.world_size, ground.device
        self.directory = paths.root
        self._options, self._ground, self._paths, self._put_back = options, ground, paths, put_back
        self._meeting = ground.meeting
        self._randomness = Randomness(options.seed)
        self._layout = lay_out(options, ground)
        self._precision = Precision(options.precision, ground.device, options.global_batch)
        self._models = Models(self._meeting, self._randomness, self._layout.place)
        self._compiled = Compiled(options, ground.device)
        self._checkpoints = Checkpoints(paths)
        self._saved = Saved(self._models, self._meeting, self._checkpoints)
        self._journal = Journal(paths, self.rank, RunPaths(Path(options.run)) if options.run else paths)
        self._activity = self._meeting.activity = self._journal.activity
        self._steps: Steps | None = None
        self._data: Any = None
        self._identity: DataIdentity | None = None  # of a map-style data set
        self._stream: Streaming | None = None
        self._cursor = 0
        self._done = 0  # optimizer steps since the start of the run
        self._epoch = 0
        self._open_step: tuple[Plan, Step] | None = None
        self._restored = self._looping = self._finished = self._stopped = self._closed = False
        self._checkpoint_at: int | None = None  # after which step the last checkpoint was tried or found
        self._failure: str | None = None  # why it could not be written; where one process writes alone, it alone knows
        self._fingerprint: tuple[int, str] | None = None  # the newest one, and after which step
        self._sharded = self._layout.grid.shards > 1
        in_stages = self._layout.grid.stages > 1
        self._optimizers = OptimizerWatch(self._models, self._saved, elementwise=self._sharded, by_parameter=in_stages)
        cut = self._sharded or in_stages
        self._allow_norms = refuse_torch_norms(self._has_gradients) if cut else lambda: None
        self._stopping = Stopping(self._ask_to_stop)
        atexit.register(self._at_exit)

    # ---- before the loop

    @overload
    def prepare(
        self,
        model: M,
        /,
        *,
        save: str = "all",
        stages: Sequence[str] | None = None,
        devices: Devices | None = None,
        example: Any = None,
        shard: Sequence[str] | None = None,
    ) -> M: ...
    @overload
    def prepare(
        self,
        model: nn.Module,
        second: nn.Module,
        /,
        *more: nn.Module,
        save: str = "all",
        stages: Sequence[str] | None = None,
        devices: Devices | None = None,
        example: Any = None,
        shard: Sequence[str] | None = None,
    ) -> tuple[Any, ...]: ...
    def prepare(
        self,
        model: nn.Module,
        /,
        *more: nn.Module,
        save: str = "all",
        stages: Sequence[str] | None = None,
        devices: Devices | None = None,
        example: Any = None,
        shard: Sequence[str] | None = None,
    ) -> Any:
        """Place a model (or several) for this layout. Returns the same module(s), not a wrapper.

        Call it after `start`, which seeds the generators, with the model initialised or its weights loaded, and before
        the optimizer is made. UsageError if parameters or buffers are not the same on every process.

        `save="trained"`, for adapters on a large model: checkpoints and model.safetensors hold only the buffers and
        the parameters that require a gradient now. The rest, the base, must be the same when the run is resumed, else
        CheckpointError; load the file into the base with load_state_dict(..., strict=False).

        `stages`: where there are pipeline stages, the name of the first unit of each but the first (by default they are
        of about equal cost). A unit is a child of the model, or an entry of a Sequential or ModuleList in it.

        `devices`: split the model over several devices of this process. A list of devices (`["cuda:0", "cuda:1"]`): the
        units lie on them in order, balanced by what they take in training; with `example`, what one micro-batch gives
        to the model (a tensor, a tuple of arguments, or a dict of named ones), their activations are measured too. Or
        a dict {name of a submodule: device}; the rest lies on the run's device, where batches and losses are. `--split`
        does it for all models with the devices there are. Several names of the CPU ("cpu:0", "cpu:1") are for tests.

        `shard`: with `--shard`, the names of the modules whose parameters are gathered only while they compute
        ("encoder.layers" stands for its entries; [] for none). By default they are large blocks: entries of a
        Sequential, or of a ModuleList that the forward loops over. A module that is not called for every micro-batch
        cannot be among them.
        """
        if devices is not None:
            self._compiled.refuse("devices=")
        for m in (model, *more):
            if isinstance(m, nn.Module):
                self._compiled.look(dict(m.named_modules()))
        asked = Asked(stages, devices, example, shard)
        prepared = [self._models.prepare(m, save, asked) for m in (model, *more)]
        self._journal.emit("prepare", models=self._models.kinds[-len(prepared) :])
        return prepared[0] if not more else tuple(prepared)

    def steps(
        self,
        data: Any,
        *,
        epochs: int | None = None,
        steps: int | None = None,
        shuffle: bool = True,
        order: Any = None,
        weights: Any = None,
        num_samples: int | None = None,
        replacement: bool = True,
        lengths: Any = None,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
        drop_last: bool = False,
    ) -> Steps:
        """The steps of the run over a map-style data set or an `evenstep.stream`, for `epochs` or for a number of
        `steps`. The epochs of a stream have no length: len() needs `steps`.

        `shuffle`: another keyed permutation in every epoch. `order`: instead, a sequence of indices, a function
        epoch -> such a sequence (each of one length), or a torch Sampler, read anew for every epoch. `weights`:
        instead, one number a sample, by which an epoch draws `num_samples` (len(data); without `replacement`: as many
        as have a weight above 0). `lengths`: one number a sample; samples of similar length then share a micro-batch,
        within windows of that order. `collate`: list of samples -> batch (torch's default_collate). `loaders`: loader
        processes of this process; their number changes no bit. `drop_last`: leave out the samples that do not fill a
        global batch.

        Loader processes live as long as the loop and do not see what it changes in the data set; for a curriculum give
        the data set a method `set_epoch(epoch)`, which is called before the first sample of an epoch is read.

        The generators of torch, numpy and random are keyed for every sample, collate call and micro-batch, so
        augmentation and dropout do not depend on the layout.
        """
        epochs, steps, loaders, num_samples = map(integer, (epochs, steps, loaders, num_samples))
        if self._steps is not None:
            raise UsageError("run.steps was called twice", do="one run has one loop: give it more epochs= or steps=")
        if isinstance(data, Stream):
            given = {"order": order, "weights": weights, "lengths": lengths, "num_samples": num_samples}
            refuse_with_stream(self._options, **given, drop_last=drop_last or None)
            check_reading(collate, loaders)
            lanes = Lanes(self._options.global_batch, self._micro_batch())
            return self._stream_steps(data, LaneSchedule(lanes, epochs, steps), shuffle, collate, loaders)
        checked_dataset(data)
        check_reading(collate, loaders)
        options = self._options
        chosen = choose_order(
            data,
            seed=options.seed,
            shuffle=shuffle,
            order=order,
            weights=weights,
            num_samples=num_samples,
            replacement=replacement,
        )
        size = 1 if isinstance(options.micro_batch, str) else options.micro_batch  # 1 until it is chosen
        schedule = Schedule(chosen.length, options.global_batch, size, epochs, steps, drop_last)
        if lengths is not None:
            if isinstance(options.micro_batch, str):
                raise UsageError(
                    'got lengths= with micro_batch="auto": which samples meet follows from the micro-batch',
                    do="give a number (--micro-batch N), with which the longest samples fit",
                )
            chosen = bucketed(chosen, numbers(lengths, "lengths="), len(data), schedule, options.seed)

        def read(mine: Iterable[MicroBatch], loaders: int) -> Reader:
            pin = self.device.type == "cuda"
            return Reader(
                data,
                chosen,
                mine,
                seed=options.seed,
                rank=self.rank,
                collate=collate,
                loaders=loaders,
                pin=pin,
                say=self._journal.waits,
            )

        def read_share(first: int) -> Reader:
            return read(self._share(first), self._loaders)

        @contextmanager
        def turns(first: int) -> Iterator[Turns]:
            with read_share(first) as reader:
                yield self._turns(reader, first)

        self._data, self._read = data, read
        self._loaders = loaders if options.loaders is None else options.loaders
        self._identity = DataIdentity(
            data,
            chosen,
            seed=options.seed,
            meeting=self._meeting,
            allow_other=options.allow_other_identity,
            loaders=self._loaders,
            say=self._journal.waits,
        )
        loop = Loop(self._begin_loop, turns, self._begin_step, self._after_step, self._finish)
        self._steps = Steps(schedule, loop)
        return self._steps

    def _turns(self, reader: Reader, first: int) -> Turns:
        batches = map(itemgetter(1), reader)  # unlike a generator's, its end is not that of the first error
        for number in range(first, len(self._schedule)):
            plan = self._schedule.step(number)
            reader.begin_epoch(plan.epoch)
            yield plan, batches

    def _stream_steps(
        self, data: Stream, schedule: LaneSchedule, shuffle: bool, collate: Collate | None, loaders: int
    ) -> Steps:
        streaming = Streaming(
            data,
            schedule,
            seed=self._options.seed,
            shuffle=shuffle,
            meeting=self._meeting,
            grid=self._layout.grid,
            collate=collate,
            loaders=loaders if self._options.loaders is None else self._options.loaders,
            pin=self.device.type == "cuda",
            say=self._journal.say,
        )
        self._data, self._stream = data, streaming
        loop = Loop(self._begin_loop, lambda _: streaming.turns(), self._begin_step, self._after_step, self._finish)
        self._steps = Steps(schedule, loop)
        return self._steps

    @property
    def _schedule(self) -> Schedule:
        """That of a map-style data set, as it is now."""
        assert self._steps is not None
        assert isinstance(self._steps.schedule, Schedule)
        return self._steps.schedule

    def _share(self, first: int) -> Iterator[MicroBatch]:
        """What this process reads, from step `first` on. Nothing is cut before the first of it is asked for."""
        yield from shares(self._schedule, self._layout.grid, self.rank, first)

    def restore(self, **things: Any) -> State:
        """Say what a checkpoint holds, and load the newest one if the run directory has any.

        Takes anything with state_dict and load_state_dict (models, optimizers, schedulers), and plain values, which
        come back as attributes of what is returned: `state = run.restore(model=model, best=0.0)`; later
        `state.best = accuracy`. Call it once, before the loop. UsageError for a prepared model, or a scheduler of an
        optimizer, that is left out; CheckpointError, naming the keys, for a checkpoint of another model.
        """
        if self._looping or self._restored:
            raise UsageError(
                "run.restore was called " + ("twice" if self._restored else "after the loop began"),
                do="call it once, before the loop",
            )
        self._saved.take(things)
        self._refuse_changes()
        if self.rank == 0:
            self._checkpoints.clean_up()
        with self._activity.during(LOADING):
            about, damaged = self._saved.load_newest()
        self._restored = True
        for line in damaged:
            self._journal.say(line + "; using the one before it")
        if about is not None:
            self._cursor, self._done, self._epoch = int(about["cursor"]), int(about["step"]), int(about["epoch"])
            self._precision.load(about)
            self._checkpoint_at = self._done
            self._fingerprint = self._done, str(about["fingerprint"])
            self._journal.emit("resume", step=self._done, cursor=self._cursor, damaged=damaged)
            self._journal.say(
                f"goes on after step {self._done} ({self._cursor} samples) from {self._checkpoints.folder(self._done)}"
            )
        return self._saved.values

    # ---- in the loop

    def clip(self, max_norm: float, *models: nn.Module, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients so that their norm is at most `max_norm`; returns the norm that they had.

        Of the given models' parameters, or all prepared ones'. The norm has the same bits on every layout
        (torch.nn.utils.clip_grad_norm_ otherwise).
        """
        named = self._models.parameters(self._models.chosen(models))
        gradients = self._optimizers.gradients
        if gradients is not None and self._looping:
            gradients.check()
        if self._sharded:
            self._meeting.exchange("run.clip")
        norm = clip_(dict(named), max_norm, self._layout.folds, error_if_nonfinite=error_if_nonfinite)
        if gradients is not None:
            gradients.record(contents=self._done == self._models.first_step)
        return norm

    def _has_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of the models are among these."""
        ours = {id(p.grad) for _, p in self._models.parameters() if p.grad is not None}
        return any(id(tensor) in ours for tensor in tensors)

    def log(self, **values: float | torch.Tensor) -> None:
        """Record numbers for the current step: metrics.jsonl, metrics.csv and TensorBoard in the run directory."""
        step = self._open_step[0].number + 1 if self._open_step else self._done
        self._journal.log(step, self._epoch, values)

    def on_log(self, listener: Callable[[int, Mapping[str, float]], None], *, replay: bool = False) -> None:
        """Call `listener(step, values)` on rank 0 for every `run.log`: for trackers of other makes.

        `replay`: first for what was logged before a resume, up to the step that it goes on from: what a tracker had
        not written when its process was killed. UsageError before `run.restore`, which finds that step.
        """
        if replay and not self._restored:
            raise UsageError(
                "run.on_log(replay=True) was called before run.restore",
                do="call it after run.restore, which finds the step that the run goes on from",
            )
        self._journal.listen(listener, self._done if replay else None)

    def evaluate(
        self,
        data: Any,
        fn: Callable[..., Any],
        *models: nn.Module,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
    ) -> Any:
        """The mean of `fn` over a data set or a stream (its epoch 0), each sample once on any layout.

        `fn(*models, batch)` returns (sum over samples, weight), or a dict {name: (sum, weight)}; the result is a
        number, or a dict of numbers. A loss function will do: with metrics the dict has its mean as "loss" beside them.
        Models are in eval mode, without gradients. They default to all prepared ones.
        """
        with self._activity.during(EVALUATING):
            return evaluate(
                data, fn, self._models.chosen(models), collate=collate, loaders=integer(loaders), **self._evaluation()
            )

    def predict(
        self,
        data: Any,
        fn: Callable[..., Any],
        *models: nn.Module,
        collate: Callable[[list[Any]], Any] | None = None,
        loaders: int = 0,
    ) -> Any:
        """The outputs of `fn` for a data set, in data order, each sample once, on every process.

        `fn(*models, batch)` returns tensors (dimension 0: the samples) or lists (one entry a sample: a dict of the
        boxes that were found, say, of any number), or a dict or tuple of them. Tensors come back on the CPU. So
        metrics of torchmetrics or scikit-learn do not depend on the layout.
        """
        with self._activity.during(EVALUATING):
            return predict(
                data, fn, self._models.chosen(models), collate=collate, loaders=integer(loaders), **self._evaluation()
            )

    def _evaluation(self) -> dict[str, Any]:
        return {
            "micro_batch": self._micro_batch(),
            "lanes": Lanes(self._options.global_batch, self._micro_batch()),
            "randomness": self._randomness,
            "meeting": self._meeting,
            "grid": Grid(self.world_size, self._layout.grid.stages),
            "lockstep": self._layout.lockstep,
            "device": self.device,
            "computing": self._precision.computing,
            "step": self._done + (self._open_step is not None),
        }

    def _micro_batch(self) -> int:
        if isinstance(self._options.micro_batch, str):
            raise UsageError(
                'an evaluation before the first step.backward, where micro_batch="auto" is chosen',
                do="evaluate after it, or give a number (--micro-batch N)",
            )
        return self._options.micro_batch

    # ---- collectives

    def gather(self, value: Any, to: int = 0) -> list[Any] | None:
        """Every process's `value`, by rank, on process `to`; None on the others. See `all_reduce` for what it takes."""
        return collectives.gather(self._meeting, value, integer(to))

    def all_gather(self, value: Any) -> list[Any]:
        """Every process's `value`, by rank, on every process."""
        return collectives.all_gather(self._meeting, value)

    def reduce(self, value: Any, op: str = "mean", to: int = 0) -> Any:
        """`value` of all processes put together by `op` (sum, mean, min, max) on process `to`; None on the others."""
        return collectives.reduce(self._meeting, value, op, integer(to))

    def all_reduce(self, value: Any, op: str = "sum") -> Any:
        """`value` of all processes put together by `op` (sum, mean, min, max), on every process.

        Takes a tensor, a number, or a nest of dicts, lists and tuples of them. All processes must call it, at the
        same line, with the same structure, shapes and dtypes; else every process gets a MismatchError that names
        ranks and lines. With one process it returns what it was given.
        """
        return collectives.all_reduce(self._meeting, value, op)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """Process `source`'s `value`, on every process."""
        return collectives.broadcast(self._meeting, value, integer(source))

    def barrier(self) -> None:
        """Wait until every process is here."""
        collectives.barrier(self._meeting)

    # ---- the loop's hooks

    def _refuse_changes(self) -> None:
        if self._layout.grid.shards > 1 or self._layout.grid.stages > 1:
            self._models.refuse_changes()

    def _begin_loop(self) -> int:
        assert self._steps is not None
        if not self._models.all:
            raise UsageError("no model was prepared", do="model = run.prepare(Net()) before the loop")
        if self._restored:
            self._saved.check()
        else:
            self._refuse_changes()
            if self._checkpoints.steps():
                raise UsageError(
                    f"{self.directory} holds a checkpoint, and the script does not call run.restore",
                    do="run.restore(model=model, optimizer=optimizer, ...) before the loop, or a new --run DIR",
                )
            if self._read_finished() is not None:
                raise UsageError(
                    f"{self.directory} is finished, and the script does not call run.restore to have its model back",
                    do=f"load {self._paths.model}, or train anew in another --run DIR",
                )
            if self._options.checkpoint_every is not None:
                raise UsageError(
                    "checkpoints were asked for, and the script does not call run.restore, which says what they hold",
                    do="run.restore(model=model, optimizer=optimizer, ...) before the loop",
                )
        how = self._compiled.look(self._models.modules())
        begun = self._checkpoint_at is not None
        check_compiled(self._ground, self._paths, how, self._options.allow_other_identity or not begun)
        if self._stream is not None:
            first, samples, per_epoch = self._first_step_of_stream(self._stream), None, None
            over, lines = self._stream.over, self._plan_of_stream(self._stream)
        else:
            schedule = self._schedule
            if self._layout.together is not None:
                self._layout.together.refuse_uneven(schedule)
            assert self._identity is not None
            self._identity.check(schedule)
            first = self._first_step(schedule, self._identity)
            samples, per_epoch = schedule.samples, schedule.steps_per_epoch
            over, lines = first >= len(schedule), self._plan(schedule)
        self._looping = True
        self._stopping.begin()
        self._models.first_step = first
        self._optimizers.begin(restored=self._restored)
        total = self._steps.schedule.total
        self._journal.begin(total, per_epoch, self._done, None if over else first, lines)
        self._journal.emit(
            "loop",
            steps=total,
            first=first,
            samples=samples,
            parameters=sum(p.numel() for _, p in self._models.parameters()),
        )
        return first

    def _first_step(self, schedule: Schedule, identity: DataIdentity) -> int:
        finished = self._read_finished()
        if finished is not None and (finished["left early"] or finished["steps"] >= len(schedule)):
            how = f"{finished['step']} steps"
            if finished["left early"]:
                how += f", left early by the script; to go on, remove {self._paths.finished}"
            self._journal.say(f"{self.directory} is finished ({how}): nothing is trained again")
            return len(schedule)
        if self._checkpoint_at is None:
            return 0
        first = identity.go_on(self._checkpoints.about(self._checkpoint_at), schedule, self._cursor)
        if first >= len(schedule):
            asked = f"{len(schedule)} were asked for"
            self._journal.say(f"{self.directory} is at step {self._done}, and {asked}: no step is left")
        return first

    def _first_step_of_stream(self, stream: Streaming) -> int:
        finished = self._read_finished()
        if finished is not None and (finished["left early"] or stream.schedule.done(**finished["stream"])):
            how = f"; to go on, remove {self._paths.finished}" if finished["left early"] else ""
            self._journal.say(f"{self.directory} is finished ({finished['step']} steps{how}): nothing is trained again")
            stream.go_to_end()
        elif self._checkpoint_at is None:
            stream.check()
        else:
            about = self._checkpoints.about(self._checkpoint_at)
            stream.check(about)
            stream.go_on(about, self._done, self._cursor)
        return self._done

    def _plan_of_stream(self, stream: Streaming) -> list[str]:
        """What is read, for the person who runs this, and who computes it."""
        total = stream.schedule.total
        whole = Schedule(self._options.global_batch, self._options.global_batch, self._micro_batch(), steps=total or 1)
        return [f"run directory {self.directory}", *stream.lines(), *self._plan(whole)[2:]]

    def _plan(self, schedule: Schedule) -> list[str]:
        """Who computes what, for the person who runs this."""
        if isinstance(self._options.micro_batch, str):
            return [f"run directory {self.directory}", "the micro-batch is chosen at the first step.backward, by trial"]
        backend = self._ground.backend if self.world_size > 1 else None
        device = self.device.type
        lines = plan_lines(
            schedule,
            self.world_size,
            stages=self._layout.grid.stages,
            device=device,
            backend=backend,
            exact=self._options.exact,
        )
        said = self._precision.plan_line([p for _, p in self._models.parameters()])
        lines += [said] if said else []
        lines += self._layout.plan
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        used = self._ground.world.local_world_size * self._options.thread_replicas * self._options.threads
        if device == "cpu" and used < cores:
            hint = f"more processes (evenstep run --processes {cores}) use them all"
            lines.append(f"{used} of {cores} cores are used: {hint}")
        if self._options.global_batch > schedule.samples_per_epoch:
            asked = self._options.global_batch
            lines.append(f"the global batch of {asked} is more than an epoch has: a step takes the whole epoch")
        if not self._restored:
            lines.append("nothing is saved and a killed run starts anew: the script does not call run.restore(...)")
        return [f"run directory {self.directory}", *lines]

    def _begin_step(self, plan: Plan, batches: Iterator[Any]) -> Step:
        self._epoch = plan.epoch
        self._activity.begin_step(plan.number + 1)
        if self._identity is not None:
            self._identity.agree_on_order(plan.epoch)
        self._randomness.begin_step(plan.number)
        open_yet = isinstance(self._options.micro_batch, str)
        step = Step(
            plan,
            batches,
            self._models,
            self._layout,
            self._randomness,
            self._meeting,
            self.device,
            self._precision,
            self._activity,
            partial(self._choose_micro_batch, plan) if open_yet and isinstance(plan, StepPlan) else None,
        )
        self._open_step = plan, step
        if plan.number == self._options.trace_step:
            step.trace = Trace(self._paths, self.rank, self._models, self._data, self._saved.hashes)
            step.trace.begin(plan.number, self._options.exact)
        before, self._optimizers.step = self._optimizers.step, step
        step.gradients = self._optimizers.gradients
        if before is not None and before.stepped and before.number == self._models.first_step:
            step.look_before = self._tell_of_old_gradients
        return step

    def _tell_of_old_gradients(self, models: Sequence[nn.Module]) -> None:
        """What most often is a forgotten zero_grad; it can be meant, so it is not refused."""
        for name, p in self._models.parameters(models):
            if p.grad is not None and p.grad.layout == torch.strided and local(p.grad).any():
                self._journal.say(
                    "the second step adds to the gradients of the first, which an optimizer has used already "
                    f"({name}): if that is not meant, call optimizer.zero_grad() after optimizer.step()"
                )
                return

    def _choose_micro_batch(
        self, plan: StepPlan, compute: Callable[[Any], None], models: Sequence[nn.Module], site: str
    ) -> StepPlan:
        """Tries what fits, by `compute(batch)`, and cuts this step and all later ones accordingly."""
        assert self._steps is not None
        options, schedule = self._options, self._schedule

        def trial(size: int) -> None:
            first = MicroBatch(plan.number, plan.epoch, 0, plan.start, plan.start + size)
            # Not here where loader processes read: what the data set opens would be open before they begin.
            with self._read([first], min(self._loaders, 1)) as reader:
                _, batch = next(reader)
            compute(batch)

        parameters = [p for _, p in self._models.parameters(models)]
        held = list(buffers(self._models.named(models)).values())
        search = Search(trial, parameters, held, lambda size: -(-plan.samples // size), options, self.device)
        sizes = micro_batch_sizes(
            plan.samples,
            workers(options, self.world_size),
            several=any(map(needs_several, self._models.modules(models).values())),
            last=schedule.samples_per_epoch % options.global_batch,
        )
        choice = search.choose(sizes, self._meeting, site)
        self._options = replace(options, micro_batch=choice.size)
        self._steps.schedule = replace(schedule, micro_batch=choice.size)
        if self.rank == 0:
            write_identity(
                self._paths.identity, {**(read_identity(self._paths.identity) or {}), "micro_batch": choice.size}
            )
        need = choice.need
        self._journal.emit("micro-batch", size=need.size, trial=need.trial, room=need.room, limit=need.limit)
        for line in [choice.line(), *self._plan(self._schedule)[1:]]:
            self._journal.say(line)
        return self._schedule.step(plan.number)

    def _after_step(self, plan: Plan, step: Step) -> None:
        """The loop's body is done: the optimizer has stepped."""
        self._open_step = None
        if self._stream is not None and isinstance(plan, LaneStep):
            self._stream.done(plan)
        self._done, self._cursor = plan.number + 1, plan.cursor_after
        loss = step.result.loss if step.result else None
        said = {"fingerprint": self._fingerprint_now()} if self._options.fingerprints else {}
        if step.trace is not None:
            step.trace.end()
        self._journal.step_done(self._done, plan.epoch, loss, plan.samples, cursor=self._cursor, **said)
        if plan.number == self._models.first_step and not step.stepped:
            missing = "step.backward" if step.result is None else "an optimizer's step"
            self._journal.say(f"step {plan.number} ended without {missing}: it has trained nothing")
        every = self._options.checkpoint_every
        if self._restored and (self._done % every == 0 if every else plan.ends_epoch):
            self._checkpoint()
        if self._meeting.stop:
            self._stop_for(self._meeting.stop)
        if self._options.stop_after is not None and self._done >= self._options.stop_after:
            self._stop()

    # ---- checkpoints and the end

    def _stop(self) -> None:
        """As asked (EVENSTEP_STOP_AFTER), the script ends here, well. The run is not finished: it can go on."""
        self._stopped = True
        self._journal.emit("stopped", step=self._done)
        raise SystemExit(0)

    def _stop_for(self, number: int) -> None:
        """A signal asked for it, on whichever process: all have come to the end of this step."""
        if self._restored and self._checkpoint_at != self._done:
            self._checkpoint()
        tell_launcher(STOPPING)
        self._meeting.exchange("stopping", site="")  # the checkpoint is whole before any process ends
        self._stopped = True
        name = signal.Signals(number).name
        self._journal.end_progress()
        self._journal.emit("stopped", step=self._done, signal=name)
        saved = f"checkpoint {self._checkpoint_at} is written" if self._restored else "nothing was saved"
        if self._failure is not None:
            saved = "its checkpoint could not be written"
        self._journal.say(f"stopped by {name} at the end of step {self._done}; {saved}")
        raise Stopped(128 + number)

    def _ask_to_stop(self, number: int) -> None:
        self._meeting.asked_to_stop = number
        self._journal.say(
            f"{signal.Signals(number).name}: finishing this step"
            + (", then a checkpoint" if self._restored else "")
            + "; once more: at once"
        )

    def _checkpoint(self) -> None:
        fingerprint = self._fingerprint_now()
        about = {
            "step": self._done,
            "cursor": self._cursor,
            "epoch": self._epoch,
            "fingerprint": fingerprint,
            **(self._identity.at(self._epoch) if self._identity is not None else {}),
            **(self._stream.place if self._stream is not None else {}),
            **self._precision.state(),
        }
        began = time.monotonic()
        with self._activity.during(SAVING):
            self._failure = self._saved.save(self._done, about, self._options.keep)
        seconds = round(time.monotonic() - began, 4)
        older = "the checkpoint before it is untouched" if self._checkpoint_at is not None else "there is no older one"
        self._checkpoint_at = self._done
        if self._failure is None:
            self._journal.emit("checkpoint", step=self._done, fingerprint=fingerprint, seconds=seconds)
        else:
            self._journal.emit("checkpoint failed", step=self._done, reason=self._failure)
            self._journal.say(
                f"checkpoint {self._done} could not be written ({self._failure}); {older}, and training goes on"
            )

    def _fingerprint_now(self) -> str:
        """Of the state after the steps done; all processes must call it."""
        if self._fingerprint is None or self._fingerprint[0] != self._done:
            self._fingerprint = self._done, self._saved.fingerprint(f"the end of step {self._done - 1}")
        return self._fingerprint[1]

    def _finish(self) -> None:
        """The loop is over, or was left: the last checkpoint, the model, the fingerprint."""
        if self._finished or not self._looping:
            return
        if self._open_step is not None:  # left by break: a step whose gradients an optimizer used counts as done
            plan, step = self._open_step
            if step.stepped:
                self._after_step(plan, step)
            self._open_step = None
        self._optimizers.end()
        self._stopping.end()
        self._finished = True
        self._activity.now(ENDING)
        assert self._steps is not None
        self._journal.end_progress()
        before = self._read_finished()
        if before is not None and before["step"] == self._done and self._checkpoint_at == self._done:
            return  # it was finished before this start, and nothing was trained
        if self._restored and self._checkpoint_at != self._done:
            self._checkpoint()
        total = self._steps.schedule.total
        said: dict[str, object] = {
            "step": self._done,
            "steps": total,
            "left early": self._stream.left_early if self._stream is not None else self._done < len(self._steps),
            "cursor": self._cursor,
            "fingerprint": self._fingerprint_now(),
            **({} if self._stream is None else {"stream": {"steps": self._done, "epochs": self._stream.epochs}}),
        }
        if self._failure is not None:
            raise MachineError(
                f"the last checkpoint could not be written: {self._failure}",
                do="make room on the disk and start again: the run goes on from the checkpoint before",
            )
        left_out = self._saved.save_model(self._paths.model)
        if self.rank == 0:
            if left_out:
                self._journal.say(
                    f"{self._paths.model.name} cannot hold {', '.join(left_out)}; the checkpoint has them"
                )
            write_whole(self._paths.finished, (json.dumps(said) + "\n").encode())
        self._journal.emit("finished", **said)

    def _finish_if_over(self) -> None:
        """A loop that was left by break is over. One that was left by an exception can go on another time."""
        if self._finished or self._stopped or not self._looping:
            return
        assert self._steps is not None
        if self._steps.left_by_break:
            self._finish()
        else:
            self._journal.end_progress()
            self._journal.emit("interrupted", step=self._done)
            self._journal.say(
                f"the loop was left by an exception in step {self._done}: the run is not finished. It goes on in its "
                f"directory: evenstep run --run {self.directory}, or start(run=...)"
            )

    def _read_finished(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._paths.finished.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """End the run: finish what is open and leave the process group. Called by itself when the script ends.

        A finished run prints its fingerprint as the last line on standard output (rank 0).
        """
        self._close(failed=False)

    def _at_exit(self) -> None:
        """The script has ended. An error here must still show in the exit code, which atexit cannot change."""
        try:
            self._close(failed=getattr(sys, "last_value", None) is not None)
        except EvenstepError as error:
            sys.stdout.flush()
            said = f"evenstep: {type(error).__name__}: {error}"
            print(said, file=sys.stderr, flush=True)
            secondary = isinstance(error, PeerFailed)
            uncaught = Uncaught(
                self.rank, type_name(error), str(error), said + "\n", secondary, error.exit_code, True, time.time()
            )
            write_uncaught(error_path(self._paths.log(self.rank)), uncaught)
            os._exit(error.exit_code)

    def _close(self, failed: bool) -> None:
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._at_exit)
        try:
            if failed:
                self._journal.emit("failed", step=self._done, at=self._meeting.last)
            else:
                self._finish_if_over()
                self._meeting.exchange("the end of the script", site="")
                self._journal.emit("end")
                if self._finished and self._fingerprint is not None and self.rank == 0:
                    print(f"fingerprint: {self._fingerprint[1]}", flush=True)
        finally:
            self._allow_norms()
            self._layout.close()
            self._stopping.end()
            self._layout.reducer.close(wait=not failed)
            self._compiled.close()
            self._layout.statistics.close()
            self._optimizers.end()
            self._meeting.closed = True
            self._journal.close()
            if not failed:
                disconnect(self._ground)
            self._put_back()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(failed=error is not None and not self._stopped)
