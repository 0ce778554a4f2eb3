"""What a job's GPUs do to a plan: how long clock changes take, who marks instructions, how durations scatter.

Plans are rehearsed under this description before they are deployed (design note 0019). It is assumed first: the figures
stored with the profile, or the published worst of the GPU model. It is learned then, from the agents. Small changes
of figures do not make other plans: figures are rounded, and only a change that matters replaces them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from itertools import chain
from statistics import median
from typing import Final

from perseus_core.clock_latency import MAX_CLOCKS, ClockLatency
from perseus_core.hardware import MAX_GPUS_PER_LOCK, Hardware
from perseus_core.latency import MAX_LATENCY_US, SwitchLatency, published_latency
from perseus_core.marks import MarkSource
from perseus_core.units import ratio_from_share
from perseus_operator.api.status import ClockLatencyStatus, HardwareStatus
from perseus_operator.api.stored import parse_stored
from perseus_operator.nodes.gpu import Gpu, StoredLatency
from perseus_operator.nodes.latencies import latency_by_clock, measured_latency
from perseus_operator.nodes.node import Node
from perseus_operator.objects.formatting import exact_percent

CHANGE: Final = 1.4
"""Figures that differ by less are not worth another solve."""
BETTER: Final = 4.0
"""Measured figures must be so many times better than other measured ones to be adopted: worse ones break the bound,
while better ones only save a little more, and single slow changes come and go."""
ONE_CLOCK: Final = 2.0
"""A single clock must be so many times slower than was known, or assumed, of it. Agents ask for it in time as soon as
they have measured it, and a plan with other clocks would meet clocks that are not known either.
"""
SHORT_US: Final = 1_000
"""Latencies below are alike: no instruction with a clock of its own is as short."""
_STEP: Final = 1.25
"""Measured figures are rounded to powers of this, so that jobs on like GPUs share a frontier."""
_FINE_STEP: Final = 1.03
"""Those by clock are: no two jobs would share all of them, and plans prefer clocks that look quicker than they are."""
DEFAULT_NOISE: Final = 0.002
"""Scatter of durations until it is measured, and the least that counts: recorded A100 runs have about as much."""
_MAX_NOISE: Final = 0.2


class LatencyBasis(IntEnum):
    """Where a latency comes from; a later one counts more."""

    ASSUMED = 0
    """Published for the model, or the worst of what is."""
    STORED = 1
    """Measured by an earlier job on the same model."""
    MEASURED = 2
    """Measured on GPUs of the job."""


@dataclass(frozen=True)
class JobHardware(Hardware):
    """What a job's plans are rehearsed under, and how that is known.

    Attributes:
        basis: where the latency comes from, as a word; the latency's source says it in a clause.
        marks_known: whether agents have said who marks instructions; else it is assumed to be the GPUs.
    """

    noise: float = DEFAULT_NOISE
    basis: LatencyBasis = LatencyBasis.ASSUMED
    marks_known: bool = False

    @property
    def measured(self) -> bool:
        """Whether the latency was measured on GPUs of this model."""
        return self.basis > LatencyBasis.ASSUMED

    def marked_by(self, marks: MarkSource | None) -> JobHardware:
        """Return the same where agents say who marks instructions; None: they have said nothing."""
        return replace(self, marks=marks or MarkSource.GPU, marks_known=marks is not None)

    def with_latency(self, latency: SwitchLatency, clocks: Mapping[int, SwitchLatency]) -> JobHardware:
        """Return the same with another latency, and by clock the median and 99th percentile of these."""
        by_clock = {mhz: latency.with_quantiles(one.p50_us, one.p99_us) for mhz, one in sorted(clocks.items())}
        return replace(self, latency=latency, clocks=by_clock)


@dataclass
class Described:
    """What the GPUs of a job say of themselves. It is worked out again only when one says something else: that takes a
    fraction of a second for tens of thousands, and a planner asks several times a second.
    """

    _gpus: tuple[Sequence[Gpu], ...] = ()
    _stored: StoredLatency | None = None
    _hardware: JobHardware | None = None

    def hardware(self, nodes: Iterable[Node], stored: StoredLatency | None) -> JobHardware | None:
        """Describe the GPUs of all ranks of these nodes, without marks and noise; None: one of them has no model."""
        nodes = list(nodes)
        gpus = tuple(node.rank_gpus for node in nodes)
        same = len(gpus) == len(self._gpus) and all(new is old for new, old in zip(gpus, self._gpus, strict=True))
        if not same or stored is not self._stored:
            self._gpus, self._stored = gpus, stored
            self._hardware = _described(nodes, list(chain.from_iterable(gpus)), stored)
        return self._hardware


def hardware_of(
    nodes: Iterable[Node],
    *,
    ranks: int,
    stored: StoredLatency | None,
    marks: MarkSource | None,
    noise: float | None,
    described: Described | None = None,
) -> JobHardware | None:
    """Describe the GPUs of a job by what is known now.

    Args:
        nodes: of the job, with their ranks and GPUs.
        ranks: how many the job has.
        stored: latency stored with the profile; None: none is.
        marks: whose time the marks are in; None: not known.
        noise: relative standard deviation of an instruction's duration; None: not known.
        described: what the GPUs said before.

    Returns:
        Figures as they are, not rounded; None: not every rank's GPU is described yet.
    """
    nodes = list(nodes)
    if not nodes or sum(len(node.rank_gpus) for node in nodes) != ranks:
        return None
    hardware = (described or Described()).hardware(nodes, stored)
    noise_ppm = round(1e6 * min(max(noise or 0.0, DEFAULT_NOISE), _MAX_NOISE))
    return hardware and replace(hardware, noise=noise_ppm / 1e6).marked_by(marks)


def next_hardware(in_use: JobHardware | None, current: JobHardware | None) -> JobHardware | None:
    """What to rehearse under from now on: what is in use, unless the current one differs materially.

    Of one model, clocks that only the one in use knows stay known: plans use few of them, and agents that start again
    have measured none. So clocks are added and never removed. What is adopted differs from the current one by rounding
    only, which is no reason for another adoption.

    Args:
        in_use: that the present plans were rehearsed under.
        current: as `hardware_of` describes it now.
    """
    if current is None:
        return in_use
    if in_use is None:
        return _rounded(_with_clocks(current, current.clocks))
    if not current.marks_known:  # a restarted operator has had no reports yet
        current = replace(current, marks=in_use.marks, marks_known=in_use.marks_known)
    same_model = current.model == in_use.model
    if same_model and current.basis < in_use.basis:
        # An agent that has just started has measured nothing yet. What was measured before is better than a guess.
        current = replace(in_use, marks=current.marks, marks_known=current.marks_known, noise=current.noise)
    current = _with_clocks(current, _together(in_use.clocks if same_model else {}, current.clocks))
    if _differs(in_use, current):
        return _rounded(current)
    source = replace(in_use.latency, source=current.latency.source)
    same = replace(in_use, marks=current.marks, marks_known=current.marks_known, basis=current.basis)
    return same.with_latency(source, same.clocks)


def hardware_to_status(hardware: JobHardware, lead_us: int | None) -> HardwareStatus:
    """What users and a later operator must know of the hardware.

    Args:
        hardware: that plans are rehearsed under.
        lead_us: median lead of marks in the latest iterations; None: not known.
    """
    latency = hardware.latency
    return HardwareStatus(
        gpu=hardware.model,
        switch_latency_median_microseconds=latency.p50_us,
        switch_latency_p99_microseconds=latency.p99_us,
        call_microseconds=latency.call_us,
        gpus_per_lock=hardware.gpus_per_lock,
        figures=hardware.basis.name.capitalize(),
        source=latency.source,
        marks=hardware.marks.label if hardware.marks_known else "Unknown",
        noise=exact_percent(hardware.noise),
        median_lead_microseconds=lead_us,
        clocks=tuple(
            ClockLatencyStatus(megahertz=mhz, median_microseconds=one.p50_us, p99_microseconds=one.p99_us)
            for mhz, one in hardware.clocks.items()
        )
        or None,
    )


def hardware_from_status(status: object) -> JobHardware | None:
    """The hardware that an earlier operator planned with, but for the pipelines, which the spec says; None: it stored
    none, or none that can be.
    """
    stored = parse_stored(HardwareStatus, status)
    if stored is None or stored.figures.upper() not in LatencyBasis.__members__:
        return None
    latency = SwitchLatency(
        p50_us=stored.switch_latency_median_microseconds,
        p99_us=stored.switch_latency_p99_microseconds,
        call_us=stored.call_microseconds,
        shared_lock=stored.gpus_per_lock > 1,
        source=stored.source,
    )
    clocks = {
        one.megahertz: latency.with_quantiles(one.median_microseconds, one.p99_microseconds)
        for one in stored.clocks or ()
    }
    try:
        return JobHardware(
            model=stored.gpu,
            latency=latency,
            gpus_per_lock=stored.gpus_per_lock,
            noise=ratio_from_share(stored.noise),
            basis=LatencyBasis[stored.figures.upper()],
            clocks=dict(sorted(clocks.items())),
        ).marked_by(next((marks for marks in MarkSource if marks.label == stored.marks), None))
    except ValueError:
        return None


def job_latency(gpus: Iterable[Gpu]) -> StoredLatency | None:
    """What was measured on a job's GPUs, for later jobs on the same model; None: too little.

    Args:
        gpus: of the job. Those of its most frequent model and driver count.
    """
    latencies = [(gpu, gpu.latency) for gpu in gpus if gpu.latency]
    if not latencies:
        return None
    (model, driver), _ = Counter((gpu.model, gpu.driver) for gpu, _ in latencies).most_common(1)[0]
    measured = measured_latency(
        model, [latency for gpu, latency in latencies if (gpu.model, gpu.driver) == (model, driver)]
    )
    return StoredLatency(model, driver, measured) if measured is not None else None


def scatter(before: Iterable[Sequence[int]], now: Iterable[Sequence[int]]) -> float | None:
    """Estimate the relative standard deviation of durations from two iterations of a pipeline under the same plan.

    Args:
        before, now: durations of instructions by stage, microseconds.

    Returns:
        1.48 × the median of |difference| / √2, relative: a normal distribution's deviation, and robust against single
        slow instructions. None: there is nothing to compare.
    """
    pairs = zip(chain.from_iterable(now), chain.from_iterable(before), strict=False)
    shares = [abs(later - earlier) / earlier for later, earlier in pairs if earlier > 0]
    return 1.4826 * median(shares) / math.sqrt(2) if shares else None


def _described(nodes: list[Node], gpus: list[Gpu], stored: StoredLatency | None) -> JobHardware | None:
    if not gpus or not all(gpu.model for gpu in gpus):
        return None
    # Of different models the one that is slowest by what is published: the others wait for it.
    model = max(sorted({gpu.model for gpu in gpus}), key=lambda name: published_latency(name).p99_s)
    of_model = [gpu.latency for gpu in gpus if gpu.model == model and gpu.latency is not None]
    latency, basis, source = _latency(model, of_model, stored)
    overall = SwitchLatency(latency.p50_us, latency.p99_us, latency.call_us, latency.shared_lock, source)
    gpus_per_lock = min(_largest_group(nodes), MAX_GPUS_PER_LOCK) if latency.shared_lock else 1
    # All GPUs of the model, not the busiest alone: which clocks one changes to depends on its stage.
    clocks = latency_by_clock(latency, of_model if basis is LatencyBasis.MEASURED else [latency])
    return JobHardware(model, overall, gpus_per_lock=gpus_per_lock, basis=basis).with_latency(overall, clocks)


def _latency(
    model: str, latencies: list[ClockLatency], stored: StoredLatency | None
) -> tuple[ClockLatency, LatencyBasis, str]:
    measured = measured_latency(model, latencies)
    if measured is not None:
        return measured, LatencyBasis.MEASURED, "measured on GPUs of the job"
    if stored is not None and stored.model == model:
        driver = f" with driver {stored.driver}" if stored.driver else ""
        return stored.latency, LatencyBasis.STORED, f"measured before on this model{driver}, stored with the profile"
    assumed = published_latency(model)
    return ClockLatency(**asdict(assumed)), LatencyBasis.ASSUMED, assumed.source


def _with_clocks(hardware: JobHardware, clocks: Mapping[int, SwitchLatency]) -> JobHardware:
    """The same with these clocks. All others take at least as long as the one in the middle: under a plan that uses
    quick clocks only, what is measured of all changes says little of others. That depends on all clocks that are known,
    so it comes after those of now and those that are in use were put together.
    """
    if not clocks:
        return hardware
    p50_us = max(hardware.latency.p50_us, round(median(one.p50_us for one in clocks.values())))
    p99_us = max(hardware.latency.p99_us, p50_us, round(median(one.p99_us for one in clocks.values())))
    return hardware.with_latency(hardware.latency.with_quantiles(p50_us, p99_us), clocks)


def _together(in_use: Mapping[int, SwitchLatency], current: Mapping[int, SwitchLatency]) -> Mapping[int, SwitchLatency]:
    """Clocks of both, as they are now where that is known. Those in use have priority: none is removed for another."""
    clocks = dict(in_use)
    for mhz, latency in current.items():
        if mhz in clocks or len(clocks) < MAX_CLOCKS:
            clocks[mhz] = latency
    return clocks


def _largest_group(nodes: Iterable[Node]) -> int:
    """The most GPUs of one stage on one node: they change clocks at the same moments."""
    return max(max(Counter(rank.stage for rank in node.ranks.values()).values(), default=1) for node in nodes)


def _differs(in_use: JobHardware, current: JobHardware) -> bool:
    """Whether the current hardware differs so much from that in use that it is worth another solve."""
    a, b = in_use.latency, current.latency
    if (in_use.model, in_use.gpus_per_lock, in_use.marks) != (current.model, current.gpus_per_lock, current.marks):
        return True
    if current.clocks and not in_use.clocks:
        return True
    if any(
        one.p50_us > ONE_CLOCK * max(SHORT_US, in_use.latency_of(mhz).p50_us) for mhz, one in current.clocks.items()
    ):
        return True
    latencies = [(a.p50_us, b.p50_us), (a.p99_us, b.p99_us)]
    if in_use.gpus_per_lock > 1:
        latencies.append((a.call_us, b.call_us))
    pairs = [(max(SHORT_US, before), max(SHORT_US, now)) for before, now in latencies]
    pairs.append((max(1, round(1e6 * in_use.noise)), max(1, round(1e6 * current.noise))))
    better = BETTER if in_use.measured else CHANGE
    return any(now > CHANGE * before or before > better * now for before, now in pairs)


def _rounded(hardware: JobHardware) -> JobHardware:
    hardware = replace(hardware, noise=_step(round(1e6 * hardware.noise)) / 1e6)
    if not hardware.measured:
        return hardware
    latency = replace(hardware.latency, call_us=min(_step(hardware.latency.call_us), MAX_LATENCY_US))
    return hardware.with_latency(
        latency.with_quantiles(_step(latency.p50_us), _step(latency.p99_us)),
        {
            mhz: latency.with_quantiles(_step(one.p50_us, _FINE_STEP), _step(one.p99_us, _FINE_STEP))
            for mhz, one in hardware.clocks.items()
        },
    )


def _step(figure: int, step: float = _STEP) -> int:
    """The nearest power of a step, to two digits, or to three where steps are fine."""
    if figure <= 0:
        return 0
    power = step ** round(math.log(figure, step))
    digits = (1 if step > 1.1 else 2) - math.floor(math.log10(power))
    return max(1, round(round(power, digits)))
