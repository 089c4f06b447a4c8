"""`evenstep run --slurm`: the script that it submits, and when a job is requeued. Slurm's commands are stand-ins."""

from __future__ import annotations

import re
import shlex
import signal
import socket
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from evenstep.launch.hosts.hostfile import Host
from evenstep.launch.schedulers.slurm import by_srun, is_time_limit
from tests.launch.launching import evenstep, eventually, launched, write_script

JOB = "JobId=7 JobState={state} Reason=None ExitCode={code}:0 EndTime={ends} NodeList=n[1-2] ReqNodeList=(null)"


def stand_ins(folder: Path, state: str = "RUNNING", code: int = 0, nodes: str = "", left: int = 60) -> dict[str, str]:
    """A PATH on which Slurm's commands write down how they were called, and a job is in this state."""
    ends = (datetime.now() + timedelta(seconds=left)).isoformat(timespec="seconds")
    shown = JOB.format(state=state, code=code, ends=ends)
    bin = folder / "bin"
    bin.mkdir()
    scripts = {
        "sbatch": f"cat > {folder}/submitted; echo '7;cluster'",
        "scontrol": f'case "$2" in hostnames) echo "{nodes}";; job) echo "{shown}";; esac',
        "srun": 'while [ "$1" != sh ]; do shift; done; exec "$@"',
    }
    for name, body in scripts.items():
        (bin / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {folder}/calls\n{body}\n')
        (bin / name).chmod(0o700)
    (folder / "calls").touch()
    return {"PATH": f"{bin}:{Path(sys.executable).parent}:/usr/bin:/bin"}


def calls(folder: Path) -> str:
    return (folder / "calls").read_text()


def test_the_time_limits_that_sbatch_takes() -> None:
    for said in ("0", "90", "90:30", "1:00:00", "2-0", "2-12:30", "2-12:30:15", "-1", "UNLIMITED", "infinite"):
        assert is_time_limit(said), said
    for said in ("", "1h", "1:2:3:4", "1-", "-", "-2", "1-2-3", "1.5", "٣", "1:00 ", "1:00\n"):
        assert not is_time_limit(said), said


def test_dry_run_prints_the_script_and_submits_nothing(tmp_path: Path) -> None:
    write_script(tmp_path, "print(1)", "a script.py")
    words = (
        "run", "--slurm", "--nodes", 2, "--processes", 4, "--time", "1:00:00", "--partition", "gpu", "--account", "me",
        "--slurm-option", "gpus-per-node=4", "--slurm-option", 'comment=say "yes"', "--slurm-option",
        "signal=B:USR1@300", "--run", "r", "--keep", 3, "--shard", "--dry-run", "a script.py", "--nodes", "$(x)",
    )  # fmt: skip
    done = evenstep(tmp_path, *words, env=stand_ins(tmp_path))
    assert done.code == 0, done
    lines = done.out.splitlines()
    options = dict(line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines if line.startswith("#SBATCH"))
    assert options == {
        "job-name": '"a script"', "nodes": "2", "ntasks-per-node": "4", "time": "1:00:00", "partition": "gpu",
        "account": "me", "chdir": str(tmp_path), "output": f"{tmp_path}/r/slurm-%j.log", "open-mode": "append",
        "requeue": "", "signal": "B:USR1@300", "gpus-per-node": "4", "comment": '"say \\"yes\\""',
    }  # fmt: skip
    assert lines[0] == "#!/bin/sh"
    assert shlex.split(lines[-1])[6:] == [
        "--requeue", "--run", f"{tmp_path}/r", "--processes", "4", "--shard", "--keep", "3", "a script.py",
        "--nodes", "$(x)",
    ]  # fmt: skip
    subprocess.run(["sh", "-n"], input=done.out, text=True, check=True)
    assert calls(tmp_path) == ""
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--slurm", "--hosts", "a:1"], "--hosts goes without --slurm"),
        (["--slurm", "--node-rank", "1", "--nodes", "2"], "--node-rank goes without --slurm"),
        (["--time", "1:00"], "--time is for --slurm, which was not given"),
        (["--dry-run"], "--dry-run is for --slurm and --kubernetes"),
        (["--slurm", "--slurm-option", "=4"], "is no option of sbatch"),
        (["--slurm", "--time", "banana", "--dry-run"], "'banana' is no time limit for sbatch"),
        (["--slurm", "--slurm-option", "time=1h", "--dry-run"], "'1h' is no time limit for sbatch"),
        (["--slurm", "--slurm-option", "comment=a\nb"], "has a line break"),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, words: list[str], said: str) -> None:
    write_script(tmp_path, "print(1)")
    done = evenstep(tmp_path, "run", *words, "script.py", env=stand_ins(tmp_path))
    assert (done.code, said in done.err) == (2, True), done
    assert calls(tmp_path) == ""
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("state", "code", "expected", "said"),
    [
        ("COMPLETED", 0, 0, "job 7 is done"),
        ("FAILED", 1, 1, "job 7 is failed with exit code 1"),
        ("TIMEOUT", 0, 4, "job 7 is timeout"),
        ("CANCELLED", 0, 143, "job 7 is cancelled"),
    ],
)
def test_how_a_job_ended(tmp_path: Path, state: str, code: int, expected: int, said: str) -> None:
    write_script(tmp_path, "print(1)")
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "slurm-7.log").write_text("what it wrote\n")
    done = evenstep(tmp_path, "run", "--slurm", "--run", "r", "script.py", env=stand_ins(tmp_path, state, code))
    assert (done.code, done.out, said in done.err) == (expected, "what it wrote\n", True), done
    assert "#SBATCH --nodes=1\n" in (tmp_path / "submitted").read_text()


