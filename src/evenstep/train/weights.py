"""The trained model as one file that plain PyTorch loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from evenstep.record.publish import whole_path
from evenstep.train.gather import meet, on_rank_0
from evenstep.train.meeting import Meeting
from evenstep.train.tensor_file import Entry, in_file_order, is_kept, raw_parts, write_tensors


def save_model(path: Path, states: Mapping[str, Mapping[str, Any]], meeting: Meeting | None = None) -> list[str]:
    """Publish the parameters and buffers in the state_dicts of models as one safetensors file.

    One model's names have no prefix, several models' the model's name: `generator.conv.weight`. Tied weights are
    written under each of their names, so that load_state_dict(strict=True) takes the file. Returns the names of what
    is left out, for the caller to say: what is no tensor, and tensors of dtypes that not every version of safetensors
    keeps (complex numbers; as pairs of real ones no plain module would load them). MachineError if the disk does not
    take the file.

    With `meeting`, processes have parts of the tensors: all call it, and rank 0 writes.
    """
    tensors: dict[str, Tensor] = {}
    left_out = []
    for model_name, state in states.items():
        for key, value in state.items():
            name = key.replace("_orig_mod.", "")  # torch.compile's
            name = name if len(states) == 1 else f"{model_name}.{name}"
            if isinstance(value, Tensor) and is_kept(value.dtype):
                tensors[name] = value
            else:
                left_out.append(name)

    entries = {name: Entry.of(tensor) for name, tensor in tensors.items()}

    def write(data: Iterator[memoryview]) -> None:
        with whole_path(path) as beside:
            write_tensors(beside, entries, data, {"format": "pt"})

    if meeting is None:
        write(part for name in in_file_order(entries) for part in raw_parts(tensors[name]))
    else:
        _, gather = meet(meeting, "the model's file", b"null", tensors)
        on_rank_0(meeting, gather.data(tensors), write)
    return left_out
