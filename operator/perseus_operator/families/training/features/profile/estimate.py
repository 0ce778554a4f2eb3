"""What a job's profile is likely to be, where none is measured: its own iterations at whatever clocks its GPUs are at,
and the published curves of their model. And whether a stored profile is of this job.

An instruction that took t at the clock f₀ takes t · τ(f) / τ(f₀) at a lower clock f, with τ the curve's time. While
computing, a stage drew (E − P·W) / C, with its energy E, time in instructions C and waits W of an iteration, and P of a
waiting GPU as published; at f it draws that times p(f) / p(f₀), with p the curve's power. So what was measured is met
exactly at f₀, and only the slopes of the curves are taken from elsewhere. Clocks above f₀ are left out: power or heat
may not allow them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from perseus_core.gpus import GpuCurves
from perseus_core.units import energy_mj, mean_power_w
from perseus_operator.families.training.features.profile.reading import Reading, StageReading
from perseus_operator.families.training.features.profile.sweep import Key, Row, choose_clocks, csv_of_rows

CLOCKS: Final = 24
"""As many as a sweep measures by default."""
SAME: Final = 0.10
"""A profile is of this job if no instruction takes longer or shorter than profiled by more than this: what counts as
drift of a profile in use."""


@dataclass(frozen=True)
class Estimate:
    """An estimated profile: its CSV, and the power of a waiting GPU in watts."""

    csv: str
    blocking_power_w: float


def estimate(observed: Reading, curves: GpuCurves) -> Estimate:
    """Estimate the profile of a job.

    Args:
        observed: its iterations at the clocks that its GPUs are at.
        curves: of their model.

    Returns:
        At most `CLOCKS` clocks for each instruction, the highest one that was observed.
    """
    least_w = min(mean_power_w(stage.energy_mj, stage.time_us) for stage in observed.stages)
    waiting_w = min(curves.blocking_power_w, least_w)
    rows: dict[Key, list[Row]] = {}
    for number, stage in enumerate(observed.stages):
        at_mhz = _observed_mhz(stage, curves)
        lower = [mhz for mhz in reversed(curves.clocks_mhz) if curves.lowest_profiled_mhz <= mhz < at_mhz]
        waiting_mj = energy_mj(waiting_w, max(0.0, stage.time_us - stage.computing_us))
        computing_w = mean_power_w(stage.energy_mj - waiting_mj, stage.computing_us)
        for mhz in choose_clocks([at_mhz, *lower], CLOCKS):
            slower = curves.relative_time(mhz) / curves.relative_time(at_mhz)
            drawn_w = computing_w * curves.demanded_w(mhz) / curves.demanded_w(at_mhz)
            for (kind, chunk), mean in stage.means.items():
                time_us = mean.time_us * slower
                rows.setdefault((number, kind, chunk), []).append(Row(mhz, time_us, energy_mj(drawn_w, time_us)))
    return Estimate(csv_of_rows(rows), waiting_w)


def distance(observed: Reading, times_us: Mapping[Key, Mapping[int, float]]) -> float | None:
    """By what share an instruction differs most between a job and a profile; None: they have different instructions.

    Args:
        observed: the job's iterations.
        times_us: of the profile: microseconds by stage, kind and chunk, and by clock in MHz.
    """
    means = {(n, *key): (mean, stage) for n, stage in enumerate(observed.stages) for key, mean in stage.means.items()}
    if not means or means.keys() != times_us.keys():
        return None
    apart = 0.0
    for key, (mean, stage) in means.items():
        clocks = times_us[key]
        nearest = min(clocks, key=lambda mhz: abs(mhz - (stage.reached_mhz or max(clocks))))
        apart = max(apart, abs(mean.time_us / clocks[nearest] - 1))
    return apart


def _observed_mhz(stage: StageReading, curves: GpuCurves) -> int:
    """The supported clock that a stage ran at; where no agent reads it, what the power limit leaves of the highest."""
    reached: Sequence[int] = [stage.reached_mhz] if stage.reached_mhz else [curves.plateau_mhz]
    return min(curves.clocks_mhz, key=lambda mhz: abs(mhz - reached[0]))
