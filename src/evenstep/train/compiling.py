"""Compiled models (torch.compile): which code runs for a micro-batch must depend on that micro-batch alone.

Left to itself torch compiles a second shape again, for shapes of any size, and then takes whichever code it made
before; a process that meets other shapes first, or starts anew, runs other code. So while a run is exact each shape has
code of its own, code is not chosen by how fast it ran, and how models are compiled belongs to the run's identity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from evenstep.errors import UsageError
from evenstep.train.options import Options

_SHAPES = 64  # that one piece of code may be compiled for; torch's own limit is 8, and then it goes on uncompiled
_BY_TIME = ("max_autotune", "max_autotune_gemm", "max_autotune_pointwise", "coordinate_descent_tuning")


class Compiled:
    """The compiled modules of a run's models."""

    def __init__(self, options: Options, device: torch.device) -> None:
        self._exact, self._device = options.exact, device
        asked = {
            "--stages": options.stages > 1,
            "--shard": options.shard,
            "--thread-replicas": options.thread_replicas > 1,
            "--split": options.split > 1,
        }
        self._split = [name for name, wanted in asked.items() if wanted]
        self._put_back: Callable[[], None] | None = None

    def refuse(self, option: str) -> None:
        """Models are split by `option`, which takes none that is compiled."""
        self._split.append(option)

    def look(self, modules: Mapping[str, nn.Module]) -> str | None:
        """How the modules, by name, are compiled, for the run's identity; None where none is. From now on, code is
        compiled as an exact run needs it. UsageError for what cannot be exact."""
        found: dict[str, list[str]] = {}
        for name, module in modules.items():
            context = _context(module)
            if context is not None:
                how = self._how(name or "the model", module, context)
                found.setdefault(how, []).append(name)
        if not found:
            return None
        if self._exact and self._put_back is None:
            self._put_back = _hold()
        said = [how + (f" ({', '.join(filter(None, names))})" if any(names) else "") for how, names in found.items()]
        inductor = self._device.type == "cpu" and any(how.startswith("inductor") for how in found)
        return "; ".join([*said, *(_toolchain() if inductor else ())])

    def close(self) -> None:
        """torch compiles as it did before the run."""
        if self._put_back is not None:
            self._put_back()
            self._put_back = None

    def _how(self, name: str, module: nn.Module, context: Any) -> str:
        """Backend and options of a compiled module."""
        backend: Any = _backend(context)
        options: dict[str, object] = dict(getattr(backend, "config", None) or getattr(backend, "kwargs", None) or {})
        compiler = str(getattr(backend, "compiler_name", None) or getattr(backend, "__name__", type(backend).__name__))
        if self._split:
            raise UsageError(
                f"{name} is compiled, and {self._split[0]} runs its layers one by one",
                do=f"leave torch.compile out under {self._split[0]}",
            )
        if self._exact:
            chosen = [option for option in _BY_TIME if options.get(option)]
            if chosen:
                raise UsageError(
                    f"{name} is compiled with {', '.join(chosen)}, which takes the code that was fastest when it was "
                    "tried: another process, or another start, may take another",
                    do="leave mode= out (or mode='reduce-overhead'), or give up exactness: exact=False (--no-exact)",
                )
            if context._dynamic:
                raise UsageError(
                    f"{name} is compiled with dynamic=True: the code for a shape would depend on the shapes that a "
                    "process met before",
                    do="leave dynamic= out: each shape gets code of its own; or exact=False (--no-exact)",
                )
        text = ", ".join(f"{option}={value!r}" for option, value in sorted(options.items()))
        return f"{compiler} {text}".strip()


def _toolchain() -> list[str]:
    """What else decides about the code that inductor makes for a CPU. UsageError without a C++ compiler."""
    from torch._inductor.cpp_builder import get_compiler_version_info, get_cpp_compiler
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UsageError(
            "a model is compiled, and torch finds no C++ compiler on this machine",
            do="install g++ or clang++ (or name one in CXX), or leave torch.compile out",
        ) from error
    version = get_compiler_version_info(compiler).partition(" version ")[2].partition("_")[0].strip()
    return [f"{compiler} {version}", str(pick_vec_isa())]


def _context(module: nn.Module) -> Any:
    """What torch.compile knows of a module that it compiled (torch.compile(module), module.compile()), or None."""
    context = getattr(module, "dynamo_ctx", None) if hasattr(module, "_orig_mod") else None
    call = getattr(module, "_compiled_call_impl", None)
    if context is None and call is not None:
        cells = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
        context = next((value for value in cells if hasattr(value, "_dynamic")), None)
    return context


def _backend(context: Any) -> Any:
    from torch._dynamo.eval_frame import innermost_backend

    return innermost_backend(context.callback)


def _hold() -> Callable[[], None]:
    """Sets how torch compiles in an exact run, and forgets what was compiled before; returns what puts it all back."""
    import torch._dynamo
    import torch._inductor.config as inductor
    from torch._dynamo import config as dynamo

    wanted: list[tuple[Any, str, object]] = [
        (dynamo, "automatic_dynamic_shapes", False),
        (dynamo, "assume_static_by_default", True),
        (dynamo, "recompile_limit", max(_SHAPES, dynamo.recompile_limit)),
        (dynamo, "fail_on_recompile_limit_hit", True),
        (inductor, "deterministic", True),
    ]
    before = [(place, name, getattr(place, name)) for place, name, _ in wanted]

    def put(values: list[tuple[Any, str, object]]) -> None:
        for place, name, value in values:
            setattr(place, name, value)
        torch._dynamo.reset()

    put(wanted)
    return lambda: put(before)


def any_compiled(modules: Mapping[str, nn.Module]) -> bool:
    """Whether torch.compile was used on any of them. Their code is compiled anew whenever torch's settings change."""
    return any(_context(module) is not None for module in modules.values())


def uncompiled() -> Any:
    """Inside, compiled models run as if they were not: checks need not wait for a compiler."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@contextmanager
def naming_shapes() -> Iterator[None]:
    """UsageError where the micro-batches have more shapes than code may be compiled for."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ != "FailOnRecompileLimitHit":
            raise
        raise UsageError(
            f"the micro-batches have more than {_SHAPES} shapes, and in an exact run each has compiled code of its own",
            do="pad them to a few lengths, or leave torch.compile out, or give up exactness with exact=False "
            "(--no-exact)",
        ) from error
