"""From what was seen to the likely reason: each finding has a short name, its evidence and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from evenstep.prove.parting import Parting
from evenstep.prove.suspects import Suspect, names_in, suspects

_SHOWN = 5
_GENERATORS = ("Generator at", "RandomState at", "Random at")  # as train/snapshot.py writes them

# Name -> what is wrong, and what to do.
REASONS: dict[str, tuple[str, str]] = {
    "randomness": (
        "random numbers that evenstep does not key",
        "draw from the global generators of torch, numpy and random, which are keyed for every sample and micro-batch",
    ),
    "time": (
        "something depends on the time",
        "let nothing that is trained on or with depend on a clock; count steps instead",
    ),
    "hash-order": (
        "something depends on the order of hashes (a set of texts, hash()), which Python changes at every start",
        "sort what comes out of a set; use hashlib in place of hash()",
    ),
    "nondeterministic-kernel": (
        "an operation gives other bits for equal input",
        "use operations with a deterministic form, and start(exact=True), which refuses the others by name",
    ),
    "unsaved-state": (
        "a state that run.restore does not know: a resumed run begins with it anew",
        "give it to run.restore (plain values: state = run.restore(..., name=value)), or compute it from step.number",
    ),
    "data-rank": (
        "the data set gives other samples on another process or layout",
        "give every process the whole data set; a sample may depend on its index and the keyed generators alone",
    ),
    "data-loaders": (
        "the data set gives other samples in loader processes",
        "let a sample depend on its index alone: not on the process that reads it, nor on what was read before",
    ),
    "data-state": (
        "the data set has a state: what it gives depends on what was read before",
        "let a sample depend on its index alone; for a curriculum give the data set a method set_epoch(epoch)",
    ),
    "stream": (
        "the stream gives other samples on another process or layout, or when it is read again",
        "let make(lane, lanes, epoch) follow from its arguments alone: sort what it lists, draw from the global "
        "generators, which are keyed, or seed others from `epoch`; look at neither the rank nor a state outside",
    ),
    "batch-statistics": (
        "a layer takes statistics from the samples of one process",
        "prepare the model with evenstep's batch statistics, or use nn.GroupNorm or nn.LayerNorm",
    ),
    "state": (
        "the model or the loss function keeps a state from one micro-batch to the next",
        "compute from the micro-batch alone; update a state once a step, from values that step.backward returns",
    ),
    "threads": (
        "the number of threads that torch computes with is not the same",
        "give it to evenstep.start(threads=...), and leave out torch.set_num_threads",
    ),
    "not-additive": (
        "the loss is not a sum over samples with its weight",
        "return (sum, weight): `return loss * n, n` where loss is the mean of n samples",
    ),
    "rank": (
        "the loss or the model depends on the process that computes it, or on how many there are",
        "compute the same on every process; evenstep divides by the weight of the whole global batch",
    ),
    "one-rank": (
        "something is done on some processes only",
        "do the same on every process; keep `if run.rank == 0` for printing and for files",
    ),
    "learning-rate": (
        "hyperparameters depend on the layout",
        "choose the learning rate for the global batch, which is the same on every layout",
    ),
    "initialisation": (
        "the model does not begin the same",
        "make it after evenstep.start(), which seeds the generators, and alike on every layout",
    ),
    "options": (
        "the options of evenstep.start depend on the layout",
        "name one global batch, micro-batch and seed for every layout",
    ),
    "gradients": (
        "the loop changes gradients in a way that depends on the layout",
        "leave them as step.backward makes them: they are the mean over the global batch already; run.clip clips them",
    ),
    "weights": (
        "the loop changes the model, or the optimizer's state, in a way that depends on the layout",
        "do the same on every layout; average or copy weights alike on all processes",
    ),
    "not-exact": (
        "the run is not exact (exact=False): sums differ in rounding from layout to layout",
        "leave out exact=False (--no-exact) where the same bits are wanted",
    ),
    "failed": ("the script fails", "see the error"),
    "unknown": (
        "nothing that is known explains it",
        "look at the place that is named; if your script does nothing special there, please report it",
    ),
}

# What an error of evenstep says, by which a mistake is known that it refuses by itself: each phrase is one error's.
REFUSALS: tuple[tuple[str, str], ...] = (
    ("the loss is not additive over samples", "not-additive"),
    ("the weight is not additive over samples", "not-additive"),
    ("a sum of shape", "not-additive"),
    ("a weight that is ", "not-additive"),
    ("; expected (sum over samples, weight)", "not-additive"),
    ("computed twice, is", "randomness"),
    ("gave two different samples", "randomness"),
    ("gave two different orders", "randomness"),
    ("its statistics cannot be updated once a step", "batch-statistics"),
    ("that tracks running statistics", "batch-statistics"),
    ("writes the model's own state", "state"),
    ("is not the same on every process at the start", "initialisation"),
    ("the data set, its length, its samples or its order differs between processes", "data-rank"),
    ("another order for epoch", "data-rank"),
    ("of epoch 0 was begun twice", "stream"),
    ("does not give the same samples again: block", "stream"),
    ("the stream is not the same on all processes", "stream"),
    ("of the stream begins with other samples on rank", "stream"),
    ("hold different models, hyperparameters", "one-rank"),
    ("the processes train different parameters", "one-rank"),
    ("operations without a deterministic form", "nondeterministic-kernel"),
)

_REFUSING = {f"evenstep.errors.{name}" for name in ("UsageError", "DataError", "LossError", "MismatchError")}
_BY_RANK = ("one-rank", "initialisation", "data-rank", "stream")  # whose evidence is where the script reads its rank


@dataclass(frozen=True)
class Finding:
    """One reason why layouts differ. `layout` is the title of the one that was looked at, `others` are those of other
    layouts of which it is the reason too; the rest says where they part, as far as is known."""

    name: str
    layout: str
    evidence: tuple[str, ...] = ()
    step: int | None = None  # counted from 1
    tensor: str | None = None
    module: str | None = None
    micro_batch: int | None = None
    message: str = ""  # the error, where there is one
    others: tuple[str, ...] = ()
    what: str = field(init=False)
    do: str = field(init=False)

    def __post_init__(self) -> None:
        what, do = REASONS[self.name]
        object.__setattr__(self, "what", what)
        object.__setattr__(self, "do", do)


def of_failure(layout: str, error_type: str, message: str, script: str | None = None) -> Finding:
    """The reason for a start that failed. `script`: its file."""
    name = known_mistake(error_type, message)
    if name is None:
        name = "one-rank" if error_type == "evenstep.errors.MismatchError" else "failed"
    ranks = suspects([script], "rank") if script is not None and name in _BY_RANK else []
    return Finding(name, layout, tuple(map(str, ranks[:_SHOWN])), message=message)


def known_mistake(error_type: str, message: str) -> str | None:
    """The mistake that evenstep has refused with this error; None if it is none of the script's."""
    if error_type not in _REFUSING:
        return None  # the script's own words
    return next((name for phrase, name in REFUSALS if phrase in message), None)


