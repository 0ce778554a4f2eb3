"""The stragglers of a job, declared and detected.

Fields are read everywhere and changed only here, by one named method for each event: declarations are observed or
rejected, the training starts again. The detector changes with each iteration.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from perseus_operator.api.conditions import Explanation
from perseus_operator.api.job import JobSpec, StragglerMode
from perseus_operator.families.training.features.stragglers.annotation import Declaration
from perseus_operator.families.training.features.stragglers.declared import DeclaredStraggler, declared_slowdowns
from perseus_operator.families.training.features.stragglers.detector import StragglerDetector
from perseus_operator.nodes.job_nodes import JobNodes


@dataclass
class StragglerProgress:
    """What is declared and what telemetry shows. ``fault`` is None while there is none."""

    declared: tuple[DeclaredStraggler, ...] = ()
    fault: Explanation | None = None
    """Why the annotation that declares them breaks a rule."""
    detector: StragglerDetector = field(default_factory=StragglerDetector)

    def declarations_observed(self, declarations: Iterable[Declaration], *, now_s: float) -> None:
        """The annotation declares these stragglers. Editing one entry does not restart the delay of another.

        Args:
            declarations: all entries of the annotation.
            now_s: monotonic; the delay of a new entry counts from here.
        """
        before = {straggler.declaration: straggler for straggler in self.declared}
        self.declared = tuple(before.get(entry, DeclaredStraggler(entry, now_s)) for entry in declarations)
        self.fault = None

    def declarations_rejected(self, fault: Explanation) -> None:
        """The annotation breaks a rule; what it declared before stays in force."""
        self.fault = fault

    def restarted(self) -> None:
        """The training starts again: iterations before say nothing about it."""
        self.detector = StragglerDetector()


@dataclass(frozen=True)
class Stragglers:
    """Stragglers that count: their slowdowns by dp, which of them are declared, and when the next one takes effect."""

    slowdowns: Mapping[int, float] = field(default_factory=dict)
    declared: frozenset[int] = frozenset()
    wake_at_s: float = math.inf
    """Monotonic; infinite: none is to come."""


def counting(progress: StragglerProgress, spec: JobSpec, nodes: JobNodes, *, now_s: float) -> Stragglers:
    """Stragglers that count. Where one is both declared and detected, the larger slowdown does.

    Args:
        progress: of the job.
        spec: of the job.
        nodes: of the job.
        now_s: monotonic.
    """
    wake_at_s = min((each.from_s for each in progress.declared if each.from_s > now_s), default=math.inf)
    if spec.straggler.mode is StragglerMode.IGNORE:
        return Stragglers(wake_at_s=wake_at_s)
    declared = declared_slowdowns(
        progress.declared,
        now_s=now_s,
        dp_of_gpu={rank.gpu_uuid: rank.dp for rank in nodes.ranks} if progress.declared else {},
        pipelines=spec.pipeline.data_parallel,
    )
    detected = progress.detector.slowdowns if spec.straggler.mode is StragglerMode.AUTOMATIC else {}
    merged = {dp: max(declared.get(dp, 1.0), detected.get(dp, 1.0)) for dp in declared.keys() | detected.keys()}
    return Stragglers(merged, frozenset(declared), wake_at_s)
