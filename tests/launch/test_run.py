"""What a process of a launch finds: its place, environment, arguments, streams, and an interpreter as if alone."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from pathlib import Path

import pytest

from evenstep.environment import read_settings, read_world
from tests.launch.launching import evenstep, installed_package, launched, run, write_script

TELL_ENVIRONMENT = """
    import json, os, sys
    with open(f"environ-{os.environ['RANK']}", "w") as file:
        json.dump({"environ": dict(os.environ), "argv": sys.argv, "cwd": os.getcwd()}, file)
"""


def told(folder: Path, rank: int) -> dict[str, str]:
    environ = json.loads((folder / f"environ-{rank}").read_text())["environ"]
    assert isinstance(environ, dict)
    return environ


@pytest.mark.parametrize("processes", [1, 3])
def test_every_process_knows_its_place(tmp_path: Path, processes: int) -> None:
    script = write_script(tmp_path, TELL_ENVIRONMENT)
    assert run(tmp_path, "--processes", processes, script, "--processes", "7").code == 0
    worlds = [read_world(told(tmp_path, rank)) for rank in range(processes)]
    for rank, world in enumerate(worlds):
        assert (world.rank, world.world_size, world.local_rank, world.local_world_size) == (
            (rank, processes, rank, processes)
        )
        assert (world.launcher, world.master_addr) == ("evenstep", "127.0.0.1")
    assert len({(world.master_port, world.job) for world in worlds}) == 1
    assert worlds[0].master_port
    assert not (tmp_path / f"environ-{processes}").exists()
    assert json.loads((tmp_path / "environ-0").read_text())["argv"] == [str(script), "--processes", "7"]


def test_options_reach_every_process_as_settings(tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL_ENVIRONMENT)
    options = "--processes 2 --global-batch 64 --micro-batch 8 --seed 0 --no-exact --threads 3 --checkpoint-every 10"
    assert run(tmp_path, *options.split(), "--keep", 2, "--fingerprints", script).code == 0
    for rank in range(2):
        settings = read_settings(told(tmp_path, rank))
        assert settings.run == str(tmp_path / "run")
        assert (settings.global_batch, settings.micro_batch, settings.seed) == (64, 8, 0)
        assert (settings.exact, settings.threads, settings.checkpoint_every, settings.keep) == (False, 3, 10, 2)
        assert (settings.fingerprints, settings.allow_other_identity, settings.backend) == (True, None, None)
        assert told(tmp_path, rank)["OMP_NUM_THREADS"] == "3"


def test_environment_is_the_users_own(tmp_path: Path) -> None:
    """The fork server's own variables stay in the fork server; bytes that are no UTF-8 survive."""
    script = write_script(tmp_path, TELL_ENVIRONMENT)
    odd = os.fsdecode(b"caf\xe9")
    assert run(tmp_path, "--processes", 2, script, env={"MINE": odd, "MKL_NUM_THREADS": "5"}).code == 0
    environ = told(tmp_path, 1)
    assert environ["MINE"] == odd
    assert environ["MKL_NUM_THREADS"] == "5"
    assert environ["OMP_NUM_THREADS"] == "1"
    for name in ("OPENBLAS_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK"):
        assert name not in environ


def test_one_process_keeps_all_threads(tmp_path: Path) -> None:
    script = write_script(tmp_path, TELL_ENVIRONMENT)
    assert run(tmp_path, script).code == 0
    assert "OMP_NUM_THREADS" not in told(tmp_path, 0)


