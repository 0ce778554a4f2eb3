"""A calibration: its parameters with intervals, the noise, and the error on iterations that were not fitted.

It is stored as JSON. A calibration that does not explain its run has no parameters, so that no plan can be based on it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from perseus_core.instruction import InstructionKind
from perseus_solver.calibration.fields import Fields
from perseus_solver.calibration.noise import Noise
from perseus_solver.errors import InvalidCalibration
from perseus_solver.kinds import Floats
from perseus_solver.schedules import Schedule, schedule_name
from perseus_solver.stragglers import Thresholds, least_slowdowns

VERSION: Final = 1
EXPLAINS: Final = "explains"
DOES_NOT_EXPLAIN: Final = "does not explain"
MAX_BYTES = 8 << 20
"""Size limit of the JSON; a thousand stages take about one MiB."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A parameter and its 95 % interval, seconds."""

    value_s: float
    low_s: float
    high_s: float


@dataclass(frozen=True, slots=True)
class Delay:
    """Time between the end of an instruction on one stage and the start of the next, on another stage or the same.

    Attributes:
        from_stage, to_stage: the two ends; equal for a gap within a stage.
        estimate: seconds.
        crossed: some critical path of the run crosses this delay. If none does, the value is that of the other delays
            of its kind, and any value up to ``estimate.high_s`` would explain the run as well.
    """

    from_stage: int
    to_stage: int
    estimate: Estimate
    crossed: bool


@dataclass(frozen=True, slots=True)
class Quality:
    """Errors of predicted iteration times: absolute percentages of the measured time.

    Attributes:
        plans_fitted, plans_heldout, iterations_fitted, iterations_heldout: how many were fitted, and how many not.
        fitted_mape_percent: mean error of the fitted iterations.
        heldout_mape_percent, heldout_median_percent, heldout_max_percent: error of the others; None where all were
            fitted.
        replay_mape_percent: mean error without any delay, on the same iterations.
    """

    plans_fitted: int
    plans_heldout: int
    iterations_fitted: int
    iterations_heldout: int
    fitted_mape_percent: float
    heldout_mape_percent: float | None
    heldout_median_percent: float | None
    heldout_max_percent: float | None
    replay_mape_percent: float