def of_options(layout: str, step: int, differences: Sequence[str]) -> Finding:
    """The reason where the script asked for another run. `differences`: of the identities."""
    return Finding("options", layout, tuple(differences), step)


def of_itself(layout: str, step: int, where: Parting, *, hashes: bool) -> Finding:
    """The reason why one layout, started twice, differs. `hashes`: with the same order of hashes it does not."""
    seen = [_place(where)]
    time, random = _near(where, "time"), _near(where, "randomness")
    if hashes:
        name = "hash-order"
        seen.append("with PYTHONHASHSEED set alike, the two starts are identical")
        near = _near(where, "hash") or _anywhere(where, "hash")
    elif time and not random:
        name, near = "time", time
    elif not where.exact and not random and where.place in ("model", "backward", "sum"):
        name, near = "nondeterministic-kernel", []
    else:
        name, near = "randomness", random or _anywhere(where, "randomness")
    return _finding(name, layout, step, where, [*seen, *map(str, near), *_told(where)])


def of_resume(layout: str, step: int, where: Parting) -> Finding:
    """The reason why a resumed run differs."""
    names = sorted(where.values, key=lambda name: not _is_used(where, name))
    pairs = [(name, *where.values[name]) for name in names]
    values = [f"before the step, {name} is {a} undisturbed and {b} resumed" for name, a, b in pairs]
    began = step == 1 and where.place == "before"  # before anything was saved
    name = "initialisation" if began else "unsaved-state"
    return _finding(name, layout, step, where, [_place(where), *values, *_changes(where.changed)])


