"""A run: what `evenstep.start()` returns, and all that a training script asks of it."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import torch
from torch import nn

from evenstep.errors import EvenstepError, PeerFailed, UsageError
from evenstep.plan.bucketed import bucketed
from evenstep.plan.grid import Grid
from evenstep.plan.integers import integer
from evenstep.plan.lanes import Lanes, LaneSchedule, Plan
from evenstep.plan.schedule import Schedule, StepPlan
from evenstep.record.activity import EVALUATING
from evenstep.record.checkpoints import Checkpoints
from evenstep.record.paths import RunPaths
from evenstep.record.uncaught import Uncaught, error_path, type_name, write_uncaught
from evenstep.train import collectives
from evenstep.train.auto import choose_micro_batch
from evenstep.train.calls import Calls
from evenstep.train.checkpoint import Saved, State
from evenstep.train.compiling import Compiled
from evenstep.train.data.dataset import checked_dataset
from evenstep.train.data.map_style import MapStyle
from evenstep.train.data.orders import choose_order, numbers
from evenstep.train.data.samples import Collate, check_reading
from evenstep.train.data.stream import Stream
from evenstep.train.data.streaming import Streaming, refuse_with_stream
from evenstep.train.data.training_data import TrainingData
from evenstep.train.evaluate import evaluate, predict
from evenstep.train.identity import check_compiled, record_micro_batch
from evenstep.train.journal import Journal
from evenstep.train.layout import lay_out
from evenstep.train.models import Models
from evenstep.train.norm import clip_, local, refuse_torch_norms
from evenstep.train.optimizers import OptimizerWatch
from evenstep.train.options import Asked, Devices, Options
from evenstep.train.plan_lines import idle_cores, shares_line
from evenstep.train.precision import Precision
from evenstep.train.randomness import Randomness
from evenstep.train.step import Choose, Step
from evenstep.train.steps import Loop, Steps
from evenstep.train.stopping import Stopping
from evenstep.train.trace import Trace
from evenstep.train.training import Training
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
        self._saved = Saved(self._models, self._meeting, Checkpoints(paths))
        self._journal = Journal(paths, self.rank, RunPaths(Path(options.run)) if options.run else paths)
        self._activity = self._meeting.activity = self._journal.activity
        self._training = Training(options, paths, self._saved, self._precision, self._journal)
        self._steps: Steps | None = None
        self._choose: Choose | None = None  # until the micro-batch is chosen
        self._closed = False
        self._sharded = self._layout.grid.shards > 1
        in_stages = self._layout.grid.stages > 1
        self._optimizers = OptimizerWatch(self._models, self._saved, elementwise=self._sharded, by_parameter=in_stages)
        cut = self._sharded or in_stages
        self._allow_norms = refuse_torch_norms(self._has_gradients) if cut else lambda: None
        self._stopping = Stopping(self._training.ask_to_stop)
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
        options = self._options
        reading: dict[str, Any] = {
            "seed": options.seed,
            "meeting": self._meeting,
            "grid": self._layout.grid,
            "collate": collate,
            "loaders": loaders if options.loaders is None else options.loaders,
            "pin": self.device.type == "cuda",
        }
        if isinstance(data, Stream):
            given = {"order": order, "weights": weights, "lengths": lengths, "num_samples": num_samples}
            refuse_with_stream(options, **given, drop_last=drop_last or None)
            check_reading(collate, loaders)
            lanes = LaneSchedule(Lanes(options.global_batch, self._micro_batch()), epochs, steps)
            return self._steps_over(Streaming(data, lanes, shuffle=shuffle, say=self._journal.say, **reading))
        checked_dataset(data)
        check_reading(collate, loaders)
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
        allow = options.allow_other_identity
        read = MapStyle(data, chosen, schedule, say=self._journal.waits, allow_other=allow, **reading)
        self._choose = partial(self._choose_micro_batch, read) if isinstance(options.micro_batch, str) else None
        return self._steps_over(read)

    def _steps_over(self, data: TrainingData) -> Steps:
        begin = partial(self._begin_loop, data)
        self._steps = Steps(data, Loop(begin, self._begin_step, self._training.after, self._finish))
        return self._steps

    def restore(self, **things: Any) -> State:
        """Say what a checkpoint holds, and load the newest one if the run directory has any.

        Takes anything with state_dict and load_state_dict (models, optimizers, schedulers), and plain values, which
        come back as attributes of what is returned: `state = run.restore(model=model, best=0.0)`; later
        `state.best = accuracy`. Call it once, before the loop. UsageError for a prepared model, or a scheduler of an
        optimizer, that is left out; CheckpointError, naming the keys, for a checkpoint of another model.
        """
        if self._training.looping or self._training.restored:
            raise UsageError(
                "run.restore was called " + ("twice" if self._training.restored else "after the loop began"),
                do="call it once, before the loop",
            )
        self._saved.take(things)
        self._refuse_changes()
        self._training.load()
        return self._saved.values

    # ---- in the loop

    def clip(self, max_norm: float, *models: nn.Module, error_if_nonfinite: bool = False) -> float:
        """Scale the gradients so that their norm is at most `max_norm`; returns the norm that they had.

        Of the given models' parameters, or all prepared ones'. The norm has the same bits on every layout
        (torch.nn.utils.clip_grad_norm_ otherwise).
        """
        named = self._models.parameters(self._models.chosen(models))
        gradients = self._optimizers.gradients
        if gradients is not None and self._training.looping:
            gradients.check()
        if self._sharded:
            self._meeting.exchange("run.clip")
        norm = clip_(dict(named), max_norm, self._layout.folds, error_if_nonfinite=error_if_nonfinite)
        if gradients is not None:
            gradients.record(contents=self._training.done == self._models.first_step)
        return norm

    def _has_gradients(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether gradients of the models are among these."""
        ours = {id(p.grad) for _, p in self._models.parameters() if p.grad is not None}
        return any(id(tensor) in ours for tensor in tensors)

    def log(self, **values: float | torch.Tensor) -> None:
        """Record numbers for the current step: metrics.jsonl, metrics.csv and TensorBoard in the run directory."""
        self._journal.log(self._training.step, self._training.epoch, values)

    def on_log(self, listener: Callable[[int, Mapping[str, float]], None], *, replay: bool = False) -> None:
        """Call `listener(step, values)` on rank 0 for every `run.log`: for trackers of other makes.

        `replay`: first for what was logged before a resume, up to the step that it goes on from: what a tracker had
        not written when its process was killed. UsageError before `run.restore`, which finds that step.
        """
        if replay and not self._training.restored:
            raise UsageError(
                "run.on_log(replay=True) was called before run.restore",
                do="call it after run.restore, which finds the step that the run goes on from",
            )
        self._journal.listen(listener, self._training.done if replay else None)

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
            return evaluate(self._calls(data, fn, models, collate, loaders))

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
            return predict(self._calls(data, fn, models, collate, loaders))

    def _calls(
        self, data: Any, fn: Callable[..., Any], models: Sequence[nn.Module], collate: Collate | None, loaders: int
    ) -> Calls:
        return Calls(
            data,
            fn,
            self._models.chosen(models),
            self._micro_batch(),
            self._randomness,
            self._meeting,
            grid=Grid(self.world_size, self._layout.grid.stages),
            lockstep=self._layout.lockstep,
            device=self.device,
            step=self._training.step,
            collate=collate,
            loaders=integer(loaders),
            computing=self._precision.computing,
            lanes=Lanes(self._options.global_batch, self._micro_batch()),
        )

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

    def _begin_loop(self, data: TrainingData) -> None:
        training, schedule = self._training, data.schedule
        if not self._models.all:
            raise UsageError("no model was prepared", do="model = run.prepare(Net()) before the loop")
        if training.restored:
            self._saved.check()
        else:
            self._refuse_changes()
            training.refuse_old()
        how = self._compiled.look(self._models.modules())
        begun = training.checkpoint_at is not None
        check_compiled(self._ground, self._paths, how, self._options.allow_other_identity or not begun)
        if self._layout.together is not None:
            assert isinstance(schedule, Schedule)  # with a stream it is refused
            self._layout.together.refuse_uneven(schedule)
        first = training.go_on(data)
        plan = [f"run directory {self.directory}", *self._plan(data)]
        training.data, training.looping = data, True
        self._stopping.begin()
        self._models.first_step = first
        self._optimizers.begin(restored=training.restored)
        self._journal.begin(schedule.total, schedule.steps_per_epoch, training.done, None if data.over else first, plan)
        parameters = sum(p.numel() for _, p in self._models.parameters())
        self._journal.emit("loop", steps=schedule.total, first=first, samples=schedule.samples, parameters=parameters)

    def _plan(self, data: TrainingData) -> list[str]:
        """What is read and who computes it, for the person who runs this."""
        options, world = self._options, self._ground.world
        if isinstance(options.micro_batch, str):
            return ["the micro-batch is chosen at the first step.backward, by trial"]
        shares = shares_line(
            data.micro_batches,
            self.world_size,
            stages=self._layout.grid.stages,
            device=self.device.type,
            backend=self._ground.backend if self.world_size > 1 else None,
            exact=options.exact,
        )
        precision = self._precision.plan_line([p for _, p in self._models.parameters()])
        lines = [*data.lines(), shares, *([precision] if precision else []), *self._layout.plan]
        if self.device.type == "cpu":
            lines += idle_cores(world.local_world_size * options.thread_replicas * options.threads)
        samples, asked = data.schedule.samples_per_epoch, options.global_batch
        if samples is not None and asked > samples:
            lines.append(f"the global batch of {asked} is more than an epoch has: a step takes the whole epoch")
        if not self._training.restored:
            lines.append("nothing is saved and a killed run starts anew: the script does not call run.restore(...)")
        return lines

    def _begin_step(self, plan: Plan, batches: Iterator[Any]) -> Step:
        self._training.epoch = plan.epoch
        self._activity.begin_step(plan.number + 1)
        self._randomness.begin_step(plan.number)
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
            self._choose,
        )
        self._training.open = plan, step
        if plan.number == self._options.trace_step:
            step.trace = Trace(self._paths, self.rank, self._models, self._training.data.data, self._saved.hashes)
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
        self, data: MapStyle, number: int, compute: Callable[[Any], None], models: Sequence[nn.Module], site: str
    ) -> StepPlan:
        """Tries what fits, by `compute(batch)`, and cuts this step and all later ones accordingly."""
        plan = data.schedule.step(number)
        choice = choose_micro_batch(
            plan,
            data.schedule.samples_per_epoch,
            lambda size: compute(data.read_first(plan, size)),
            self._models,
            models,
            self._options,
            self.device,
            self._meeting,
            site,
        )
        self._choose = None
        self._options = replace(self._options, micro_batch=choice.size)
        data.schedule = replace(data.schedule, micro_batch=choice.size)
        if self.rank == 0:
            record_micro_batch(self._paths, choice.size)
        need = choice.need
        self._journal.emit("micro-batch", size=need.size, trial=need.trial, room=need.room, limit=need.limit)
        for line in [choice.line(), *self._plan(data)]:
            self._journal.say(line)
        return data.schedule.step(number)

    def _finish(self) -> None:
        """The loop is over, or was left."""
        if self._training.finished or not self._training.looping:
            return
        self._training.end_open_step()
        self._optimizers.end()
        self._stopping.end()
        self._training.finish()

    # ---- the end

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
                self._journal.emit("failed", step=self._training.done, at=self._meeting.last)
            else:
                self._finish_if_over()
                self._meeting.exchange("the end of the script", site="")
                self._journal.emit("end")
                if self._training.finished and self._training.fingerprint is not None and self.rank == 0:
                    print(f"fingerprint: {self._training.fingerprint[1]}", flush=True)
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

    def _finish_if_over(self) -> None:
        """A loop that was left by break is over. One that was left by an exception can go on another time."""
        if self._training.finished or self._training.stopped or not self._training.looping:
            return
        assert self._steps is not None
        if self._steps.left_by_break:
            self._finish()
        else:
            self._training.interrupted()

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close(failed=error is not None and not self._training.stopped)
