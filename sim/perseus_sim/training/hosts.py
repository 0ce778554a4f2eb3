"""Hosts that launch kernels ahead of the GPU: how far, and where their framework makes them wait for it.

Sources: the launch queue of about 1,024 kernels and 5 to 10 µs a launch are public measurements. Megatron-LM's 1F1B
synchronises the device after each batch of P2P operations (``batch_p2p_sync``), so before every instruction that
receives or follows a send. Its optimizer reads a scalar, so does DeepSpeed's throughput timer synchronise at each step.
PyTorch's schedules and DeepSpeed's engine only let the stream wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from perseus_core.instruction import InstructionKind
from perseus_solver.model.problem import Problem


class Framework(StrEnum):
    """Where a host waits for its GPU."""

    PYTORCH = "pytorch"
    """Nowhere: the launch queue alone bounds the host's lead."""
    MEGATRON = "megatron"
    """After each batch of P2P operations, and at the end of a step."""
    DEEPSPEED = "deepspeed"
    """At the end of a step."""


_FORWARD_SHARE: Final = {
    InstructionKind.FORWARD: (1.0, 0.0),
    InstructionKind.BACKWARD: (0.0, 1.0),
    InstructionKind.INPUT_GRADIENT: (0.0, 0.5),
    InstructionKind.WEIGHT_GRADIENT: (0.0, 0.5),
    InstructionKind.CONSTANT: (0.0, 0.0),
    InstructionKind.STEP: (1.0, 1.0),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job.

    Attributes:
        framework: where they wait.
        launch_s: seconds to launch a kernel.
        queue: launches that fit before the host must wait for a kernel to end.
        forward_kernels, backward_kernels: kernels of an instruction.
        waits_at_step_end: None: as the framework does.
    """

    framework: Framework = Framework.PYTORCH
    launch_s: float = 1e-5
    queue: int = 1_024
    forward_kernels: int = 300
    backward_kernels: int = 600
    waits_at_step_end: bool | None = None

    @property
    def step_waits(self) -> bool:
        """Whether the next step begins on the host when this one has ended on the GPU."""
        if self.waits_at_step_end is not None:
            return self.waits_at_step_end
        return self.framework is not Framework.PYTORCH

    def kernels(self, problem: Problem) -> list[int]:
        """Kernels of each instruction."""
        of_kind = {
            int(kind): max(1, round(forward * self.forward_kernels + backward * self.backward_kernels))
            for kind, (forward, backward) in _FORWARD_SHARE.items()
        }
        return [of_kind[kind] for kind in problem.schedule.kind.tolist()]

    def waits(self, problem: Problem) -> list[bool]:
        """Before which instructions the host waits until the GPU could begin them."""
        waits = [False] * problem.instructions
        if self.framework is Framework.MEGATRON:
            stage = problem.schedule.stage
            for before, after in zip(problem.edge_from.tolist(), problem.edge_to.tolist(), strict=True):
                if stage[before] != stage[after]:
                    waits[after] = True
                    follows = before + 1
                    if follows < problem.instructions and stage[follows] == stage[before]:
                        waits[follows] = True
        return waits
