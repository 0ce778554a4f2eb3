"""What a job's GPUs do to a plan: how long clock changes take, who marks instructions, how durations scatter.

Plans are rehearsed under this description before they are deployed (design note 0019). It is assumed first: the figures
stored with the profile, or the published worst of the GPU model. It is learned then, from the agents. Small changes
of figures do not make other plans: figures are rounded, and only a change that matters replaces them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from itertools import chain
from statistics import median
from typing import Any, Final

from perseus_core.clock_latency import MAX_CLOCKS, ClockLatency
from perseus_core.latency import published_latency, quantiles_from_json, quantiles_to_json
from perseus_core.marks import MarkSource
from perseus_core.units import s_from_us
from perseus_operator.api.schema import parse_stored
from perseus_operator.api.status import ClockLatencyStatus, HardwareStatus
from perseus_operator.nodes.gpu import Gpu, StoredLatency
from perseus_operator.nodes.latencies import ClockTimes, clock_times, measured_latency
from perseus_operator.nodes.node import Node

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
_MAX_GPUS: Final = 1024


class LatencyBasis(IntEnum):
    """Where a latency comes from; a later one counts more."""

    ASSUMED = 0
    """Published for the model, or the worst of what is."""
    STORED = 1
    """Measured by an earlier job on the same model."""
    MEASURED = 2
    """Measured on GPUs of the job."""


@dataclass(frozen=True)
class Hardware:
    """What plans are rehearsed under.

    Attributes:
        model: name of the GPU model, as the driver gives it.
        p50_us, p99_us: of a clock change, from the begin of the call to the new clock in effect, where nothing is known
            of changes to that clock.
        call_us: median duration of the driver's call alone.
        gpus_per_lock: GPUs of one stage on a node whose calls wait for each other.
        marks: who marks instructions; None: not known yet, and assumed to be the GPUs.
        noise_ppm: relative standard deviation of an instruction's duration, parts per million.
        pipelines: of the job, each of which waits for the slowest.
        basis, source: where the latency comes from, as a word and as a clause.
        clocks: of a change by the clock that is changed to, ascending; at most `MAX_CLOCKS`.
    """

    model: str
    p50_us: int
    p99_us: int
    call_us: int
    gpus_per_lock: int = 1
    marks: MarkSource | None = None
    noise_ppm: int = round(1e6 * DEFAULT_NOISE)
    pipelines: int = 1
    basis: LatencyBasis = LatencyBasis.ASSUMED
    source: str = ""
    clocks: tuple[ClockTimes, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether the latency was measured on GPUs of this model."""
        return self.basis > LatencyBasis.ASSUMED

    def to_json(self) -> str:
        """The description in the format of ``perseus plan --hardware``; what plans depend on and nothing else."""
        latency: dict[str, Any] = quantiles_to_json(self.p50_us, self.p99_us)
        if self.clocks:
            latency["clocks"] = {str(one.mhz): quantiles_to_json(one.p50_us, one.p99_us) for one in self.clocks}
        document = {
            "model": self.model,
            "switch_latency_s": latency,
            "call_s": s_from_us(self.call_us),
            "marks": (self.marks or MarkSource.GPU).word,
            "gpus_per_lock": self.gpus_per_lock,
            "noise": self.noise_ppm / 1e6,
            "pipelines": self.pipelines,
        }
        return json.dumps(document, sort_keys=True)


@dataclass
class Described:
    """What the GPUs of a job say of themselves. It is worked out again only when one says something else: that takes a
    fraction of a second for tens of thousands, and a planner asks several times a second.
    """

    _gpus: tuple[Sequence[Gpu], ...] = ()
    _stored: StoredLatency | None = None
    _found: Hardware | None = None

    def hardware(self, nodes: Iterable[Node], stored: StoredLatency | None) -> Hardware | None:
        """Describe the GPUs of all ranks of these nodes, without marks and noise; None: one of them has no model."""
        known = list(nodes)
        gpus = tuple(node.rank_gpus for node in known)
        same = len(gpus) == len(self._gpus) and all(new is old for new, old in zip(gpus, self._gpus, strict=True))
        if not same or stored is not self._stored:
            self._gpus, self._stored = gpus, stored
            self._found = _described(known, [gpu for of_node in gpus for gpu in of_node], stored)
        return self._found


def hardware_of(
    nodes: Iterable[Node],
    *,
    ranks: int,
    stored: StoredLatency | None,
    marks: MarkSource | None,
    noise: float | None,
    described: Described | None = None,
) -> Hardware | None:
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
    known = list(nodes)
    if not known or sum(len(node.rank_gpus) for node in known) != ranks:
        return None
    found = (described or Described()).hardware(known, stored)
    noise_ppm = round(1e6 * min(max(noise or 0.0, DEFAULT_NOISE), _MAX_NOISE))
    return found and replace(found, marks=marks, noise_ppm=noise_ppm)


