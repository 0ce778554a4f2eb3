"""Ranks by launchers: the innermost names them, and what is not known is refused."""

from __future__ import annotations

import re

import pytest

from perseus_client.framework import Unsupported
from perseus_client.launchers import LAUNCHERS, launched_rank

OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}
BATCH = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "7"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "PMIX_RANK": "1"}


@pytest.mark.parametrize(("rank", "size"), LAUNCHERS)
def test_each_launcher_is_known(rank: str, size: str) -> None:
    """Source: kubeflow/mpi-operator issue 439, horovod/horovod issue 307, Lightning-AI/pytorch-lightning issue 6797."""
    step = {"SLURM_STEP_ID": "0"}
    assert launched_rank({**step, rank: "3", size: "8"}) == 3
    assert launched_rank({**step, rank: " 3 "}) == 3
    assert launched_rank({**step, rank: "0", size: "1"}) == 0
    with pytest.raises(Unsupported, match=f"{rank} is 8, but {size} is 8; pass rank="):
        launched_rank({**step, rank: "8", size: "8"})
    with pytest.raises(Unsupported, match=f"{rank} is not set of 8; pass rank="):
        launched_rank({**step, size: "8"})
    for odd in ("-1", "x", "1.5", "²", "0x1"):
        with pytest.raises(Unsupported, match=re.escape(f"{rank} is {odd!r}, which is no number; pass rank=")):
            launched_rank({**step, rank: odd, size: "8"})


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, 0),
        ({"PMIX_RANK": "3"}, 3),
        (BATCH, 0),
        ({**BATCH, **OPEN_MPI}, 3),
        ({**BATCH, **STEP}, 1),
        ({**BATCH, **STEP, "RANK": "5", "WORLD_SIZE": "16"}, 5),
        ({**STEP, "RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, 0),
        ({**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "1"}, 3),
        ({**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "8"}, 3),
        ({**OPEN_MPI, "PMIX_RANK": "3", "RANK": "3"}, 3),
        ({**OPEN_MPI, "WORLD_SIZE": "8"}, 3),
        ({"WORLD_SIZE": "1"}, 0),
    ],
    ids=[
        "alone",
        "pmix",
        "batch",
        "mpirun-in-batch",
        "srun",
        "torchrun-in-srun",
        "one-gpu-a-node",
        "mpi-in-pod",
        "agree",
        "no-size",
        "no-rank",
        "1",
    ],
)
def test_the_innermost_launcher_is_right(environment: dict[str, str], rank: int) -> None:
    """Source: LambdaLabsML/distributed-training-guide issue 59 and Lightning-AI/pytorch-lightning pull request 11406:
    launchers inside each other; pytorch/pytorch issue 137402: torchrun's order of nodes is not srun's.
    """
    assert launched_rank(environment) == rank


@pytest.mark.parametrize(
    "environment",
    [
        {**OPEN_MPI, "RANK": "0"},
        {**OPEN_MPI, "RANK": "0", "WORLD_SIZE": "8"},
        {**OPEN_MPI, "PMI_RANK": "2", "PMI_SIZE": "8"},
        {**OPEN_MPI, "WORLD_SIZE": "16"},
    ],
)
def test_contradictions_are_refused(environment: dict[str, str]) -> None:
    with pytest.raises(Unsupported, match=r"its rank is not known: .*pass rank="):
        launched_rank(environment)
