"""Do two files of weights hold the same model? For scripts that know nothing of evenstep.

python -m evenstep.train.compare A B --tolerance T      prints one JSON object

No pickle is executed: .safetensors files are read as such, others by torch.load(weights_only=True).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from evenstep.errors import EvenstepError, UsageError
from evenstep.train.plain_values import join_path

# Under which a checkpoint keeps the model, beside its optimizer and other things.
_MODEL_KEYS = ("state_dict", "model", "model_state_dict", "model_state", "module", "weights", "params", "net")
# What wrappers put into names.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_SHOWN = 20


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of the model in a file (or in a folder of .safetensors files), by name without wrappers' prefixes.

    UsageError for what cannot be read, or only by running code that is in the file.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise UsageError(f"{path} is a directory without .safetensors files", do="name a file of weights")
    found: dict[str, Tensor] = {}
    for file in files:
        found.update(_named(_model(_load(file)), ""))
    if not found:
        raise UsageError(f"{path} holds no tensors", do="save model.state_dict()")
    plain = {_unwrapped(name): tensor for name, tensor in found.items()}
    return plain if len(plain) == len(found) else found


def _load(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UsageError(f"there is no file {path}", do="see the names after --weights") from None
    except Exception as error:
        reason = str(error).partition("\n")[0]
        if "weights_only" in str(error) or "Unsupported" in str(error) or "GLOBAL" in str(error):
            raise UsageError(
                f"{path} holds more than tensors and plain values, and loading it would run code that is in it",
                do="save the weights alone: torch.save(model.state_dict(), path)",
            ) from error
        kind = "" if isinstance(error, SafetensorError) else f"{type(error).__name__}: "
        raise UsageError(
            f"{path} cannot be read: {kind}{reason}", do="see that it is a whole file of weights"
        ) from error


def _model(tree: Any) -> Any:
    """The part of a checkpoint that holds the model's weights; all of it, if nothing is known by its name."""
    if isinstance(tree, Mapping) and not any(isinstance(value, Tensor) for value in tree.values()):
        for key in _MODEL_KEYS:
            if isinstance(tree.get(key), Mapping):
                return _model(tree[key])
    return tree


def _named(tree: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield path or "tensor", tree
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            # A name of a state_dict has dots of its own.
            yield from _named(value, f"{path}.{key}".lstrip(".") if isinstance(key, str) else join_path(path, key))
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _named(value, f"{path}[{number}]")


def _unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS) or name


def compare(mine: Mapping[str, Tensor], theirs: Mapping[str, Tensor], tolerance: float) -> dict[str, Any]:
    """What differs, in the order of `mine`.

    Floating-point tensors are equal where the largest difference is at most `tolerance` times the largest value of
    either; others only with the same values. A NaN equals a NaN in the same place, and is told.
    """
    both = [name for name in mine if name in theirs]
    looked = [(name, _difference(mine[name], theirs[name], tolerance)) for name in both]
    differing = [{"name": name, **found} for name, found in looked if found["differs"]]
    largest = max((found["relative"] for _, found in looked if found["relative"] is not None), default=0.0)
    return {
        "compared": len(both),
        "differ": len(differing),
        "first": differing[0] if differing else None,
        "differing": differing[:_SHOWN],
        "missing": [name for name in mine if name not in theirs],
        "extra": [name for name in theirs if name not in mine],
        "nan": [name for name, found in looked if found["nan"]],
        "largest": largest,
    }


def _difference(a: Tensor, b: Tensor, tolerance: float) -> dict[str, Any]:
    said: dict[str, Any] = {"differs": True, "why": "", "absolute": None, "relative": None, "nan": False}
    if a.shape != b.shape:
        return {**said, "why": f"its shape is {tuple(a.shape)} and {tuple(b.shape)}"}
    exact = not (a.is_floating_point() or a.is_complex())
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    kinds = "" if a.dtype == b.dtype else f"its dtype is {_dtype(a)} and {_dtype(b)}"
    if exact and not kinds:
        equal = torch.equal(a, b)
        absolute = 0.0 if equal or a.dtype == torch.bool else float((a.to(wide) - b.to(wide)).abs().max())
        return {**said, "differs": not equal, "why": "" if equal else "its values differ", "absolute": absolute}
    x, y = _dense(a).to(wide).flatten(), _dense(b).to(wide).flatten()
    nan = x.isnan() | y.isnan()
    said["nan"] = bool(nan.any())
    lone = int((x.isnan() != y.isnan()).sum())
    if lone:
        return {**said, "why": f"{lone} of its values are NaN on one side only"}
    x, y = x[~nan], y[~nan]
    gap = torch.where(x == y, torch.zeros_like(x), x - y).abs()  # where: equal infinities
    absolute = float(gap.max()) if gap.numel() else 0.0
    scale = float(torch.maximum(x.abs(), y.abs()).max()) if gap.numel() else 0.0
    relative = absolute / scale if scale and math.isfinite(scale) else absolute
    differs = bool(kinds) or not relative <= tolerance
    why = kinds or (f"by up to {absolute:.3g}, {relative:.3g} of its largest value" if differs else "")
    return {**said, "differs": differs, "why": why, "absolute": absolute, "relative": relative}


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    return tensor.to_dense() if tensor.layout != torch.strided else tensor


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs=2, type=Path)
    parser.add_argument("--tolerance", type=float, required=True)
    options = parser.parse_args(arguments)
    try:
        mine, theirs = (load_weights(path) for path in options.files)
    except EvenstepError as error:
        print(json.dumps({"error": error.message, "do": error.do}))
        return error.exit_code
    print(json.dumps(compare(mine, theirs, options.tolerance)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
