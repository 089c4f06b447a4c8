"""The command line: help, exit codes, and what it refuses before anything starts."""

from __future__ import annotations

import inspect
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import click
import pytest

from evenstep import __version__
from evenstep.cli import preflight
from evenstep.cli.main import evenstep as command_line
from evenstep.cli.report import resume_command
from evenstep.launch.undo import absent, take_back
from evenstep.record.paths import RunPaths
from evenstep.train.start import start
from tests.launch.launching import PATIENCE, Result, clean_environ, command, evenstep, write_script


def refused(result: Result, *says: str, code: int = 2) -> None:
    assert result.code == code, result
    assert "Traceback" not in result.err
    for words in says:
        assert words in result.err


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("run", "--help"), ("prove", "--help")])
def test_help_and_version_are_quick_and_import_no_torch(tmp_path: Path, words: tuple[str, ...]) -> None:
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        result = evenstep(tmp_path, *words)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        assert result.code == 0
    assert min(times) < 0.3  # of processor time: what else the machine does is no matter of ours
    code = "import sys; from evenstep.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, cwd=tmp_path).stdout
    assert out.endswith("False\n")


def test_the_list_of_verbs_says_what_each_verb_says_of_itself() -> None:
    listed = command_line.get_help(click.Context(command_line, max_content_width=200, terminal_width=200))
    for verb in command_line.list_commands(click.Context(command_line)):
        found = command_line.get_command(click.Context(command_line), verb)
        assert found is not None
        assert f"{verb:<6}  {found.get_short_help_str(200)}" in listed


def test_an_option_behind_the_script_is_the_scripts_and_that_is_said(tmp_path: Path) -> None:
    write_script(tmp_path, "import sys; print(sys.argv[1:])")
    result = evenstep(tmp_path, "run", "script.py", "--processes=2", "--lr", "1")
    assert result.out == "['--processes=2', '--lr', '1']\n"
    assert "--processes=2 stands behind the script, so it is the script's own" in result.err
    assert "--lr stands" not in result.err


def test_version(tmp_path: Path) -> None:
    assert evenstep(tmp_path, "--version").out == f"evenstep {__version__}\n"
    module = [sys.executable, "-m", "evenstep", "--version"]
    assert subprocess.run(module, capture_output=True, text=True, cwd=tmp_path).stdout == f"evenstep {__version__}\n"


def help_of(verb: str) -> dict[str, str]:
    """What --help shows of each option, by the option's name."""
    with click.Context(command_line) as outer:
        command = command_line.get_command(outer, verb)
        assert command is not None
        ctx = click.Context(command, info_name=verb, parent=outer)
        options = [param for param in command.params if isinstance(param, click.Option)]
        records = {str(option.name): option.get_help_record(ctx) for option in options}
    return {name: record[1] for name, record in records.items() if record is not None}


@pytest.mark.parametrize("verb", command_line.list_commands(click.Context(command_line)))
def test_each_option_says_its_default_or_what_happens_without_it(verb: str) -> None:
    says = re.compile(r"\[default: |without (it|which)|[Nn]eeded with|In place of|submit nothing")
    assert [name for name, text in help_of(verb).items() if not says.search(text)] == []


def test_the_defaults_in_help_are_those_of_start() -> None:
    shown, compared = help_of("run"), set()
    for name, parameter in inspect.signature(start).parameters.items():
        default = "exact" if name == "exact" else parameter.default
        if name in shown and default is not None and default is not False and default is not parameter.empty:
            assert f"[default: (the script's, else {default})" in shown[name]
            compared.add(name)
    assert compared >= {"seed", "threads", "keep", "stages", "precision", "exact"}


