"""Run the user's script in this process as Python alone would, and leave.

The script is a real `__main__` with its own `__file__`, `sys.argv` and `sys.path[0]`; functions registered with atexit
run; tracebacks have none of our frames.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import importlib.machinery
import importlib.util
import os
import sys
import threading
import time
import traceback
from collections.abc import Collection
from contextlib import suppress
from importlib.abc import InspectLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import NoReturn

from evenstep.environment import NOTICES
from evenstep.errors import EvenstepError, Stopped
from evenstep.launch.failures import is_secondary
from evenstep.launch.job import Job
from evenstep.record.uncaught import Uncaught, error_path, type_name, write_uncaught

_OURS = str(Path(__file__).resolve().parent.parent) + os.sep
_RUNNER = __file__


def run_and_leave(job: Job, rank: int, bare: Collection[str], failed: int) -> NoReturn:
    """Run the job's script as this rank, and end the process.

    `bare` are the modules that an interpreter has before it runs anything. `rank` is written to the descriptor
    `failed` as soon as the script has failed: what it does on its way out may take long.
    """
    os.environ[NOTICES] = str(failed)
    faulthandler.enable(file=2)  # a crash in native code leaves the Python stack in the log
    code = 0
    try:
        _run(job, bare)
    except SystemExit as error:
        code = _exit_code(error)
        if isinstance(error, Stopped):
            _leave(code)
        if code != 0:
            _record(job, rank, error, code, shown=True)
    except BaseException as error:
        error.__traceback__ = _peeled(error)
        code = _show(job, rank, error)
    if code != 0:
        with suppress(OSError):
            os.write(failed, f"{rank}\n".encode())
    _leave(code)


def _run(job: Job, bare: Collection[str]) -> None:
    """Make `__main__` and run its code."""
    importlib.invalidate_caches()  # the fork server read the folders some time ago
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    code = _module(job, main, bare) if job.script.as_module else _file(job, main, bare)
    script = job.script
    sys.argv = [str(main.__dict__["__file__"]) if script.as_module else script.name, *script.arguments]
    sys.orig_argv = [sys.executable, *script.words]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _file(job: Job, main: ModuleType, bare: Collection[str]) -> CodeType:
    """A script file, or a directory's __main__.py."""
    given = Path(job.script.name)
    is_directory = given.is_dir()
    path = os.path.abspath(given / "__main__.py" if is_directory else given)
    folder = os.path.abspath(given) if is_directory else os.path.dirname(os.path.realpath(path))
    if is_directory or not sys.flags.safe_path:
        _search_first(folder, bare)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__file__ = path
    main.__loader__ = loader
    main.__package__ = "" if is_directory else None
    main.__spec__ = importlib.util.spec_from_file_location("__main__", path, loader=loader) if is_directory else None
    main.__dict__["__cached__"] = None
    with open(path, "rb") as file:
        source = file.read()
    return compile(source, path, "exec", dont_inherit=True)


def _module(job: Job, main: ModuleType, bare: Collection[str]) -> CodeType:
    """`-m name`: found as an import would find it, run as `__main__`."""
    if not sys.flags.safe_path:
        _search_first(os.getcwd(), bare)
    name = job.script.name
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"
        spec = importlib.util.find_spec(name)
    code = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ImportError(f"No module named {name}; it cannot be run with -m", name=name)
    main.__file__ = spec.origin
    main.__loader__ = spec.loader
    main.__package__ = spec.parent
    main.__spec__ = spec
    main.__dict__["__cached__"] = spec.cached
    return code


def _search_first(folder: str, bare: Collection[str]) -> None:
    """Put `folder` first on the path, and let the modules in it win over those imported before, as they would alone.

    A file `datasets.py` beside the script is what the script means by `import datasets`, though a preloaded package
    has imported another one, and keeps it.
    """
    sys.path.insert(0, folder)
    try:
        names = {entry.name.partition(".")[0] for entry in os.scandir(folder) if _importable(entry)}
    except OSError:
        return
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        origin = str(getattr(module, "__file__", None) or "")
        from_there = origin.startswith((os.path.join(folder, top) + ".", os.path.join(folder, top) + os.sep))
        if top in names and name not in bare and top != "evenstep" and not from_there:
            del sys.modules[name]


def _importable(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith((".py", ".so")) or os.path.exists(os.path.join(entry.path, "__init__.py"))


def _exit_code(error: SystemExit) -> int:
    """What sys.exit(value) means, as Python takes it: a text is printed and means 1."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    with suppress(OSError, ValueError):
        print(error.code, file=sys.stderr)
    return 1


def _show(job: Job, rank: int, error: BaseException) -> int:
    """Record an uncaught exception, print its traceback as Python would, and say the process's exit code."""
    code = error.exit_code if isinstance(error, EvenstepError) else 1
    # As the interpreter does: functions registered with atexit tell by it that the script failed.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    secondary = isinstance(error, KeyboardInterrupt) or (job.part.world_size > 1 and is_secondary(error))
    # What only follows from another process's failure must not reach the terminal before the cause does.
    _record(job, rank, error, code, shown=not secondary, secondary=secondary)
    if secondary:
        _append_to_log(job, rank, "".join(traceback.format_exception(error)))
        return code
    with suppress(Exception):
        sys.stdout.flush()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:
        sys.__excepthook__(type(error), error, error.__traceback__)
    return code


def _record(job: Job, rank: int, error: BaseException, code: int, *, shown: bool, secondary: bool = False) -> None:
    is_exit = isinstance(error, SystemExit)
    uncaught = Uncaught(
        rank=rank,
        type=type_name(error),
        message=str(error),
        traceback="" if is_exit else "".join(traceback.format_exception(error)),
        secondary=secondary,
        exit_code=1 if is_exit else code,
        shown=shown,
        time=time.time(),
    )
    write_uncaught(error_path(job.paths().log(rank)), uncaught)


def _append_to_log(job: Job, rank: int, text: str) -> None:
    with suppress(OSError), open(job.paths().log(rank), "a") as log:
        log.write(text)


def _peeled(error: BaseException) -> TracebackType | None:
    """The traceback without evenstep's frames: the launcher's own above the script, and those between the script and
    the functions that it gave us. An error inside evenstep that it did not raise on purpose keeps them all.
    """
    frames: list[TracebackType] = []
    here = error.__traceback__
    while here is not None:
        if here.tb_frame.f_code.co_filename != _RUNNER:
            frames.append(here)
        here = here.tb_next
    theirs = [one for one in frames if not os.path.realpath(one.tb_frame.f_code.co_filename).startswith(_OURS)]
    if isinstance(error, EvenstepError) or (frames and theirs and frames[-1] is theirs[-1]):
        frames = theirs
    chain: TracebackType | None = None
    for one in reversed(frames):
        chain = TracebackType(chain, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return chain


def _leave(code: int) -> NoReturn:
    """End as Python does: wait for threads, run what atexit knows, flush; but without taking the interpreter apart,
    which can hang in native libraries whose threads still run.
    """
    with suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter itself calls first
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BaseException):
            stream.flush()
    os._exit(code)
