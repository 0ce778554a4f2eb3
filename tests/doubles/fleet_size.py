"""Fleets by size: how many jobs of which shape, each stage on a node of its own with eight tensor-parallel GPUs.

Or several jobs share their nodes, and the eight GPUs of each: then a stage has as many fewer of them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

MICROBATCHES: Final = 16
BLOCKING_W: Final = 83.64
GPUS: Final = 8
"""Of a node."""


@dataclass(frozen=True)
class PlacedJob:
    """A job, and the first of its nodes: it has them in a row."""

    name: str
    stages: int
    pipelines: int
    first: int
    sharing: int = 1
    """How many jobs share these nodes, this one included."""

    @property
    def tensor_parallel(self) -> int:
        """GPUs of a stage."""
        return GPUS // self.sharing

    @property
    def nodes(self) -> int:
        """One for each stage of each pipeline."""
        return self.stages * self.pipelines

    @property
    def uid(self) -> str:
        """Of its PerseusJob: random enough to spread over shards, and the same each time."""
        return str(uuid.uuid5(uuid.NAMESPACE_DNS, self.name))


@dataclass(frozen=True)
class FleetSize:
    """Jobs in the order of their nodes."""

    jobs: tuple[PlacedJob, ...]

    @classmethod
    def of(cls, text: str) -> FleetSize:
        """Parse ``1x8x512,1999x2x2``: one job of 8 stages and 512 pipelines, and 1,999 of 2 and 2.

        ``800x1x1x8``: 800 jobs of one stage, of which eight share each node.
        """
        jobs: list[PlacedJob] = []
        first = 0
        for part in text.split(","):
            count, stages, pipelines, *shared = (int(number) for number in part.split("x"))
            sharing = shared[0] if shared else 1
            for number in range(count):
                jobs.append(PlacedJob(f"job-{len(jobs)}", stages, pipelines, first, sharing))
                if (number + 1) % sharing == 0:
                    first += jobs[-1].nodes
        return cls(tuple(jobs))

    @property
    def nodes(self) -> int:
        """Of all jobs."""
        return max(job.first + job.nodes for job in self.jobs)
