"""What a pipeline runs on, and what is measured of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from perseus_sim.gpus.switching import DriverModel
from perseus_sim.training.hosts import Hosts


@dataclass(frozen=True)
class Machine:
    """What a pipeline runs on.

    Attributes:
        driver: the GPUs' driver; None: no change of a clock takes time.
        hosts: None: hosts are never late and never wait.
        gpus: of each rank, one tensor-parallel group on a node: they change clocks together, share the driver's lock,
            and compute as fast as the slowest of them. Energies are the mean of one GPU.
        noise: standard deviation of the logarithm of durations.
        seed: of every draw.
    """

    driver: DriverModel | None = None
    hosts: Hosts | None = None
    gpus: int = 1
    noise: float = 0.0
    seed: int = 0


@dataclass
class Outcome:
    """What was measured, per iteration.

    Attributes:
        time_s: from the end of the iteration before to its own end, seconds.
        energy_j: of all GPUs, joules.
        changes: calls to the driver, per GPU.
        astray: share of computing time in which a GPU has a clock other than planned.
        late: share of computing time in which a GPU has a clock below the planned one.
        limited: share of computing time in which the power limit holds a GPU below its clock.
        lead_s: mean time from the host's begin of an instruction to the GPU's, seconds.
    """

    time_s: list[float] = field(default_factory=list)
    energy_j: list[float] = field(default_factory=list)
    changes: list[float] = field(default_factory=list)
    astray: list[float] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    limited: list[float] = field(default_factory=list)
    lead_s: list[float] = field(default_factory=list)