def test_users_thread_count_is_used_by_torch(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import torch; print(torch.get_num_threads())")
    result = run(tmp_path, "--processes", 2, script, env={"OMP_NUM_THREADS": "2"})
    assert (result.code, result.out) == (0, "2\n")


def test_process_has_own_group_no_input_and_default_signals(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, signal, sys
        assert os.getpgrp() == os.getpid()
        assert sys.stdin.read() == ""
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
            assert signal.getsignal(number) == signal.SIG_DFL, number
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
        others = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 2]
        kinds = [os.readlink(f"/proc/self/fd/{fd}") for fd in others if os.path.exists(f"/proc/self/fd/{fd}")]
        assert all(kind.startswith("pipe:") for kind in kinds), kinds
        assert not any(os.get_inheritable(fd) for fd in others if os.path.exists(f"/proc/self/fd/{fd}"))
        print("well")
        """,
    )
    for processes in (1, 2):
        with launched(tmp_path, "--processes", processes, script) as launch:
            result = launch.wait()
        assert (result.code, result.out) == (0, "well\n"), result.err
        assert launch.log(processes - 1).count("well\n") >= 1


def test_random_states_differ_between_processes_and_starts(tmp_path: Path) -> None:
    script = write_script(
        tmp_path,
        """
        import os, random, numpy.random
        print("draw", random.random(), numpy.random.rand())
        """,
    )
    draws = []
    for _ in range(2):
        with launched(tmp_path, "--processes", 2, script) as launch:
            assert launch.wait().code == 0
        draws += [line for rank in range(2) for line in launch.log(rank).splitlines() if line.startswith("draw")]
    numbers = [number for draw in draws for number in draw.split()[1:]]
    assert len(set(numbers)) == 8  # the second start's logs follow the first's


def test_ps_shows_the_script(tmp_path: Path) -> None:
    script = write_script(tmp_path, "print(open('/proc/self/cmdline').read().rstrip(chr(0)).split(chr(0)))")
    for processes in (1, 2):
        result = run(tmp_path, "--processes", processes, "script.py", "--lr", "0.1")
        assert result.out == "['python', 'script.py', '--lr', '0.1']\n"
    assert script.exists()


def test_a_new_run_directory_for_each_start(tmp_path: Path) -> None:
    write_script(tmp_path, "import os; print(os.environ['EVENSTEP_RUN'])")
    runs = {evenstep(tmp_path, "run", "script.py").out.strip() for _ in range(2)}
    assert len(runs) == 2
    for one in runs:
        assert Path(one).parent == tmp_path / "runs"
        assert (Path(one) / "logs" / "rank-0.log").read_text().strip() == one


def test_says_once_that_the_script_does_not_use_evenstep(tmp_path: Path) -> None:
    write_script(tmp_path, "from plan import start", "uses.py")
    write_script(tmp_path, "def start():\n    import evenstep", "plan.py")
    write_script(tmp_path, "import json", "plain.py")
    said = "does not use evenstep"
    assert run(tmp_path, "--processes", 3, "plain.py").err.count(said) == 1
    assert run(tmp_path, "plain.py").err.count(said) == 1
    assert said not in run(tmp_path, "uses.py").err


def test_module(tmp_path: Path) -> None:
    write_script(tmp_path, "", "pack/__init__.py")
    write_script(tmp_path, "value = 3", "pack/part.py")
    write_script(tmp_path, "import sys; from .part import value; print(value, __name__, sys.argv)", "pack/tool.py")
    write_script(tmp_path, "from pack.part import value; print('main', value, __package__)", "pack/__main__.py")
    for processes in (1, 2):
        result = run(tmp_path, "--processes", processes, "-m", "pack.tool", "--x")
        assert result.out == f"3 __main__ ['{tmp_path}/pack/tool.py', '--x']\n", result.err
        assert run(tmp_path, "--processes", processes, "-m", "pack").out == "main 3 pack\n"
    missing = run(tmp_path, "-m", "pack.none")
    assert missing.code == 1
    assert "No module named pack.none" in missing.err


def test_two_launchers_cannot_share_a_run_directory(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import signal; print('up', flush=True); signal.pause()")
    with launched(tmp_path, script) as first:
        assert first.popen.stdout is not None
        assert first.popen.stdout.readline() == "up\n"
        second = run(tmp_path, script)
        assert second.code == 2
        assert "in use by another `evenstep run`" in second.err
        first.popen.send_signal(signal.SIGTERM)
        assert first.wait().code == 143
    assert run(tmp_path, write_script(tmp_path, "", "empty.py")).code == 0


def test_import_that_starts_a_thread_makes_a_plain_start(tmp_path: Path) -> None:
    env = installed_package(
        tmp_path, "threaded", "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()"
    )
    script = write_script(tmp_path, "import os, threaded; print(os.environ['RANK'], os.environ['OMP_NUM_THREADS'])")
    with launched(tmp_path, "--processes", 2, "--output", "all", script, env=env) as launch:
        result = launch.wait()
    assert (result.code, sorted(result.out.splitlines())) == (0, ["0 1", "[1] 1 1"]), result.err
    assert "importing threaded started 1 thread, so no process can be forked from one that has it" in result.err


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is not installed")
def test_the_thread_of_pyarrows_allocator_is_not_started(tmp_path: Path) -> None:
    script = write_script(tmp_path, "import pyarrow; print(pyarrow.array([1, 2]).sum())")
    result = run(tmp_path, "--processes", 2, script)
    assert (result.code, result.out) == (0, "3\n"), result.err
    assert "each imports all for itself" not in result.err


def test_installed_package_is_imported_once_and_own_module_in_each_process(tmp_path: Path) -> None:
    env = installed_package(tmp_path, "shared", "import os; open(os.environ['SEEN'] + f'/shared-{os.getpid()}', 'w')")
    write_script(tmp_path, "import os; open(os.environ['SEEN'] + f'/own-{os.getpid()}', 'w')", "own.py")
    script = write_script(tmp_path, "import own")
    write_script(tmp_path, "import own, shared", "script.py")
    seen = tmp_path / "seen"
    seen.mkdir()
    result = run(tmp_path, "--processes", 3, script, env={**env, "SEEN": str(seen)})
    assert result.code == 0, result.err
    assert len(list(seen.glob("shared-*"))) == 1
    assert len(list(seen.glob("own-*"))) == 3


def test_installed_package_that_cannot_be_imported_is_the_scripts_business(tmp_path: Path) -> None:
    env = installed_package(tmp_path, "broken", "raise RuntimeError('not today')")
    script = write_script(
        tmp_path,
        """
        try:
            import broken
        except RuntimeError as error:
            print("without:", error)
        """,
    )
    result = run(tmp_path, "--processes", 2, script, env=env)
    assert (result.code, result.out) == (0, "without: not today\n")


def test_module_beside_the_script_wins_over_a_preloaded_one(tmp_path: Path) -> None:
    env = installed_package(tmp_path, "other", "import tools; value = tools.value")
    installed_package(tmp_path, "tools", "value = 'installed'")
    write_script(tmp_path, "value = 'beside'", "tools.py")
    script = write_script(tmp_path, "import other, tools; print(tools.value)")
    assert run(tmp_path, "--processes", 2, script, env=env).out == "beside\n"


def test_variable_that_an_import_sets_reaches_the_processes(tmp_path: Path) -> None:
    env = installed_package(tmp_path, "setter", "import os; os.environ['SET_BY_IMPORT'] = 'yes'")
    script = write_script(tmp_path, "import os, setter; print(os.environ['SET_BY_IMPORT'])")
    assert run(tmp_path, "--processes", 2, script, env=env).out == "yes\n"