NODE_0 = ["run", "--nodes", "2", "--node-rank", "0", "--master-port", "1234", "--master-addr"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], ["Missing argument 'SCRIPT'"]),
        (["run", "--processes", "0", "a.py"], ["0 is too few", "at least 1"]),
        (["run", "--processes", "-2", "a.py"], ["-2 is too few"]),
        (["run", "--processes", "many", "a.py"], ["'many' is neither a number"]),
        (["run", "--processes", "²", "a.py"], ["'²' is neither a number"]),
        (["run", "--global-batch", "0", "a.py"], ["--global-batch", "0"]),
        (["run", "--seed", "-1", "a.py"], ["--seed"]),
        (["run", "--backend", "carrier-pigeon", "a.py"], ["carrier-pigeon", "gloo"]),
        (["run", "--no-such-option", "a.py"], ["--no-such-option"]),
        (["run", "--nnodes=2", "a.py"], ["--nodes 2 needs --node-rank, --master-addr, --master-port", "what to do"]),
        (["run", "--nnodes", "4:1", "a.py"], ["'4:1' is no number of hosts"]),
        (["run", "--nnodes", "²", "a.py"], ["'²' is no number of hosts"]),
        ([*NODE_0, "", "a.py"], ["--master-addr '' is no address"]),
        ([*NODE_0, "a..b", "a.py"], ["--master-addr 'a..b' is no address"]),
        (["run", "--node_rank=1", "a.py"], ["--nodes was not given", "--nodes 2"]),
        (["run", "--nodes", "1", "--node-rank", "1", "a.py"], ["--nodes is 1", "--nodes 2"]),
        (["run", "--rdzv_endpoint=h:1", "a.py"], ["--rdzv-endpoint is not needed", "--master-addr"]),
        (["run", "--master_port=29501", "a.py"], ["evenstep finds a free port"]),
        (["run", "--hosts", "a:0", "a.py"], ["'a:0'", "is no host"]),
        (["run", "--hosts", "a:1,a:2", "a.py"], ["a stands twice"]),
        (["run", "--hosts", "a:1", "--nodes", "2", "a.py"], ["--nodes goes without --hosts"]),
        (["run", "--hostfile", "none", "a.py"], ["cannot read the host file none", "a line for each host", "node1:4"]),
        (["run", "--join-timeout", "nan", "a.py"], ["--join-timeout", "nan is no finite number"]),
        (["doctor", "--join-timeout", "inf"], ["inf is no finite number"]),
        (["run", "--join-timeout", "-3", "a.py"], ["-3.0 is not in the range x>=1"]),
        (["prove", "--tolerance", "nan", "a", "b", "--weights", "a.pt", "b.pt"], ["--tolerance", "no finite number"]),
        (["run", "--processes", "gpu", "a.py"], ["no GPU"]),
        (["walk"], ["walk"]),
    ],
)
def test_wrong_usage(tmp_path: Path, words: list[str], says: list[str]) -> None:
    write_script(tmp_path, "open('ran', 'w')", "a.py")
    refused(evenstep(tmp_path, *words, env={"CUDA_VISIBLE_DEVICES": ""}), *says)
    assert not (tmp_path / "ran").exists()


def test_no_such_script_names_near_ones(tmp_path: Path) -> None:
    write_script(tmp_path, "", "train.py")
    write_script(tmp_path, "", "evaluate.py")
    refused(evenstep(tmp_path, "run", "tarin.py"), f"there is no script tarin.py in {tmp_path}", "near it: train.py\n")
    refused(evenstep(tmp_path, "run", "train"), "near it: train.py\n")
    refused(evenstep(tmp_path, "run", "src/train.py"), "no directory src")
    assert not (tmp_path / "runs").exists()


def test_what_is_no_script(tmp_path: Path) -> None:
    write_script(tmp_path, "", "folder/a.py")
    refused(evenstep(tmp_path, "run", "folder"), "folder is a directory without __main__.py", "folder/a.py")
    refused(evenstep(tmp_path, "run", "/dev/null"), "/dev/null is not a file")


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"EVENSTEP_LAUNCH": "abc"}, ["already a process of `evenstep run`", "what to do"]),
        ({"RANK": "0", "WORLD_SIZE": "2"}, ["RANK=0 is set already (by another launcher", "unset RANK"]),
        ({"RANK": "0", "TORCHELASTIC_RUN_ID": "none"}, ["(by torchrun)"]),
        (
            {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"},
            ["srun starts `evenstep run` 4 times", "python script.py", "call `evenstep run` once"],
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ["mpirun starts `evenstep run` 2 times"],
        ),
    ],
)
def test_launcher_inside_a_launcher(tmp_path: Path, env: dict[str, str], says: list[str]) -> None:
    write_script(tmp_path, "open('ran', 'w')", "a.py")
    refused(evenstep(tmp_path, "run", "a.py", env=env), *says)
    assert not (tmp_path / "ran").exists()


def test_launcher_started_by_a_process_of_a_launch(tmp_path: Path) -> None:
    inner = command("run", "inner.py")
    write_script(tmp_path, "open('ran', 'w')", "inner.py")
    write_script(tmp_path, f"import subprocess, sys; sys.exit(subprocess.run({inner!r}).returncode)", "outer.py")
    result = evenstep(tmp_path, "run", "outer.py")
    assert result.code == 1
    assert "already a process of `evenstep run`" in result.err
    assert "rank 0 called sys.exit(2)" in result.err
    assert not (tmp_path / "ran").exists()


def test_a_shell_of_an_allocation_is_no_launcher(tmp_path: Path) -> None:
    write_script(tmp_path, "print('ran')", "a.py")
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "WORLD_SIZE": "4"}
    assert evenstep(tmp_path, "run", "a.py", env=env).out == "ran\n"


def test_run_directory_that_cannot_be_written(tmp_path: Path) -> None:
    script = write_script(tmp_path, "open('ran', 'w')", "a.py")
    write_script(tmp_path, "", "file")
    refused(evenstep(tmp_path, "run", "--run", "file", script), "--run file is a file, not a directory")
    refused(evenstep(tmp_path, "run", "--run", "file/in", script), "cannot make the run directory", "what to do")
    refused(evenstep(tmp_path, "run", "--run", "/proc/x", script), "cannot make the run directory /proc/x")
    refused(evenstep(Path("/proc"), "run", script), "cannot make a run directory under /proc/runs")
    assert not (tmp_path / "ran").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="everything is writable for root")
