"""How far the training of a run is, what it leaves in the run directory, and how it ends."""

from __future__ import annotations

import json
import signal
import time
from typing import Any

from evenstep.environment import STOPPING
from evenstep.errors import MachineError, Stopped, UsageError
from evenstep.plan.lanes import Plan
from evenstep.record.activity import ENDING, LOADING, SAVING
from evenstep.record.paths import RunPaths
from evenstep.record.publish import write_whole
from evenstep.train.checkpoint import Saved
from evenstep.train.data.training_data import TrainingData
from evenstep.train.journal import Journal
from evenstep.train.options import Options
from evenstep.train.precision import Precision
from evenstep.train.step import Step
from evenstep.train.stopping import tell_launcher


class Training:
    """What a run has done. All processes call the same methods at the same places.

    First `load` where the script restores, else `refuse_old`; then `go_on`, and for each step `after`; at last `finish`
    or `interrupted`.
    """

    data: TrainingData  # once the loop has begun

    def __init__(self, options: Options, paths: RunPaths, saved: Saved, precision: Precision, journal: Journal) -> None:
        self._options, self._paths, self._saved = options, paths, saved
        self._precision, self._journal, self._meeting = precision, journal, saved.meeting
        self.done = 0  # optimizer steps since the start of the run
        self.cursor = 0  # samples that they have taken
        self.epoch = 0
        self.open: tuple[Plan, Step] | None = None  # the step whose turn it is
        self.restored = self.looping = self.finished = self.stopped = False
        self.checkpoint_at: int | None = None  # after which step the last checkpoint was tried or found
        self.fingerprint: tuple[int, str] | None = None  # the newest one, and after which step
        self._failure: str | None = None  # why there is no checkpoint; where one process writes alone, it alone knows

    @property
    def step(self) -> int:
        """The step whose turn it is, from 1; between two of them the one that is done."""
        return self.done if self.open is None else self.open[0].number + 1

    # ---- before the loop

    def load(self) -> None:
        """Loads the newest checkpoint, if there is any: the run goes on from it."""
        if self._meeting.rank == 0:
            self._saved.checkpoints.clean_up()
        with self._journal.activity.during(LOADING):
            about, damaged = self._saved.load_newest()
        self.restored = True
        for line in damaged:
            self._journal.say(line + "; using the one before it")
        if about is None:
            return
        self.cursor, self.done, self.epoch = int(about["cursor"]), int(about["step"]), int(about["epoch"])
        self._precision.load(about)
        self.checkpoint_at = self.done
        self.fingerprint = self.done, str(about["fingerprint"])
        self._journal.emit("resume", step=self.done, cursor=self.cursor, damaged=damaged)
        folder = self._saved.checkpoints.folder(self.done)
        self._journal.say(f"goes on after step {self.done} ({self.cursor} samples) from {folder}")

    def refuse_old(self) -> None:
        """UsageError for a script that does not restore, where there is something to restore or to be saved."""
        root = self._paths.root
        if self._saved.checkpoints.steps():
            raise UsageError(
                f"{root} holds a checkpoint, and the script does not call run.restore",
                do="run.restore(model=model, optimizer=optimizer, ...) before the loop, or a new --run DIR",
            )
        if self._read_finished() is not None:
            raise UsageError(
                f"{root} is finished, and the script does not call run.restore to have its model back",
                do=f"load {self._paths.model}, or train anew in another --run DIR",
            )
        if self._options.checkpoint_every is not None:
            raise UsageError(
                "checkpoints were asked for, and the script does not call run.restore, which says what they hold",
                do="run.restore(model=model, optimizer=optimizer, ...) before the loop",
            )

    def go_on(self, data: TrainingData) -> int:
        """The step with which the loop over `data` begins."""
        root, before = self._paths.root, self._read_finished()
        if before is not None and self.checkpoint_at is None:
            raise UsageError(
                f"{root} is finished and holds no checkpoint, from which run.restore could have its model back",
                do=f"load {self._paths.model}, or train anew in another --run DIR",
            )
        # Else its last checkpoint is damaged, and what comes after the one before is done again.
        if before is not None and before["step"] <= self.done and (before["left early"] or data.has_done(before)):
            how = f"{before['step']} steps"
            if before["left early"]:
                how += f", left early by the script; to go on, remove {self._paths.finished}"
            first = data.go_to_end(self.done)
            self._journal.say(f"{root} is finished ({how}): nothing is trained again")
            return first
        begun = self.checkpoint_at is not None
        first = data.begin(self._saved.checkpoints.about(self.done) if begun else None)
        if begun and data.over and data.schedule.total is not None:
            asked = f"{data.schedule.total} were asked for"
            self._journal.say(f"{root} is at step {self.done}, and {asked}: no step is left")
        return first

    # ---- in the loop

    def after(self, plan: Plan, step: Step) -> None:
        """The loop's body is done: the optimizer has stepped."""
        self.open = None
        self.data.done()
        self.done, self.cursor = plan.number + 1, plan.cursor_after
        loss = step.result.loss if step.result else None
        said = {"fingerprint": self._fingerprint_now()} if self._options.fingerprints else {}
        if step.trace is not None:
            step.trace.end()
        self._journal.step_done(self.done, plan.epoch, loss, plan.samples, cursor=self.cursor, **said)
        if plan.number == self._saved.models.first_step and not step.stepped:
            missing = "step.backward" if step.result is None else "an optimizer's step"
            self._journal.say(f"step {plan.number} ended without {missing}: it has trained nothing")
        every = self._options.checkpoint_every
        if self.restored and (self.done % every == 0 if every else plan.ends_epoch):
            self._checkpoint()
        if self._meeting.stop:
            self._stop_for(self._meeting.stop)
        if self._options.stop_after is not None and self.done >= self._options.stop_after:
            self._stop()

    def _fingerprint_now(self) -> str:
        """Of the state after the steps done; all processes must call it."""
        if self.fingerprint is None or self.fingerprint[0] != self.done:
            self.fingerprint = self.done, self._saved.fingerprint(f"the end of step {self.done - 1}")
        return self.fingerprint[1]

    def _checkpoint(self) -> None:
        fingerprint = self._fingerprint_now()
        about = {
            "step": self.done,
            "cursor": self.cursor,
            "epoch": self.epoch,
            "fingerprint": fingerprint,
            **self.data.place,
            **self._precision.state(),
        }
        began = time.monotonic()
        with self._journal.activity.during(SAVING):
            self._failure = self._saved.save(self.done, about, self._options.keep)
        seconds = round(time.monotonic() - began, 4)
        older = "the checkpoint before it is untouched" if self.checkpoint_at is not None else "there is no older one"
        self.checkpoint_at = self.done
        if self._failure is None:
            self._journal.emit("checkpoint", step=self.done, fingerprint=fingerprint, seconds=seconds)
        else:
            self._journal.emit("checkpoint failed", step=self.done, reason=self._failure)
            self._journal.say(
                f"checkpoint {self.done} could not be written ({self._failure}); {older}, and training goes on"
            )

    # ---- the end

    def ask_to_stop(self, number: int) -> None:
        """A signal has come to this process: the training is to stop after this step."""
        self._meeting.asked_to_stop = number
        self._journal.say(
            f"{signal.Signals(number).name}: finishing this step"
            + (", then a checkpoint" if self.restored else "")
            + "; once more: at once"
        )

    def _stop_for(self, number: int) -> None:
        """A signal asked for it, on whichever process: all have come to the end of this step."""
        if self.restored and self.checkpoint_at != self.done:
            self._checkpoint()
        tell_launcher(STOPPING)
        self._meeting.exchange("stopping", site="")  # the checkpoint is whole before any process ends
        self.stopped = True
        name = signal.Signals(number).name
        self._journal.end_progress()
        self._journal.emit("stopped", step=self.done, signal=name)
        saved = f"checkpoint {self.checkpoint_at} is written" if self.restored else "nothing was saved"
        if self._failure is not None:
            saved = "its checkpoint could not be written"
        self._journal.say(f"stopped by {name} at the end of step {self.done}; {saved}")
        raise Stopped(128 + number)

    def _stop(self) -> None:
        """As asked (EVENSTEP_STOP_AFTER), the script ends here, well. The run is not finished: it can go on."""
        self.stopped = True
        self._journal.emit("stopped", step=self.done)
        raise SystemExit(0)

    def end_open_step(self) -> None:
        """The loop was left by break: a step whose gradients an optimizer used counts as done."""
        if self.open is not None:
            plan, step = self.open
            if step.stepped:
                self.after(plan, step)
            self.open = None

    def finish(self) -> None:
        """The last checkpoint, the model, the fingerprint."""
        self.finished = True
        self._journal.activity.now(ENDING)
        self._journal.end_progress()
        before = self._read_finished()
        if before is not None and before["step"] == self.done and self.checkpoint_at == self.done:
            return  # it was finished before this start, and nothing was trained
        if self.restored and self.checkpoint_at != self.done:
            self._checkpoint()
        said: dict[str, object] = {
            "step": self.done,
            "steps": self.data.schedule.total,
            "left early": self.data.left_early,
            "cursor": self.cursor,
            "fingerprint": self._fingerprint_now(),
            **self.data.ended,
        }
        if self._failure is not None:
            raise MachineError(
                f"the last checkpoint could not be written: {self._failure}",
                do="make room on the disk and start again: the run goes on from the checkpoint before",
            )
        left_out = self._saved.save_model(self._paths.model)
        if self._meeting.rank == 0:
            if left_out:
                self._journal.say(
                    f"{self._paths.model.name} cannot hold {', '.join(left_out)}; the checkpoint has them"
                )
            write_whole(self._paths.finished, (json.dumps(said) + "\n").encode())
        self._journal.emit("finished", **said)

    def interrupted(self) -> None:
        """The loop was left by an exception: the run can go on another time."""
        self._journal.end_progress()
        self._journal.emit("interrupted", step=self.done)
        self._journal.say(
            f"the loop was left by an exception in step {self.done}: the run is not finished. It goes on in its "
            f"directory: evenstep run --run {self._paths.root}, or start(run=...)"
        )

    def _read_finished(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._paths.finished.read_text())
        except (FileNotFoundError, ValueError):
            return None
        return found if isinstance(found, dict) else None
