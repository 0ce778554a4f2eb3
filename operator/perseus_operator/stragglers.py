"""Which pipelines are slow, and by how much: told by an annotation, or seen in telemetry.

Fed by ``JobState`` with complete iterations; read by the planner. A pipeline is compared with what its own
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
from perseus_operator.history import JobIteration
from perseus_proto import keys

_WINDOW = 15
_LATEST = 5
_ENOUGH = 5
"""Iterations of a pipeline before its spread says anything."""
_RESOLUTION = 0.01
"""A change of a known slowdown below this is not worth a new plan."""
_SIGMAS = 4.0
_SIGMA_PER_MAD = 1.4826


@dataclass
class _Pipeline:
    relative: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """How many times slower than the reference it was, while it was no straggler."""
    agreeing: int = 0
    """Consecutive iterations that speak for a change of ``slowdown`` between none and some."""
    since_onset: deque[float] = field(default_factory=lambda: deque(maxlen=_LATEST))
    slowdown: float = 1.0


@dataclass
class Detector:
    """Detection with hysteresis: a threshold to enter, a lower one to leave, and a number of iterations that must
    agree.

    Pipelines are compared within one iteration, so what slows all of them alike is nobody's fault. The reference is the
    low median: with two pipelines the faster, with many robust against less than half being slow. Nothing is lost by
    waiting for all: the straggler reports last. The threshold to enter is never below four standard deviations (from
    the median absolute deviation) of what healthy pipelines show.
    """

    _pipelines: dict[int, _Pipeline] = field(default_factory=dict)

    def observe(self, iteration: JobIteration, promised_us: Mapping[int, int], spec: Straggler) -> None:
        """Take one complete iteration in; ``promised_us`` is the time of each pipeline's own plan. O(pipelines)."""
        if iteration.mixed:
            return
        ratios = {p: span_us / promised_us[p] for p, span_us in iteration.spans_us.items()}
        reference = median_low(ratios.values())
        enter = 1 + max(spec.slowdown_ratio, _SIGMAS * self._noise())
        for pipeline, ratio in ratios.items():
            own = self._pipelines.setdefault(pipeline, _Pipeline())
            if own.slowdown == 1.0:
                _await_onset(own, ratio / reference, enter, spec.confirm_iterations)
            else:
                _await_recovery(own, ratio / reference, 1 + spec.recovery_ratio, spec.confirm_iterations)

    @property
    def slowdowns(self) -> dict[int, float]:
        """Slow pipelines and how many times slower than the others they are."""
        return {p: state.slowdown for p, state in self._pipelines.items() if state.slowdown > 1.0}

    def _noise(self) -> float:
        """Standard deviation of healthy pipelines' iterations."""
        healthy = [own for own in self._pipelines.values() if own.slowdown == 1.0 and len(own.relative) >= _ENOUGH]
        spread = [
            abs(value / middle - 1) for own in healthy for middle in [median(own.relative)] for value in own.relative
        ]
        return _SIGMA_PER_MAD * median(spread) if spread else 0.0


def _await_onset(own: _Pipeline, relative: float, enter: float, confirm: int) -> None:
    if relative < enter:
        own.relative.append(relative)
        own.agreeing = 0
        own.since_onset.clear()
        return
    own.agreeing += 1
    own.since_onset.append(relative)
    if own.agreeing >= confirm:
        own.slowdown, own.agreeing = median(own.since_onset), 0


def _await_recovery(own: _Pipeline, relative: float, leave: float, confirm: int) -> None:
    own.since_onset.append(relative)
    own.agreeing = own.agreeing + 1 if relative <= leave else 0
    now = median(own.since_onset)
    if own.agreeing >= confirm:
        own.slowdown, own.agreeing = 1.0, 0
        own.since_onset.clear()
    elif own.agreeing == 0 and abs(now / own.slowdown - 1) > _RESOLUTION:
        own.slowdown = max(leave, now)


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
