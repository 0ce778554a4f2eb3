"""What is known of a PerseusJob or ServingPool, whatever its family: what it asks for, its pods and nodes, who commands
it, its watts.

Fields are read everywhere and changed only by the named methods below, one for each event; ``JobNodes``, ``Node`` and
``JobEnd`` do the same for their part. Nothing here does I/O, reads a clock or decides what to do. What only one family
knows is in that family's own folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from perseus_core.units import j_from_mj, s_from_us
from perseus_operator.api.conditions import Explanation
from perseus_operator.api.job import WorkSpec
from perseus_operator.api.power_status import DrawStatus
from perseus_operator.budgets.allocation import Share
from perseus_operator.budgets.reading import Reading
from perseus_operator.jobs.lifecycle import JobEnd
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.nodes.workloads import Selection
from perseus_operator.objects.values import JobRef, Pod


@dataclass
class Job:
    """One PerseusJob or ServingPool. A ``*_fault`` is None while there is none."""

    ref: JobRef
    generation: int = 0
    stated_spec: WorkSpec | None = None
    """The last accepted one."""
    spec: WorkSpec | None = None
    """The same with what it leaves out: its profile, and its shape once that is known."""
    spec_fault: Explanation | None = None
    name_taken: bool = False
    """A PerseusJob has the name of this ServingPool, and its pods."""
    energy_class: str = ""
    """EnergyClass that the PerseusJob is labelled with; empty: none. A tenant may write that."""
    nodes: JobNodes = field(default_factory=JobNodes)
    attempt: str = ""
    """Which attempt of the workload the pods belong to; empty: not known."""
    excluded_pods: Mapping[str, int] = field(default_factory=dict)
    """Why pods that opted in do not belong to the job, and how many."""
    let_alone: int = 0
    """Pods that run while the job is suspended."""
    failed_pod: Pod | None = None
    """The youngest that opted in and failed."""
    taken_pods: tuple[str, int] | None = None
    """The PerseusJob that pods of its workload name instead, and how many do; None: none."""
    end: JobEnd = field(default_factory=JobEnd)
    share: Share | None = None
    """Of a PowerBudget; None: no budget selects the job."""
    draw: DrawStatus | None = None
    """What another replica must know to share a PowerBudget with the job; None: no other one shares any."""
    reading: Reading = Reading()  # noqa: RUF009  # it is frozen
    """What this operator has measured of its energy."""
    fenced: Explanation | None = None
    raised_epoch: int = 0
    """Drawn for this job, because an agent had seen the operator's or a higher one; 0: none was."""

    def generation_observed(self, generation: int) -> None:
        """The PerseusJob was observed at this generation."""
        self.generation = generation

    def class_observed(self, energy_class: str) -> None:
        """The PerseusJob is labelled with this EnergyClass; empty: with none."""
        self.energy_class = energy_class

    def spec_accepted(self, stated: WorkSpec, completed: WorkSpec) -> None:
        """A valid spec replaces the one before.

        Args:
            stated: as it was written.
            completed: with what it leaves out, as far as that is known.
        """
        self.stated_spec, self.spec, self.spec_fault = stated, completed, None

    def spec_rejected(self, fault: Explanation) -> None:
        """The spec breaks a rule; the last accepted one stays in force."""
        self.spec_fault = fault

    def name_observed(self, *, taken: bool) -> None:
        """Whether another object of this name has the pods that opted in to it."""
        self.name_taken = taken

    def pods_observed(self, chosen: Selection, agents: Mapping[str, str], *, wall_s: float) -> bool:
        """Pods and agents are these now. Nodes without pods stay until their lease is given back.

        Args:
            chosen: the pods of the job.
            agents: host:port of the agent, by node.
            wall_s: when they were observed.

        Returns:
            Whether another attempt has begun, which starts again at iteration 0.
        """
        self.excluded_pods, self.failed_pod, self.let_alone = chosen.excluded, chosen.failed, chosen.let_alone
        if chosen.pods:
            self.taken_pods = None
        again = bool(chosen.attempt and self.attempt and chosen.attempt != self.attempt)
        self.attempt = chosen.attempt or self.attempt
        self.end.pods_observed(running=bool(chosen.pods), finished_at_s=wall_s if chosen.finished else None)
        self.nodes.pods_observed(chosen.pods, agents)
        return again

    def taken_pods_observed(self, taken: tuple[str, int] | None) -> None:
        """Pods of its workload name this PerseusJob instead, and so many do; None: none."""
        self.taken_pods = taken

    def draw_published(self, draw: DrawStatus | None) -> None:
        """The status is to say what the job draws; None: no other replica needs to know."""
        self.draw = draw

    def share_granted(self, share: Share | None) -> None:
        """A PowerBudget grants the job this share; None: no budget selects it."""
        self.share = share

    def energy_reported(self, energy_mj: int | None, gpu_us: int) -> None:
        """Agents report the energy of some GPUs over some time.

        Args:
            energy_mj: None: it was not measured.
            gpu_us: microseconds, of all these GPUs together.
        """
        if energy_mj is not None:
            self.reading = self.reading.plus(j_from_mj(energy_mj), s_from_us(gpu_us))

    def fenced_by(self, fault: Explanation) -> None:
        """A newer operator commands the job: this one must not."""
        self.fenced = fault

    def epoch_raised(self, epoch: int) -> None:
        """The counter of epochs was lost: the job goes on under this one."""
        self.raised_epoch = epoch
