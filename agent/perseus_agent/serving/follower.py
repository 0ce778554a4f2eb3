"""What one GPU of a serving engine follows: the choice that all GPUs of the instance share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from perseus_agent.clocks.follower import Finished, Follower
from perseus_agent.clocks.gpu_worker import GpuWorker
from perseus_agent.clocks.lead import Lead
from perseus_agent.clocks.plans import StagePlan
from perseus_agent.serving.instance import EngineInstance

SAMPLE_S: Final = 0.09
"""How often energy and clock are read: beside each look, which comes a little later. Windows are ten times as long, and
counters tick about as often."""


class EngineFollower(Follower):
    """One GPU's part of an instance. Only that GPU's thread calls it."""

    def __init__(self, instance: EngineInstance, worker: GpuWorker) -> None:
        self.next_look_us = 0
        self.due = False
        self.sample_s, self.urgent = SAMPLE_S, False
        self._instance = instance
        self._worker = worker

    @property
    def job_uid(self) -> str:
        """Of the engine's job."""
        return self._instance.engine.job_uid

    @property
    def bell(self) -> int:
        """The eventfd that the engine rings, which wakes the threads of all its GPUs."""
        return self._instance.bell

    @property
    def plan(self) -> StagePlan | None:
        """Engines have no plan."""
        return None

    def look(self, writes: int, now_us: int, lead: Lead) -> int | None:  # noqa: ARG002 - a follower's arguments
        """Return the instance's clock, MHz; None: the default clocks, or that of the lease in their place."""
        worker, instance = self._worker, self._instance
        governor = worker.governor
        effects = governor.latency.effects
        effective_us = effects[-1].time_us if effects else 0
        applied_mhz, resting_mhz = governor.applied or 0, governor.resting_mhz or 0
        choice = instance.look(worker.uuid, applied_mhz, now_us, effective_us, resting_mhz=resting_mhz)
        instance.measure(worker.uuid, worker.meter, worker.clocks, now_us)
        self.next_look_us, self.urgent = instance.next_us, choice.urgent
        return choice.clock_mhz or None

    def selection_changed(self) -> None:
        """Nothing: the instance has its orders already."""

    def collect_part(self, writes: int, now_us: int | None = None) -> tuple[Sequence[Finished], bool]:  # noqa: ARG002
        """Engines have no iterations."""
        return (), False

    def leave(self, writes: int, now_us: int | None = None) -> Sequence[Finished]:  # noqa: ARG002
        """Engines have no iterations."""
        return ()