def of_layout(layout: str, step: int, where: Parting, *, loaders: bool) -> Finding:
    """The reason why another layout differs from one process, which does not differ from itself."""
    rank = _near(where, "rank") + _near(where, "process")
    told = _told(where)
    name, evidence = "unknown", [*map(str, rank or _outside(where, step)), *told]
    match where.place:
        case "threads":
            name, evidence = "threads", [f"torch computes with {where.names[0]} and {where.names[1]} threads"]
            evidence += map(str, _anywhere(where, "threads"))
        case "data":
            state = _near(where, "state")
            name = "data-state" if state and not rank else "data-loaders" if loaders else "data-rank"
            name = "stream" if where.stream else name
            evidence = [*map(str, [*rank, *state]), *told]
        case "before":
            if all(".param_groups[" in one for one in where.names):
                name, evidence = "learning-rate", [*where.hyperparameters, *evidence]
            else:
                name = "initialisation" if step == 1 else "weights"
        case "hyperparameters":
            name, evidence = "learning-rate", [*where.hyperparameters, *evidence]
        case "gradients":
            name = "gradients"
        case "update":
            name = "weights"
        case "model" | "input" | "loss" | "backward" | "sum":
            name, evidence = _of_computing(where, rank)
    if where.changed and (name == "unknown" or (name == "weights" and where.place == "before")):
        name, evidence = _of_changes(where.changed)  # what is left to a race, as between threads, is not seen twice
    if name == "unknown" and not where.exact:
        name = "not-exact"
    return _finding(name, layout, step, where, [_place(where), *evidence])


def _of_computing(where: Parting, rank: list[Suspect]) -> tuple[str, list[str]]:
    if where.module_class is not None and "BatchNorm" in where.module_class:
        return "batch-statistics", []
    derived = [line for name, line in _values(where).items() if _is_used(where, name)]
    if rank:
        return "rank", [*map(str, rank), *derived]
    if where.place in ("model", "input", "loss"):
        near = {name: pair for name, pair in where.changed.items() if _is_used(where, name)}
        if near:
            return _of_changes(near)
        if derived:
            return "rank", derived
        state = _near(where, "state")
        if state:
            return "state", list(map(str, state))
        if where.changed:
            return _of_changes(where.changed)
    return "unknown", derived


def _is_used(where: Parting, name: str) -> bool:
    """Whether the code at fault uses the variable, or the module that is at fault has the attribute."""
    return name.startswith(f"{where.module}.") or bool(names_in(where.lines) & set(name.split(".")))


def _of_changes(changed: Mapping[str, Sequence[str]]) -> tuple[str, list[str]]:
    drawn = any(text.startswith(_GENERATORS) for pair in changed.values() for text in pair)
    return "randomness" if drawn else "state", _changes(changed)


def _finding(name: str, layout: str, step: int, where: Parting, evidence: Sequence[str]) -> Finding:
    shown = tuple(dict.fromkeys(evidence))[: _SHOWN + 1]
    return Finding(name, layout, shown, step, where.tensor, where.module, where.micro_batch)


def _place(where: Parting) -> str:
    """Where they part, in words."""
    at = "" if where.micro_batch is None else f" for micro-batch {where.micro_batch}"
    module = f"{where.module} ({where.module_class})" if where.module_class else str(where.module)
    return {
        "threads": "torch's threads differ",
        "before": f"before the step, {_some(where.names)} differ{'s' if len(where.names) == 1 else ''} already",
        "data": f"the {'stream' if where.stream else 'data set'} gives another batch{at}",
        "model": f"{module} gives another output{at}, for the same input",
        "input": f"the loss function gives the model another input{at}",
        "loss": f"the loss function gives another loss{at}, from equal outputs of the model",
        "backward": f"another gradient reaches {where.module}{at}, after an equal loss",
        "sum": f"the sum of equal gradients differs in {_some(where.names)}",
        "gradients": f"between step.backward and the optimizer the gradient changes: {_some(where.names)}",
        "hyperparameters": "the optimizer has other hyperparameters",
        "update": f"from equal gradients and hyperparameters come other values of {_some(where.names)}",
        "nowhere": "the step was identical when it was done again to look at it",
    }[where.place]


def _near(where: Parting, kind: str) -> list[Suspect]:
    """Suspects in the code that is at fault."""
    return suspects(where.lines, kind)


def _anywhere(where: Parting, kind: str) -> list[Suspect]:
    """Suspects in all of the loop's file."""
    return suspects(_whole(where), kind)


def _outside(where: Parting, step: int) -> list[Suspect]:
    """Where the loop's file reads the rank or the layout; before the first step the loop has not run."""
    found = _anywhere(where, "rank")
    if where.loop is None or where.place != "before" or step > 1:
        return found
    return [one for one in found if not where.loop[1] <= one.line <= where.loop[2]]


def _whole(where: Parting) -> list[str] | None:
    file = where.lines or where.loop
    return None if file is None else [file[0]]


def _changes(changed: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"computing a loss changes {name}: from {a} to {b}" for name, (a, b) in changed.items()]


def _values(where: Parting) -> dict[str, str]:
    return {name: f"{name} is {a} on 1 process and {b} here" for name, (a, b) in where.values.items()}


def _told(where: Parting) -> list[str]:
    return [*_changes(where.changed), *_values(where).values()]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
