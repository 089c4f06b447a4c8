"""What of a survey would end a launch, and what would make it worse. Pure: a survey in, findings out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from evenstep.doctor.facts import Facts
from evenstep.doctor.survey import Survey, slowest, usual_bandwidth
from evenstep.environment import TOKEN, TORCH_RANGE
from evenstep.launch.output import descriptors

_CLOCK = 2.0  # seconds
_DISK = 1 << 30
_SHARED_MEMORY = 1 << 27  # of a container's usual 64 MiB loader processes die
_MEMORY = 1 << 30  # a process
_OPEN_FILES = 1024
_GIGABIT = 1e9 / 8
_SLOW = 0.5  # of the usual bandwidth
_PLENTY = -1  # no limit


@dataclass(frozen=True)
class Finding:
    """One fault."""

    fails: bool  # a launch would not come up, or not come to its end
    where: str
    what: str
    do: str


def judge(survey: Survey) -> list[Finding]:
    """Every fault, those that would end a launch first."""
    found = [*_reach(survey), *_differences(survey), *_clocks(survey), *_speed(survey), *_sharing(survey)]
    for facts in survey.hosts:
        found += _host(facts, survey.backend)
    return sorted(found, key=lambda finding: not finding.fails)


def _reach(survey: Survey) -> Iterator[Finding]:
    for name, why in survey.unreached.items():
        yield Finding(True, name, f"was not reached: {why}", "see its name, its address, its ssh server and firewall")
    for what in survey.untold:
        yield Finding(True, "", what, "see the addresses and ports that were given")
    for way in survey.ways:
        source, target = survey.hosts[way.source], survey.hosts[way.target]
        if way.measured.error is not None:
            yield Finding(
                True,
                f"{source.host} -> {target.host}",
                f"cannot connect to {target.address}: {way.measured.error}",
                f"let TCP through to every port of {target.host} from the other hosts: gloo and NCCL take free ones",
            )


def _differences(survey: Survey) -> Iterator[Finding]:
    have = [
        {**facts.same, "the processor": facts.cpu.split(" ")[0], "its instructions (torch)": facts.torch.get("cpu")}
        for facts in survey.hosts
    ]
    for name in dict.fromkeys(name for one in have for name in one):
        by_value: dict[str, list[str]] = {}
        for facts, one in zip(survey.hosts, have, strict=True):
            by_value.setdefault(str(one.get(name) or "none"), []).append(facts.host)
        if len(by_value) > 1 and not (name.startswith("its") and "none" in by_value):
            rarest = min(reversed(by_value.values()), key=len)
            said = "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in by_value.items())
            yield Finding(True, ", ".join(rarest), f"{name} differs: {said}", f"have the same {_plain(name)} on all")


def _plain(name: str) -> str:
    return name.removeprefix("the ").removeprefix("its ")


def _clocks(survey: Survey) -> Iterator[Finding]:
    for facts, offset, error in zip(survey.hosts, survey.clocks, survey.clock_errors, strict=True):
        if abs(offset) > _CLOCK + error:
            how = f"{abs(offset):.0f} s {'before' if offset > 0 else 'behind'} that of {survey.hosts[0].host}"
            what = "start a time service there (chrony, systemd-timesyncd); logs are compared by time"
            yield Finding(False, facts.host, f"its clock is {how}", what)


def _speed(survey: Survey) -> Iterator[Finding]:
    worst, usual = slowest(survey.ways), usual_bandwidth(survey.ways)
    for way in survey.ways:
        speed = way.measured.bandwidth
        if way.measured.error is None and (speed < _GIGABIT or (speed < _SLOW * usual and way == worst)):
            more = "; no other is slower" if way == worst else ""
            yield Finding(
                False,
                f"{survey.hosts[way.source].host} -> {survey.hosts[way.target].host}",
                f"a slow link: {gigabits(speed)}, where {gigabits(usual)} are usual here{more}",
                "see its cable, its switch and the interface; every step waits for the slowest link",
            )


def _sharing(survey: Survey) -> Iterator[Finding]:
    for facts in survey.hosts:
        if facts.shared is False:
            yield Finding(
                False,
                facts.host,
                f"does not share the run directory ({facts.folder}, {facts.file_system})",
                "put it on a disk that all hosts see, by --run; without it a run that was stopped cannot go on there"
                if survey.by_hand
                else "put it on a disk that all hosts see, by --run; without it checkpoints are copied by ssh",
            )
            if survey.by_hand:
                break


def _host(facts: Facts, backend: str | None) -> Iterator[Finding]:
    for problem in facts.problems:
        yield Finding(True, facts.host, problem, "see the command line")
    yield from _torch(facts)
    yield from _gpus(facts, backend)
    yield from _disk(facts)
    for variable, name in facts.interfaces.items():
        if name and name not in facts.all_interfaces and not name.startswith(("^", "=")) and "," not in name:
            have = ", ".join(facts.all_interfaces)
            yield Finding(True, facts.host, f"{variable} is {name}, and it has {have}", "name one of them, or unset it")
    yield from _limits(facts)


def _torch(facts: Facts) -> Iterator[Finding]:
    if "error" in facts.torch:
        yield Finding(True, facts.host, f"torch cannot be imported: {facts.torch['error']}", "install it there again")
        return
    version = str(facts.torch["version"])
    low, high = (".".join(map(str, end)) for end in TORCH_RANGE)
    if not TORCH_RANGE[0] <= _numbers(version) < TORCH_RANGE[1]:
        yield Finding(
            True, facts.host, f"has torch {version}; evenstep stands on >={low},<{high}", "install one of these"
        )
    installed = facts.same["torch"]
    if installed.split("+")[0] != version.split("+")[0]:
        yield Finding(
            False, facts.host, f"imports torch {version}, and {installed} is installed", "see PYTHONPATH and sys.path"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2] if part.isdigit())


def _gpus(facts: Facts, backend: str | None) -> Iterator[Finding]:
    seen = len(facts.torch.get("gpus", ()))
    if backend == "nccl" and seen < facts.processes:
        yield Finding(
            True,
            facts.host,
            f"{facts.processes} processes over nccl, and torch sees {seen} GPUs",
            "one GPU a process: fewer --processes, or --backend gloo",
        )
    elif facts.driver is not None and facts.gpus > 0 and seen == 0:
        yield Finding(
            True,
            facts.host,
            f"torch {facts.torch.get('version')} sees none of its GPUs (driver {facts.driver})",
            "install a torch whose CUDA the driver can do",
        )


def _disk(facts: Facts) -> Iterator[Finding]:
    if facts.unwritable is not None:
        yield Finding(
            True,
            facts.host,
            f"nothing can be written into {facts.folder}: {facts.unwritable}",
            "free space there, or give another --run",
        )
    elif facts.disk_free < max(_DISK, 2 * facts.checkpoint):
        fails = facts.disk_free < facts.checkpoint
        what = f"{size(facts.disk_free)} free in {facts.folder}"
        if facts.checkpoint:
            what += f", and a checkpoint takes {size(facts.checkpoint)}"
        yield Finding(fails, facts.host, what, "free space there, or give another --run")


def _limits(facts: Facts) -> Iterator[Finding]:
    if facts.memory_free and facts.memory_free < _MEMORY * facts.processes:
        what = f"{size(facts.memory_free)} of memory are free for {facts.processes} processes"
        yield Finding(False, facts.host, what, "see who has it, or start fewer processes there")
    if 0 < facts.shared_memory_free < _SHARED_MEMORY:
        what = f"{size(facts.shared_memory_free)} of shared memory (/dev/shm) are free"
        yield Finding(False, facts.host, what, "in a container: --shm-size; torch's loader processes need it")
    if facts.open_files != _PLENTY and facts.open_files < max(_OPEN_FILES, descriptors(facts.processes)):
        few = facts.open_files < descriptors(facts.processes)
        yield Finding(few, facts.host, f"{facts.open_files} open files are allowed", "raise `ulimit -n`")
    if facts.infiniband and facts.locked_memory != _PLENTY:
        what = f"{size(facts.locked_memory)} of locked memory are allowed, and it has InfiniBand"
        yield Finding(False, facts.host, what, "`ulimit -l unlimited`: NCCL locks its buffers")


def token_missing() -> Finding:
    """For hosts that were started by hand."""
    return Finding(False, "", f"{TOKEN} is not set: whoever reaches the port can join", "set it to one secret on all")


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def gigabits(bandwidth: float) -> str:
    """Bytes a second for people."""
    bits = 8 * bandwidth
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
