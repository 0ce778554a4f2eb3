"""Which pipelines are slow, and by how much: told by an annotation, or seen in telemetry.

Fed by ``JobState`` with complete pipeline iterations; read by the planner. A pipeline is compared with what its own
plan promises, and that with how the other pipelines keep their promises, so neither a planned slowdown nor a profile
that is off by some per cent looks like a straggler. Decisions about plans do not belong here.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median, median_low

from perseus_operator.api import Straggler
from perseus_operator.errors import InvalidSpec
from perseus_operator.history import PipelineIteration
from perseus_proto import keys

_WINDOW = 5
_RESOLUTION = 0.01
"""A change of a known slowdown below this is not worth a new plan."""
_SIGMAS = 4.0
_SIGMA_PER_MAD = 1.4826


@dataclass
class _Pipeline:
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Measured over promised, latest last."""
    agreeing: int = 0
    """Consecutive iterations that speak for a change of ``slowdown`` between none and some."""
    since_onset: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    slowdown: float = 1.0


@dataclass
class Detector:
    """Detection with hysteresis: a threshold to enter, a lower one to leave, and a number of iterations that must
    agree.

    The reference is the low median over pipelines: with two, the faster; with many, robust against less than half
    being slow. The entry threshold is never below four standard deviations (from the median absolute deviation) of
    what is seen.
    """

    _pipelines: dict[int, _Pipeline] = field(default_factory=dict)

    def observe(self, iteration: PipelineIteration, promised_us: float, spec: Straggler) -> None:
        """Take one complete iteration in. O(pipelines)."""
        if iteration.mixed:
            return
        own = self._pipelines.setdefault(iteration.pipeline, _Pipeline())
        ratio = iteration.span_us / promised_us
        # Before appending: the newest, perhaps the first slow one, must not hide itself. A pipeline without past has
        # no reference.
        enter = 1 + max(spec.slowdown_ratio, _SIGMAS * self._noise())
        own.ratios.append(ratio)
        relative = ratio / self._reference(iteration.pipeline, ratio)
        if own.slowdown == 1.0:
            own.agreeing = own.agreeing + 1 if relative >= enter else 0
            if own.agreeing == 0:
                own.since_onset.clear()
                return
            own.since_onset.append(relative)
            if own.agreeing >= spec.confirm_iterations:
                own.slowdown = median(own.since_onset)
                own.agreeing = 0
            return
        own.since_onset.append(relative)
        own.agreeing = own.agreeing + 1 if relative <= 1 + spec.recovery_ratio else 0
        if own.agreeing >= spec.confirm_iterations:
            self._pipelines[iteration.pipeline] = _Pipeline(deque(list(own.ratios)[-own.agreeing :], maxlen=_WINDOW))
        elif own.agreeing == 0 and abs(median(own.since_onset) / own.slowdown - 1) > _RESOLUTION:
            own.slowdown = max(1 + spec.recovery_ratio, median(own.since_onset))

    @property
    def slowdowns(self) -> dict[int, float]:
        """Slow pipelines and how many times slower than the others they are."""
        return {p: state.slowdown for p, state in self._pipelines.items() if state.slowdown > 1.0}

    def _reference(self, pipeline: int, ratio: float) -> float:
        others = [median(state.ratios) for p, state in self._pipelines.items() if p != pipeline and state.ratios]
        return median_low([*others, ratio])

    def _noise(self) -> float:
        """Standard deviation of a healthy pipeline's iterations around their own median."""
        healthy = [
            state.ratios for state in self._pipelines.values() if state.slowdown == 1.0 and len(state.ratios) >= 3
        ]
        deviations = [abs(ratio / median(ratios) - 1) for ratios in healthy for ratio in ratios]
        return _SIGMA_PER_MAD * median(deviations) if deviations else 0.0


@dataclass(frozen=True)
class Told:
    """One entry of the annotation: the paper's set_straggler."""

    id: str
    delay_s: float
    degree: float


_ENTRY = re.compile(
    r"(?P<id>\d{1,5}|GPU-[0-9a-zA-Z-]{1,60}):(?P<delay>\d{1,7}(?:\.\d{1,6})?):(?P<degree>\d{1,3}(?:\.\d{1,6})?)"
)


def parse_annotation(text: str) -> tuple[Told, ...]:
    """``"<id>:<delay seconds>:<degree>"``, several separated by commas; id is a data-parallel rank or a GPU's UUID.

    Raises:
        InvalidSpec: one line naming the annotation and the rule.
    """
    told = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise InvalidSpec(
                f"annotation {keys.ANNOTATION_STRAGGLER}: must be <data-parallel rank or GPU UUID>:<delay seconds>:"
                f"<degree>, such as 1:0:1.2, not {part[:60]!r}"
            )
        entry = Told(match["id"], float(match["delay"]), float(match["degree"]))
        if not 1.0 <= entry.degree <= 100.0:
            raise InvalidSpec(
                f"annotation {keys.ANNOTATION_STRAGGLER}: degree must be from 1 (back to normal) to 100,"
                f" not {match['degree']}"
            )
        told.append(entry)
    return tuple(told)


def told_slowdowns(
    told: tuple[Told, ...], *, seen_s: float, now_s: float, pipeline_of_gpu: Mapping[str, int], pipelines: int
) -> dict[int, float]:
    """Degrees in force now. Of several entries for one pipeline the largest counts; unknown ids count for nothing."""
    slowdowns: dict[int, float] = {}
    for entry in told:
        pipeline = int(entry.id) if entry.id.isdigit() else pipeline_of_gpu.get(entry.id, -1)
        if 0 <= pipeline < pipelines and entry.degree > 1.0 and now_s >= seen_s + entry.delay_s:
            slowdowns[pipeline] = max(entry.degree, slowdowns.get(pipeline, 1.0))
    return slowdowns