@dataclass(frozen=True, slots=True)
class Parameters:
    """What was fitted: time outside the graph, delays of messages between stages, and gaps within each stage."""

    overhead: Estimate
    edges: tuple[Delay, ...]
    gaps: tuple[Delay, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration of one pipeline from one run.

    Attributes:
        schedule, stages, microbatches, chunks: the pipeline of the run, and the only one that the calibration may be
            used for. Where the split between overhead and delays is not determined, it would predict another number of
            microbatches wrongly.
        reason: one sentence on why the model explains the run, or does not.
        parameters: None if the model does not explain the run.
        quality: errors of the predictions.
        noise: of every kind of instruction of every stage; empty if no plan ran twice.
        stage_noise: standard deviation of each stage's pace from one iteration to the next, a share; None: not
            measured.
        allowance: share by which nearly all undisturbed iterations stay within the time predicted from planned
            durations.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    reason: str
    parameters: Parameters | None
    quality: Quality
    noise: tuple[Noise, ...]
    stage_noise: tuple[float, ...] | None
    allowance: float

    @property
    def explains(self) -> bool:
        """Whether the model explains its run and may be used."""
        return self.parameters is not None

    @property
    def status(self) -> str:
        """``explains`` or ``does not explain``, as in the JSON's ``verdict``."""
        return EXPLAINS if self.explains else DOES_NOT_EXPLAIN

    @property
    def thresholds(self) -> Thresholds | None:
        """When a stage counts as slow; None if the noise of the stages was not measured."""
        return None if self.stage_noise is None else Thresholds.from_noise(self.stage_noise)

    @property
    def least_slowdowns(self) -> tuple[float, ...] | None:
        """The smallest slowdown of each stage that is reliably detected, ratios ≥ 1; None if noise was not measured."""
        return None if self.stage_noise is None else least_slowdowns(self.stage_noise)

    def deadline_s(self, bound_s: float) -> float:
        """Return the longest planned iteration time with which nearly every undisturbed iteration meets a bound.

        Args:
            bound_s: iteration time that measured iterations must not exceed, seconds.

        Returns:
            Seconds.
        """
        return bound_s / (1 + self.allowance)

    def delays_for(self, schedule: Schedule) -> tuple[Floats, Floats, float]:
        """Return the delays and the overhead for a schedule.

        Args:
            schedule: the schedule to plan.

        Returns:
            float[stages, stages] delays between stages [from, to], float[stages] gaps, and the overhead; seconds.

        Raises:
            InvalidCalibration: the calibration does not explain its run, or is of another pipeline.
        """
        if self.parameters is None:
            raise InvalidCalibration(f"the calibration does not explain the run that it was fitted to: {self.reason}")
        for name, mine, wanted in (
            ("schedule", self.schedule, schedule.name),
            ("stages", self.stages, schedule.stages),
            ("microbatches", self.microbatches, schedule.microbatches),
            ("chunks", self.chunks, schedule.chunks),
        ):
            if mine != wanted:
                raise InvalidCalibration(f"the calibration is of {name} {mine}, but the problem has {name} {wanted}")
        delay_s = np.zeros((self.stages, self.stages))
        gap_s = np.zeros(self.stages)
        for edge in self.parameters.edges:
            delay_s[edge.from_stage, edge.to_stage] = edge.estimate.value_s
        for gap in self.parameters.gaps:
            gap_s[gap.from_stage] = gap.estimate.value_s
        return delay_s, gap_s, self.parameters.overhead.value_s

    def to_json(self) -> str:
        """Return the calibration as JSON for `from_json`, the main figures first."""
        parameters = self.parameters
        document: dict[str, Any] = {
            "version": VERSION,
            "verdict": self.status,
            "reason": self.reason,
            "heldout_mape_percent": self.quality.heldout_mape_percent,
            "heldout_max_percent": self.quality.heldout_max_percent,
            "overhead_s": parameters and parameters.overhead.value_s,
            "overhead_low_s": parameters and parameters.overhead.low_s,
            "overhead_high_s": parameters and parameters.overhead.high_s,
            "edge_delay_s": parameters and [_plain(delay) for delay in parameters.edges],
            "stage_gap_s": parameters and [_plain(delay) for delay in parameters.gaps],
            "allowance": self.allowance,
            "straggler_least_degree": self.least_slowdowns and list(self.least_slowdowns),
            "schedule": self.schedule,
            "stages": self.stages,
            "microbatches": self.microbatches,
            "chunks": self.chunks,
            "quality": asdict(self.quality),
            "noise": [asdict(noise) | {"kind": noise.kind.label} for noise in self.noise],
            "stage_noise": self.stage_noise and list(self.stage_noise),
        }
        return json.dumps(document, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Calibration:
        """Read and check the JSON of a calibration.

        Args:
            text: at most `MAX_BYTES` of JSON.

        Raises:
            InvalidCalibration: the message names the field and the rule.
        """
        if len(text) > MAX_BYTES:
            raise InvalidCalibration(f"the calibration is too large: at most {MAX_BYTES >> 20} MiB")
        try:
            root = Fields(json.loads(text), "")
        except (ValueError, RecursionError) as error:
            raise InvalidCalibration(f"the calibration is not JSON: {error}") from None
        version = root.count("version")
        if version != VERSION:
            raise InvalidCalibration(f"the calibration is of version {version}, this program reads {VERSION}")
        status = root.text("verdict")
        if status not in (EXPLAINS, DOES_NOT_EXPLAIN):
            raise InvalidCalibration(f"verdict must be '{EXPLAINS}' or '{DOES_NOT_EXPLAIN}', not {status[:40]!r}")
        stages = root.count("stages", least=1)
        return cls(
            schedule=schedule_name(root.text("schedule")),
            stages=stages,
            microbatches=root.count("microbatches", least=1),
            chunks=root.count("chunks", least=1),
            reason=root.text("reason"),
            parameters=_parameters(root, stages) if status == EXPLAINS else None,
            quality=_quality(root.child("quality")),
            noise=tuple(_noise(entry, stages) for entry in root.children("noise")),
            stage_noise=root.numbers("stage_noise", length=stages),
            allowance=root.number("allowance"),
        )


def _plain(delay: Delay) -> dict[str, Any]:
    ends = {"from_stage": delay.from_stage, "to_stage": delay.to_stage}
    return ends | asdict(delay.estimate) | {"crossed": delay.crossed}


def _parameters(root: Fields, stages: int) -> Parameters:
    overhead = Estimate(root.number("overhead_s"), root.number("overhead_low_s"), root.number("overhead_high_s"))
    edges, gaps = (
        tuple(
            Delay(
                entry.count("from_stage", most=stages - 1),
                entry.count("to_stage", most=stages - 1),
                Estimate(entry.number("value_s"), entry.number("low_s"), entry.number("high_s")),
                entry.flag("crossed"),
            )
            for entry in root.children(name)
        )
        for name in ("edge_delay_s", "stage_gap_s")
    )
    if any(delay.from_stage == delay.to_stage for delay in edges):
        raise InvalidCalibration("edge_delay_s must be between two different stages")
    if any(delay.from_stage != delay.to_stage for delay in gaps):
        raise InvalidCalibration("stage_gap_s must be within one stage")
    if len({(delay.from_stage, delay.to_stage) for delay in (*edges, *gaps)}) < len(edges) + len(gaps):
        raise InvalidCalibration("edge_delay_s and stage_gap_s must name each pair of stages, or stage, once")
    return Parameters(overhead, edges, gaps)


def _quality(entry: Fields) -> Quality:
    return Quality(
        plans_fitted=entry.count("plans_fitted"),
        plans_heldout=entry.count("plans_heldout"),
        iterations_fitted=entry.count("iterations_fitted"),
        iterations_heldout=entry.count("iterations_heldout"),
        fitted_mape_percent=entry.number("fitted_mape_percent"),
        heldout_mape_percent=entry.maybe("heldout_mape_percent"),
        heldout_median_percent=entry.maybe("heldout_median_percent"),
        heldout_max_percent=entry.maybe("heldout_max_percent"),
        replay_mape_percent=entry.number("replay_mape_percent"),
    )


def _noise(entry: Fields, stages: int) -> Noise:
    label = entry.text("kind")
    kinds = {kind.label: kind for kind in InstructionKind}
    if label not in kinds:
        raise InvalidCalibration(f"{entry.where}kind must be one of {', '.join(kinds)}, not {label[:40]!r}")
    return Noise(
        stage=entry.count("stage", most=stages - 1),
        kind=kinds[label],
        instruction_percent=entry.number("instruction_percent"),
        instruction_low_percent=entry.number("instruction_low_percent"),
        instruction_high_percent=entry.number("instruction_high_percent"),
        iteration_percent=entry.number("iteration_percent"),
        iteration_low_percent=entry.number("iteration_low_percent"),
        iteration_high_percent=entry.number("iteration_high_percent"),
    )
