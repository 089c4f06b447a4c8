"""A script under `evenstep run` prints, fails and ends as it does under python."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.launching import Result, clean_environ, run, write_script

SCRIPTS = {
    "main module": """
        import sys, pickle
        class Thing: pass
        assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
        assert sys.modules["__main__"].Thing is Thing
        print(__name__, __file__, __package__, __spec__, __doc__, type(__loader__).__name__, sys.argv, sys.path[0])
        print(sorted(globals()), sys.orig_argv[1:])
    """,
    "no inherited future": """
        def f(x: int) -> int: return x
        print(f.__annotations__)
    """,
    "exception": """
        import first
        def inner(): raise ValueError("two\\nlines")
        def outer():
            try: inner()
            except ValueError as error: raise KeyError("chained") from error
        outer()
    """,
    "garbage collector": "import gc, numpy; print(gc.isenabled(), gc.get_threshold())",
    "text exit": "import first, sys; print('out'); sys.exit('a reason')",
    "code exit": "import first, sys; sys.exit(1)",
    "good exit": "import sys; print('done'); sys.exit()",
    "excepthook": """
        import first, sys
        sys.excepthook = lambda kind, error, tb: print("hook", kind.__name__, error, tb.tb_frame.f_code.co_name)
        raise ValueError("x")
    """,
    "broken excepthook": """
        import sys
        def hook(*_): raise SystemExit
        sys.excepthook = hook
        print("before")
    """,
    "exit functions and threads": """
        import atexit, threading
        atexit.register(print, "at exit")
        done = threading.Event()
        def late():
            done.wait(); print("thread")
        threading.Thread(target=late).start()
        threading.Timer(0.05, done.set).start()
        print("main ends")
    """,
    "exit functions after a failure": """
        import atexit, first
        atexit.register(print, "at exit")
        raise RuntimeError("no")
    """,
    "warning": "import warnings; warnings.warn('careful')",
    "local module": """
        import beside
        print(beside.value, beside.__file__)
    """,
    "own module named like a standard one": """
        import json, shlex, queue
        print(json.value, shlex.value, queue.value)
    """,
    "loader processes": """
        import multiprocessing
        def square(x): return x * x
        if __name__ == "__main__":
            for method in ("fork", "spawn"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(pool.map(square, range(4)))
    """,
}


def alone(folder: Path, *words: str) -> Result:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=clean_environ({"OMP_NUM_THREADS": "1"}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
    )
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in SCRIPTS.items()])
def test_same_output_error_and_code(tmp_path: Path, text: str, processes: int) -> None:
    write_script(tmp_path, "value = 5", "beside.py")
    # Scripts that fail do so on rank 0; what is said of another's failure must not be in the way.
    write_script(tmp_path, "import os, time\nif os.environ.get('RANK') == '1': time.sleep(600)", "first.py")
    if "shlex" in text:
        for name in ("json", "shlex", "queue"):
            write_script(tmp_path, "value = 'mine'", f"{name}.py")
    write_script(tmp_path, text)
    expected = alone(tmp_path, "script.py", "a", "--b=c")
    result = run(tmp_path, "--processes", processes, "script.py", "a", "--b=c", env={"OMP_NUM_THREADS": "1"})
    assert (result.code, result.out, result.own_err) == (expected.code, expected.out, expected.err)


def test_syntax_error(tmp_path: Path) -> None:
    """One process: which of two would say it first is chance."""
    write_script(tmp_path, "print('no')\nx = = 1")
    expected = alone(tmp_path, "script.py")
    result = run(tmp_path, "script.py")
    assert "SyntaxError" in expected.err
    assert (result.code, result.out, result.own_err) == (expected.code, expected.out, expected.err)


def test_directory_and_symlink(tmp_path: Path) -> None:
    write_script(
        tmp_path, "import part, sys; print(part.value, __file__, __spec__.name, sys.argv[0])", "app/__main__.py"
    )
    write_script(tmp_path, "value = 1", "app/part.py")
    write_script(tmp_path, "import near, sys; print(near.value, __file__, sys.path[0])", "real/script.py")
    write_script(tmp_path, "value = 2", "real/near.py")
    (tmp_path / "link.py").symlink_to("real/script.py")
    for words in (("app",), ("link.py",)):
        expected = alone(tmp_path, *words)
        assert expected.code == 0
        for processes in (1, 2):
            assert run(tmp_path, "--processes", processes, *words).out == expected.out
