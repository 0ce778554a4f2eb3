"""Real training processes as pods of a simulated cluster: started, placed on simulated GPUs, and measured.

Like ``perseus_sim.training.job``, but the ranks run any command, with the interpreter in which the training frameworks
are installed, on ``perseus_sim.training.live``. They get the environment that torchrun would give them, and
PERSEUS_SOCKET as the chart would. Figures come from the ranks' logs and GPUs, not from the agent.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perseus_core import keys
from perseus_core.rank import RankId
from perseus_core.units import s_from_us
from perseus_sim.cluster.simulated_cluster import SimulatedCluster, SimulatedNode
from perseus_sim.gpus.kubelet import AdmittedPod
from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.processes import Child, free_port
from perseus_sim.training.live import LiveSpec, Tables


@dataclass(frozen=True)
class LiveIteration:
    """One iteration of a pipeline, from its GPUs' own counters, until the next began."""

    time_s: float
    energy_j: float


@dataclass
class LiveJob:
    """The processes of a job that trains, with their GPUs and logs."""

    name: str
    pods: list[AdmittedPod]
    children: dict[RankId, Child]
    gpus: dict[RankId, SharedGpu]
    logs: dict[RankId, Path]

    def executed(self, rank: RankId) -> list[dict[str, Any]]:
        """The iterations that a rank has ended, as ``perseus_sim.training.live`` logs them."""
        log = self.logs[rank]
        text = log.read_text() if log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def iterations(self, dp: int) -> list[LiveIteration]:
        """All complete iterations of a pipeline."""
        ranks = [self.executed(rank) for rank in self.logs if rank.dp == dp]
        iterations = []
        for k in range(min(map(len, ranks)) - 1):
            iterations.append(
                LiveIteration(
                    time_s=s_from_us(max(rank[k + 1]["begin_us"] - rank[k]["begin_us"] for rank in ranks)),
                    energy_j=sum(rank[k + 1]["energy_uj"] - rank[k]["energy_uj"] for rank in ranks) / 1e6,
                )
            )
        return iterations

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, if a rank has failed."""
        for rank, child in self.children.items():
            if child.popen.poll() not in (None, 0):
                raise RuntimeError(f"rank {rank} ended with code {child.popen.returncode}:\n{child.tail(40)}")

    def stop(self) -> None:
        """End all ranks, as a deleted pod would."""
        for child in self.children.values():
            child.stop()


def start_live_job(
    cluster: SimulatedCluster,
    node: SimulatedNode,
    name: str,
    command: Sequence[str],
    tables: Sequence[Tables],
    *,
    python: Path,
    pipelines: int = 1,
    await_agent: bool = False,
    environment: dict[str, str] | None = None,
) -> LiveJob:
    """Start a job: one pod for each pipeline, one process and one GPU for each stage.

    Args:
        cluster: must be running.
        node: must hold enough free GPUs.
        name: of the PerseusJob that the pods opt in to, and of the pods.
        command: script and arguments.
        tables: of each stage.
        python: interpreter that has the frameworks.
        pipelines: data-parallel size; global rank = dp × stages + stage.
        await_agent: see ``LiveSpec``.
        environment: further variables.

    Raises:
        ValueError: the node has too few free GPUs.
    """
    stages = len(tables)
    free = [gpu for gpu in node.gpus if gpu.spec.uuid not in node.allocated][: stages * pipelines]
    if len(free) < stages * pipelines:
        raise ValueError(f"{node.name} has {len(free)} free GPUs, the job needs {stages * pipelines}")
    node.allocated |= {gpu.spec.uuid for gpu in free}
    folder = cluster.folder / name
    folder.mkdir()
    job = LiveJob(name, [], {}, {}, {})
    port = free_port()
    for dp in range(pipelines):
        gpus = free[dp * stages : (dp + 1) * stages]
        labels = {"app": name, keys.LABEL_JOB: name}
        pod_name = f"{name}-{dp}"
        uid = cluster.run_pod("default", pod_name, node.name, labels, [])
        pod = AdmittedPod(uid, "default", pod_name, tuple(gpu.spec.uuid for gpu in gpus))
        node.kubelet.admit(pod)
        job.pods.append(pod)
        for stage, gpu in enumerate(gpus):
            rank_id, rank = RankId(dp, stage), dp * stages + stage
            job.gpus[rank_id], job.logs[rank_id] = gpu, folder / f"rank-{rank}.jsonl"
            live = LiveSpec(str(gpu.path), str(job.logs[rank_id]), tables[stage], await_agent)
            spec = live.write(folder / f"rank-{rank}.json")
            job.children[rank_id] = cluster.processes.start(
                f"{name}-{rank}",
                [str(python), "-m", "perseus_sim.training.live", str(spec), *command],
                environment={
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(stages * pipelines),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    keys.ENV_SOCKET: str(node.socket),
                    **(environment or {}),
                },
            )
        node.kubelet.place([job.children[RankId(dp, stage)].pid for stage in range(stages)], uid)
    return job
