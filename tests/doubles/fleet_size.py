"""Fleets by size: how many jobs of which shape, each stage on a node of its own with eight tensor-parallel GPUs."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Final

MICROBATCHES: Final = 16
BLOCKING_W: Final = 83.64


@dataclass(frozen=True)
class PlacedJob:
    """A job, and the first of its nodes: it has them in a row."""

    name: str
    stages: int
    pipelines: int
    first: int

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
        """Parse ``1x8x512,1999x2x2``: one job of 8 stages and 512 pipelines, and 1,999 of 2 and 2."""
        jobs: list[PlacedJob] = []
        for part in text.split(","):
            count, stages, pipelines = (int(number) for number in part.split("x"))
            for _ in range(count):
                first = jobs[-1].first + jobs[-1].nodes if jobs else 0
                jobs.append(PlacedJob(f"job-{len(jobs)}", stages, pipelines, first))
        return cls(tuple(jobs))

    @property
    def nodes(self) -> int:
        """Of all jobs."""
        return sum(job.nodes for job in self.jobs)
