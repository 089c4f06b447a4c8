"""One message through the MPI library of the mpirun that started this process.

Processes on several hosts that were told no address have nothing else in common. The library is called through its C
interface, so that neither a build of torch with MPI nor mpi4py is needed; a program that uses mpi4py imports it first.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from evenstep.errors import MachineError, UsageError

_OPEN_MPI = ("libmpi.so.40", "libmpi.so")
# MPICH's own name, Debian's, and those of other libraries with its ABI (Intel MPI has MPICH's own).
_MPICH = ("libmpi.so.12", "libmpich.so.12", "libmpi_cray.so.12", "libmpi.so")
_MPICH_COMM_WORLD, _MPICH_BYTE = 0x44000000, 0x4C00010D  # fixed by the MPICH ABI
_LONGEST = 4096  # bytes of a message
_BY_HAND = "or set MASTER_ADDR and MASTER_PORT, the same on every process (mpirun -x, -genv)"


def from_rank_0(say: Callable[[], bytes], rank: int, world_size: int) -> bytes:
    """What `say` returns on rank 0, on every process of this mpirun. All of them must call.

    UsageError where there is no MPI library, or one that did not start these processes.
    """
    is_open = "OMPI_COMM_WORLD_RANK" in os.environ
    library = _load(_OPEN_MPI if is_open else _MPICH)
    world, byte = _handles(library, is_open)
    if _is(library.MPI_Finalized):
        raise UsageError("MPI was finalized before evenstep.start()", do=f"finalize it later, {_BY_HAND}")
    ours = not _is(library.MPI_Initialized)
    if ours:
        _check(library.MPI_Init(None, None), "MPI_Init")
    try:
        size = ctypes.c_int()
        _check(library.MPI_Comm_size(world, ctypes.byref(size)), "MPI_Comm_size")
        if size.value != world_size:
            raise UsageError(
                f"{library._name} is not the MPI library of this mpirun: it knows of {size.value} of {world_size} "
                "processes",
                do=f"put that of mpirun on LD_LIBRARY_PATH (module load ...), {_BY_HAND}",
            )
        message = ctypes.create_string_buffer(_LONGEST)
        if rank == 0:
            message.value = say()
        _check(library.MPI_Bcast(message, _LONGEST, byte, 0, world), "MPI_Bcast")
        return message.value
    finally:
        if ours:
            library.MPI_Finalize()


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    for name in names:
        with suppress(OSError):
            return ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)  # its plugins look for its symbols
    raise UsageError(
        f"the processes of this mpirun are on several hosts, and there is no MPI library ({', '.join(names)}) to ask "
        "where rank 0 is",
        do=f"put that of mpirun on LD_LIBRARY_PATH (module load ...), {_BY_HAND}",
    )


def _handles(library: ctypes.CDLL, is_open: bool) -> tuple[Any, Any]:
    """MPI_COMM_WORLD and MPI_BYTE."""
    if not is_open:
        return ctypes.c_int(_MPICH_COMM_WORLD), ctypes.c_int(_MPICH_BYTE)
    try:
        world, byte = (ctypes.c_char.in_dll(library, name) for name in ("ompi_mpi_comm_world", "ompi_mpi_byte"))
    except ValueError:
        raise UsageError(
            f"{library._name} is not Open MPI's library, and Open MPI started this process",
            do=f"put Open MPI's library on LD_LIBRARY_PATH (module load ...), {_BY_HAND}",
        ) from None
    return ctypes.c_void_p(ctypes.addressof(world)), ctypes.c_void_p(ctypes.addressof(byte))


def _is(question: Any) -> bool:
    answer = ctypes.c_int()
    _check(question(ctypes.byref(answer)), question.__name__)
    return bool(answer.value)


def _check(code: int, call: str) -> None:
    if code != 0:
        raise MachineError(f"{call} failed with code {code}", do=f"see that MPI programs run here, {_BY_HAND}")
