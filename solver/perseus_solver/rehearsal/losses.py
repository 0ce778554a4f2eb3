"""Why a plan takes longer than it says: the causes, each with its figure and one sentence.

A cause counts by how long it is, measured against the instructions: clocks that are wrong for a fifth of an instruction
cost little, for a whole instruction they undo the plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from perseus_core.hardware import Hardware
from perseus_core.marks import MarkSource

_MATTERS = 0.2
"""Share of an instruction from which a cause is named; below it, a timetable costs less than 0.1 % of time."""
_MATTERS_NOISE = 0.02
"""Relative scatter of instructions to be named: three times it is what a profile's guard band takes."""


class LossCause(StrEnum):
    """Why a plan takes longer than it says.

    Attributes:
        MARKS_LEAD: the host marks instructions before the GPU runs them.
        SLOW_CHANGES: a new clock takes long to be in effect.
        DRIVER_LOCK: calls of GPUs that share a driver's lock wait for each other.
        SCATTER: instructions take different times in different iterations.
    """

    MARKS_LEAD = "MarksLead"
    SLOW_CHANGES = "SlowChanges"
    DRIVER_LOCK = "DriverLock"
    SCATTER = "Scatter"


@dataclass(frozen=True, slots=True)
class Loss:
    """One cause.

    Attributes:
        cause: which.
        seconds: how long marks lead, changes take, or calls wait; None where the cause is a share.
        share: relative scatter; None where the cause is a time.
        weight: how much it matters; causes are compared by it.
    """

    cause: LossCause
    seconds: float | None
    share: float | None
    weight: float

    def __str__(self) -> str:
        """Return the cause in words, such as ``clock changes take 60 ms``."""
        time = f"{1e3 * (self.seconds or 0.0):.3g} ms"
        return {
            LossCause.MARKS_LEAD: f"marks lead by {time}",
            LossCause.SLOW_CHANGES: f"clock changes take {time}",
            LossCause.DRIVER_LOCK: f"clock changes wait {time} for the node's driver lock",
            LossCause.SCATTER: f"instructions scatter by {100 * (self.share or 0.0):.2g} %",
        }[self.cause]


def explain_losses(hardware: Hardware, *, instruction_s: float) -> tuple[Loss, ...]:
    """Return what makes plans take longer than they say on this hardware, the most important cause first.

    Args:
        hardware: as measured or assumed.
        instruction_s: duration of a typical instruction, seconds.

    Returns:
        The causes that matter; empty if none does.
    """
    latency, ahead = hardware.latency, hardware.marks is MarkSource.HOST
    # As much as the launch queue holds.
    lead_s = hardware.launch_queue / max(hardware.kernels.values()) * instruction_s if ahead else 0.0
    wait_s = (hardware.gpus_per_lock - 1) * latency.call_s
    losses = [
        Loss(LossCause.MARKS_LEAD, lead_s, None, lead_s / instruction_s / _MATTERS),
        # What is beyond the median is not known ahead, so the scatter counts, and a tenth of what is.
        Loss(
            LossCause.SLOW_CHANGES,
            latency.p50_s,
            None,
            max(latency.deviation_s, latency.p50_s / 10) / instruction_s / _MATTERS,
        ),
        Loss(LossCause.DRIVER_LOCK, wait_s, None, wait_s / instruction_s / _MATTERS),
        Loss(LossCause.SCATTER, None, hardware.noise, hardware.noise / _MATTERS_NOISE),
    ]
    return tuple(sorted((loss for loss in losses if loss.weight >= 1.0), key=lambda loss: -loss.weight))