def next_hardware(in_use: Hardware | None, found: Hardware | None) -> Hardware | None:
    """What to rehearse under from now on: what is in use, unless what was found differs materially.

    Of one model, clocks that only the one in use knows stay known: plans use few of them, and agents that start again
    have measured none. So clocks are added and never removed. What is adopted differs from what was found by rounding
    only, which is no reason for another adoption.

    Args:
        in_use: that the present plans were rehearsed under.
        found: as `hardware_of` describes it now.
    """
    if found is None:
        return in_use
    if in_use is not None and found.marks is None:  # a restarted operator has had no reports yet
        found = replace(found, marks=in_use.marks)
    kept = in_use.clocks if in_use is not None and found.model == in_use.model else ()
    if in_use is not None and found.model == in_use.model and found.basis < in_use.basis:
        # An agent that has just started has measured nothing yet. What was measured before is better than a guess.
        found = replace(in_use, marks=found.marks, noise_ppm=found.noise_ppm)
    found = _with_clocks(found, _together(kept, found.clocks))
    if in_use is None or _differs(in_use, found):
        return _rounded(found)
    return replace(in_use, marks=found.marks, basis=found.basis, source=found.source)


def clocks_of(text: str) -> tuple[ClockTimes, ...]:
    """How long changes take by clock, of a description as ``Hardware.to_json`` gives it; empty: it knows of none."""
    clocks = json.loads(text)["switch_latency_s"].get("clocks", {})
    times = [ClockTimes(int(mhz), *quantiles_from_json(one)) for mhz, one in clocks.items()]
    return tuple(sorted(times, key=lambda one: one.mhz))


def hardware_to_status(hardware: Hardware, lead_us: int | None) -> HardwareStatus:
    """What users and a later operator must know of the hardware.

    Args:
        hardware: that plans are rehearsed under.
        lead_us: median lead of marks in the latest iterations; None: not known.
    """
    return HardwareStatus(
        gpu=hardware.model,
        switch_latency_median_microseconds=hardware.p50_us,
        switch_latency_p99_microseconds=hardware.p99_us,
        call_microseconds=hardware.call_us,
        gpus_per_lock=hardware.gpus_per_lock,
        figures=hardware.basis.name.capitalize(),
        source=hardware.source,
        marks=hardware.marks.label if hardware.marks else "Unknown",
        noise_parts_per_million=hardware.noise_ppm,
        median_lead_microseconds=lead_us,
        clocks=tuple(
            ClockLatencyStatus(megahertz=one.mhz, median_microseconds=one.p50_us, p99_microseconds=one.p99_us)
            for one in hardware.clocks
        )
        or None,
    )


def hardware_from_status(status: object) -> Hardware | None:
    """The hardware that an earlier operator planned with, but for the pipelines, which the spec says; None: it stored
    none, or none that can be read.
    """
    known = parse_stored(HardwareStatus, status)
    if known is None or known.figures.upper() not in LatencyBasis.__members__:
        return None
    clocks = {
        one.megahertz: ClockTimes(
            one.megahertz, one.median_microseconds, max(one.median_microseconds, one.p99_microseconds)
        )
        for one in known.clocks or ()
    }
    return Hardware(
        model=known.gpu,
        p50_us=known.switch_latency_median_microseconds,
        p99_us=known.switch_latency_p99_microseconds,
        call_us=known.call_microseconds,
        gpus_per_lock=known.gpus_per_lock,
        marks=next((marks for marks in MarkSource if marks.label == known.marks), None),
        noise_ppm=known.noise_parts_per_million,
        basis=LatencyBasis[known.figures.upper()],
        source=known.source,
        clocks=tuple(clocks[mhz] for mhz in sorted(clocks)),
    )


