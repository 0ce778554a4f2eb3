"""Which of the data-parallel processes this one is, by what its launcher has put into the environment.

Launchers run inside each other: srun starts torchrun on each node, and mpirun runs within a batch job. The one that
counts the most processes is the innermost. Two that count equally many must name the same rank, and a rank is 0 only if
something says so, or nothing says that there are others: two processes with the rank of one would share its plan.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final, NamedTuple

from perseus_client.framework import STEP, RankWork, Unsupported
from perseus_core.rank import RankId

LAUNCHERS: Final = (
    ("RANK", "WORLD_SIZE"),  # torchrun, DeepSpeed, Ray Train, Accelerate, PyTorchJob
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", "PMI_SIZE"),  # MPICH, Intel MPI, Cray
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),  # MVAPICH2
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),  # srun
)
"""The variables in which launchers say a process's rank and the number of processes."""
_TORCHRUN: Final = "TORCHELASTIC_RUN_ID"
"""Set by torchrun, which others start, once for each node: its ranks follow the order in which nodes arrive."""
_RANK_ONLY: Final = "PMIX_RANK"
"""Of PMIx, which says no number of processes; it counts where nothing else does."""
_SLURM_STEP: Final = "SLURM_STEP_ID"
"""Set by srun. A batch script has SLURM_PROCID and SLURM_NTASKS too, and is one process."""


class _Said(NamedTuple):
    """What one launcher says."""

    variable: str
    rank: int | None
    size: int | None

    def __str__(self) -> str:
        total = f" of {self.size}" if self.size is not None else ""
        return f"{self.variable} is {'not set' if self.rank is None else self.rank}{total}"


def whole_iterations(rank: RankId | None = None) -> RankWork:
    """What a rank executes whose iterations are marked as a whole, so that all GPUs get one clock.

    Args:
        rank: that it is in its pipeline: others of it may mark their instructions. None: it is not known, so each is a
            pipeline of its own.

    Raises:
        Unsupported: as ``global_rank``.
    """
    return RankWork(RankId(global_rank(os.environ), 0) if rank is None else rank, [STEP])


def global_rank(environment: Mapping[str, str]) -> int:
    """This process's rank: torch's, where it is initialised; else its launcher's.

    Args:
        environment: of the process.

    Raises:
        Unsupported: launchers contradict each other, or there are other processes and nothing says which this is.
    """
    with suppress(Exception):  # nothing may reach the training code
        distributed = sys.modules["torch"].distributed
        if distributed.is_available() and distributed.is_initialized():
            return int(distributed.get_rank())
    return launched_rank(environment)


def launched_rank(environment: Mapping[str, str]) -> int:
    """The rank by the environment alone; raises as ``global_rank`` does."""
    launchers = LAUNCHERS[:1] if _TORCHRUN in environment else LAUNCHERS
    said = [launcher for names in launchers if (launcher := _said(environment, *names)) is not None]
    if not said:
        rank = _number(environment, _RANK_ONLY)
        return 0 if rank is None else rank
    most = max(launcher.size or 0 for launcher in said)
    inner = [
        launcher
        for launcher in said
        if (launcher.size or 0) == most or (launcher.size is None and launcher.variable == "RANK")
    ]
    named = [launcher for launcher in inner if launcher.rank is not None]
    for other in named[1:]:
        if other.rank != named[0].rank:
            raise Unsupported(f"its rank is not known: {named[0]}, but {other}; pass rank= or unset one of them")
    if not named or named[0].rank is None:
        raise Unsupported(f"its rank is not known: {inner[0]}; pass rank=")
    return named[0].rank


def _said(environment: Mapping[str, str], rank_name: str, size_name: str) -> _Said | None:
    """What a launcher says; None: it has not started this process."""
    if rank_name == "SLURM_PROCID" and _SLURM_STEP not in environment:
        return None
    rank, size = _number(environment, rank_name), _number(environment, size_name)
    if rank is None and (size is None or size <= 1):
        return None
    if rank is not None and size is not None and rank >= size:
        raise Unsupported(f"its rank is not known: {rank_name} is {rank}, but {size_name} is {size}; pass rank=")
    return _Said(rank_name, rank, size)


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise Unsupported(f"its rank is not known: {name} is {text[:40]!r}, which is no number; pass rank=")
    return int(text)