def test_no_slurm_here(tmp_path: Path) -> None:
    write_script(tmp_path, "print(1)")
    done = evenstep(tmp_path, "run", "--slurm", "script.py", env={"PATH": str(tmp_path)})
    assert (done.code, "there is no sbatch on this host" in done.err) == (2, True), done
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.parametrize(
    ("state", "checkpoint", "left", "requeued"),
    [
        ("RUNNING", True, 60, True),
        ("RUNNING", False, 60, False),  # near its time limit: it would come no further in the next turn
        ("RUNNING", False, 7200, True),  # preempted
        ("CANCELLED", True, 60, False),
    ],
)
def test_a_job_that_is_asked_to_stop(tmp_path: Path, state: str, checkpoint: bool, left: int, requeued: bool) -> None:
    write_script(
        tmp_path,
        f"""
        import os, time
        if {checkpoint}:
            os.makedirs("run/checkpoints/step-0000000003")
        print("ready", flush=True)
        time.sleep(60)
        """,
    )
    env = stand_ins(tmp_path, state, nodes=socket.gethostname(), left=left)
    env |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "here"}
    with launched(tmp_path, "--requeue", "script.py", env=env) as launch:
        assert eventually(lambda: launch.paths.log(0).exists() and "ready" in launch.log(0))
        launch.popen.send_signal(signal.SIGUSR1)
        done = launch.wait()
    assert done.code == 128 + signal.SIGUSR1, done
    assert ("scontrol requeue 7" in calls(tmp_path)) == requeued
    assert ("job 7 is requeued, to go on from step 3" in done.err) == (requeued and checkpoint)
    assert ("this turn of it has written no checkpoint" in done.err) == (state == "RUNNING" and not requeued)


def test_an_allocation(tmp_path: Path) -> None:
    write_script(tmp_path, "import os; print(os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)")
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NTASKS": "5", "SLURM_TASKS_PER_NODE": "2,3"}
    env = stand_ins(tmp_path, nodes="n1 n2") | job
    done = evenstep(tmp_path, "run", "--output", "all", "script.py", env=env)
    assert done.code == 0, done
    assert sorted(re.findall(r"\d 5", done.out)) == [f"{rank} 5" for rank in range(5)]
    assert set(re.findall(r"srun --nodes=1 .*--overlap .*--nodelist=(\w+) sh -c", calls(tmp_path))) == {"n1", "n2"}
    done = evenstep(tmp_path, "run", "--nodes", 3, "script.py", env=env)
    assert (done.code, "--nodes 3, and the Slurm allocation has 2: n1, n2" in done.err) == (2, True), done


def test_an_allocation_where_slurm_is_not_at_hand(tmp_path: Path) -> None:
    """In a container, say."""
    write_script(tmp_path, "print(1)")
    env = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = evenstep(tmp_path, "run", "script.py", env=env)
    assert (done.code, "scontrol, srun) are not here" in done.err) == (2, True), done
    one = env | {"SLURM_JOB_NODELIST": "n1", "SLURMD_NODENAME": "n1", "SLURM_NTASKS": "2", "SLURM_TASKS_PER_NODE": "2"}
    both = evenstep(tmp_path, "run", "--output", "all", "script.py", env=one)
    assert sorted(both.out.splitlines()) == ["1", "[1] 1"], both


def test_a_launcher_gets_all_that_the_job_has_of_a_node() -> None:
    words = by_srun(Host("n1", 4))
    assert words[:3] == ["env", "-u", "SLURM_NTASKS"]
    assert "SLURM_GPUS_PER_TASK" in words
    assert words[-2:] == ["sh", "-c"]