def job_latency(gpus: Iterable[Gpu]) -> StoredLatency | None:
    """What was measured on a job's GPUs, for later jobs on the same model; None: too little.

    Args:
        gpus: of the job. Those of its most frequent model and driver count.
    """
    known = [(gpu, gpu.latency) for gpu in gpus if gpu.latency]
    if not known:
        return None
    (model, driver), _ = Counter((gpu.model, gpu.driver) for gpu, _ in known).most_common(1)[0]
    measured = measured_latency(
        model, [latency for gpu, latency in known if (gpu.model, gpu.driver) == (model, driver)]
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


def _described(nodes: list[Node], gpus: list[Gpu], stored: StoredLatency | None) -> Hardware | None:
    if not gpus or not all(gpu.model for gpu in gpus):
        return None
    # Of different models the one that is slowest by what is published: the others wait for it.
    model = max(sorted({gpu.model for gpu in gpus}), key=lambda name: published_latency(name).p99_s)
    own = [gpu.latency for gpu in gpus if gpu.model == model and gpu.latency is not None]
    latency, basis, source = _latency(model, own, stored)
    return Hardware(
        model=model,
        p50_us=latency.p50_us,
        p99_us=latency.p99_us,
        call_us=latency.call_us,
        gpus_per_lock=min(_largest_group(nodes), _MAX_GPUS) if latency.shared_lock else 1,
        basis=basis,
        source=source,
        # All GPUs of the model, not the busiest alone: which clocks one changes to depends on its stage.
        clocks=clock_times(latency, own if basis is LatencyBasis.MEASURED else [latency]),
    )


def _latency(
    model: str, own: list[ClockLatency], stored: StoredLatency | None
) -> tuple[ClockLatency, LatencyBasis, str]:
    measured = measured_latency(model, own)
    if measured is not None:
        return measured, LatencyBasis.MEASURED, "measured on GPUs of the job"
    if stored is not None and stored.model == model:
        driver = f" with driver {stored.driver}" if stored.driver else ""
        return stored.latency, LatencyBasis.STORED, f"measured before on this model{driver}, stored with the profile"
    assumed = published_latency(model)
    return ClockLatency(**asdict(assumed)), LatencyBasis.ASSUMED, assumed.source


def _with_clocks(hardware: Hardware, clocks: tuple[ClockTimes, ...]) -> Hardware:
    """The same with these clocks. All others take at least as long as the one in the middle: under a plan that uses
    quick clocks only, what is measured of all changes says little of others. That depends on all clocks that are known,
    so it comes after those that are found now and those that are in use were put together.
    """
    if not clocks:
        return hardware
    p50_us = max(hardware.p50_us, round(median(one.p50_us for one in clocks)))
    p99_us = max(hardware.p99_us, p50_us, round(median(one.p99_us for one in clocks)))
    return replace(hardware, p50_us=p50_us, p99_us=p99_us, clocks=clocks)


def _together(in_use: tuple[ClockTimes, ...], found: tuple[ClockTimes, ...]) -> tuple[ClockTimes, ...]:
    """Clocks of both, as found where they are. Those in use have priority: no clock is removed for another one."""
    known = {one.mhz: one for one in in_use}
    for one in found:
        if one.mhz in known or len(known) < MAX_CLOCKS:
            known[one.mhz] = one
    return tuple(known[mhz] for mhz in sorted(known))


def _largest_group(nodes: Iterable[Node]) -> int:
    """The most GPUs of one stage on one node: they change clocks at the same moments."""
    return max(max(Counter(rank.stage for rank in node.ranks.values()).values(), default=1) for node in nodes)


def _differs(a: Hardware, b: Hardware) -> bool:
    """Whether ``b``, found, differs so much from ``a``, in use, that it is worth another solve."""
    best = MarkSource.GPU
    if (a.model, a.gpus_per_lock, a.marks or best) != (b.model, b.gpus_per_lock, b.marks or best):
        return True
    if b.clocks and not a.clocks:
        return True
    latencies = [(a.p50_us, b.p50_us), (a.p99_us, b.p99_us)]
    if a.gpus_per_lock > 1:
        latencies.append((a.call_us, b.call_us))
    of_clock = {one.mhz: one.p50_us for one in a.clocks}
    if any(one.p50_us > ONE_CLOCK * max(SHORT_US, of_clock.get(one.mhz, a.p50_us)) for one in b.clocks):
        return True
    pairs = [(max(SHORT_US, in_use), max(SHORT_US, found)) for in_use, found in latencies]
    pairs.append((max(1, a.noise_ppm), max(1, b.noise_ppm)))
    better = BETTER if a.measured else CHANGE
    return any(found > CHANGE * in_use or in_use > better * found for in_use, found in pairs)


def _rounded(found: Hardware) -> Hardware:
    if not found.measured:
        return replace(found, noise_ppm=_step(found.noise_ppm))
    p50_us = _step(found.p50_us)
    return replace(
        found,
        p50_us=p50_us,
        p99_us=max(p50_us, _step(found.p99_us)),
        call_us=_step(found.call_us),
        noise_ppm=_step(found.noise_ppm),
        clocks=tuple(
            ClockTimes(one.mhz, fine, max(fine, _step(one.p99_us, _FINE_STEP)))
            for one in found.clocks
            for fine in [_step(one.p50_us, _FINE_STEP)]
        ),
    )


def _step(figure: int, step: float = _STEP) -> int:
    """The nearest power of a step, to two digits, or to three where steps are fine."""
    if figure <= 0:
        return 0
    power = step ** round(math.log(figure, step))
    digits = (1 if step > 1.1 else 2) - math.floor(math.log10(power))
    return max(1, round(round(power, digits)))