def test_run_directory_without_permission(tmp_path: Path) -> None:
    script = write_script(tmp_path, "", "a.py")
    (tmp_path / "closed").mkdir(mode=0o500)
    refused(evenstep(tmp_path, "run", "--run", "closed", script), "is not writable")


def test_full_disk_is_seen_before_start(tmp_path: Path) -> None:
    """A limit on file sizes stands for it."""
    write_script(tmp_path, "open('ran', 'w')", "a.py")
    words = ["sh", "-c", 'ulimit -f 8; exec "$@"', "sh", *command("run", "--run", "run", "a.py")]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=150)
    result = Result(done.returncode, done.stdout, done.stderr)
    refused(result, "cannot write into the run directory", "what to do", code=4)
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "run").exists()


def test_refused_launch_takes_back_the_folders_that_it_made(tmp_path: Path) -> None:
    write_script(tmp_path, "open('ran', 'w')", "a.py")
    before = sorted(tmp_path.iterdir())
    refused(evenstep(tmp_path, "run", "--backend", "mpi", "a.py"), "built without it")
    refused(evenstep(tmp_path, "run", "--backend", "mpi", "--run", "new/deep/run", "a.py"), "built without it")
    too_long = "n" * 300
    refused(evenstep(tmp_path, "run", "--run", f"new/{too_long}", "a.py"), "cannot make the run directory")
    assert sorted(tmp_path.iterdir()) == before


def test_refused_launch_leaves_what_was_there(tmp_path: Path) -> None:
    write_script(tmp_path, "", "a.py")
    (tmp_path / "mine").mkdir()
    refused(evenstep(tmp_path, "run", "--backend", "mpi", "--run", "mine", "a.py"), "built without it")
    refused(evenstep(tmp_path, "run", "--backend", "mpi", "--run", "mine/new", "a.py"), "built without it")
    assert (tmp_path / "mine").is_dir()
    assert not (tmp_path / "mine" / "new").exists()
    assert evenstep(tmp_path, "run", "a.py").code == 0
    (kept,) = (tmp_path / "runs").iterdir()
    refused(evenstep(tmp_path, "run", "--backend", "mpi", "a.py"), "built without it")
    assert list((tmp_path / "runs").iterdir()) == [kept]


def test_folders_are_taken_back_only_if_empty(tmp_path: Path) -> None:
    root = tmp_path / "new" / "run"
    paths = RunPaths(root)
    made = absent(root)
    assert made == (root, root.parent)
    paths.log(0).parent.mkdir(parents=True)
    paths.launcher_events.parent.mkdir()
    paths.launcher_events.touch()
    (root / "notes.txt").touch()  # somebody else's
    take_back(paths, made)
    assert sorted(path.name for path in root.iterdir()) == ["notes.txt"]
    (root / "notes.txt").unlink()
    take_back(paths, made)
    assert list(tmp_path.iterdir()) == []


def test_words_for_processes(tmp_path: Path) -> None:
    write_script(tmp_path, "import os; print(os.environ['WORLD_SIZE'])", "a.py")
    env = {"CUDA_VISIBLE_DEVICES": ""}
    cores = str(len(os.sched_getaffinity(0)))
    for word, expected in [("cpu", cores), ("auto", cores), ("3", "3"), (None, "1")]:
        options = [] if word is None else ["--nproc_per_node", word]
        assert evenstep(tmp_path, "run", *options, "a.py", env=env).out == f"{expected}\n"


def test_processes_of_several_gpus_or_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "visible_gpus", lambda environ: 8)
    assert preflight.process_count(None) == 8
    assert preflight.process_count(None, replicas=2, split=2) == preflight.process_count("gpu", 2, 2) == 2
    assert preflight.process_count(None, split=16) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(6))
    assert preflight.process_count("cpu", replicas=2, split=2) == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run", "a.py"], "evenstep run --run RUN a.py"),
        (["run", "--run", "old", "a.py"], "evenstep run --run old a.py"),
        (["run", "--run=old", "a.py"], "evenstep run --run=old a.py"),
        (["run", "--seed", "3", "-m", "a", "--run", "x"], "evenstep run --run RUN --seed 3 -m a --run x"),
        (["run", "--no-exact", "a.py", "b c"], "evenstep run --run RUN --no-exact a.py 'b c'"),
    ],
)
def test_resume_command(words: list[str], expected: str) -> None:
    assert resume_command(words, RunPaths(Path("/elsewhere/r"))) == expected.replace("RUN", "/elsewhere/r")


def test_too_few_open_files_are_allowed(tmp_path: Path) -> None:
    write_script(tmp_path, "", "a.py")
    words = ["sh", "-c", 'ulimit -n 16; exec "$@"', "sh", *command("run", "--processes", 4, "a.py")]
    done = subprocess.run(words, cwd=tmp_path, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 4
    assert "evenstep: 4 processes on one host take 76 open files, and 16 are allowed\n" in done.stderr
    assert not (tmp_path / "runs").exists()
