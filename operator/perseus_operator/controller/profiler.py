"""Measures the profile of one job: keeps its sweep, feeds its meter, stores what has been measured.

Owned by the job's runner, which says when. Each outcome is noted in ``JobState.profiling``; what to do next is the
business of ``profiling_plan``. Progress is kept in a ConfigMap of the job's own after every clock, so that an operator
started anew goes on where this one was; the profile itself belongs to nobody and outlives the job.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from perseus_operator.api.conditions import Reason
from perseus_operator.controller import profile_source
from perseus_operator.controller.profile_aggregator import Meter, Shape
from perseus_operator.controller.services import BACKOFF_S, Services
from perseus_operator.errors import InvalidProfile, KubeConflict, KubeError, KubeNotFound
from perseus_operator.objects import ConfigMap
from perseus_operator.planning.iterations import JobIteration, Report
from perseus_operator.planning.profile_planner import KeepProfile, SaveSweep
from perseus_operator.planning.profiling.drift import DRIFT_REST, Drift
from perseus_operator.planning.profiling.sweep import Sweep, blocking_power, from_json, to_json
from perseus_operator.planning.state import Fault, JobState, Node, Profiling
from perseus_operator.solving.frontier import Solved, encode_uniform_plans
from perseus_operator.solving.request import SolveRequest, check_profile, schedule_of
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver.schedules import Schedule

logger = logging.getLogger(__name__)

_KEY: Final = "sweep"
_MOST_BYTES: Final = 700_000
"""Of one sweep in a ConfigMap: base64 makes four bytes of three, and the object must stay below 1 MiB."""


class Profiler:
    """The sweep of one job, if it needs one."""

    def __init__(self, state: JobState, services: Services) -> None:
        self._state = state
        self._services = services
        self._recalled = False
        self._meter: Meter | None = None
        self._before_us = 0
        """Training time spent before this meter."""
        self._order: tuple[str, Schedule] | None = None

    @property
    def _own(self) -> Profiling:
        return self._state.profiling

    def edited(self) -> None:
        """The spec's profile is another one: what could not be done before may be tried again."""
        own = self._own
        own.fault, own.kept, own.retry_at_s = None, False, 0.0

    def begin(self, sweep: Sweep) -> None:
        """Measure this from now on."""
        own = self._own
        own.sweep, own.saved, own.kept = sweep, 0, False
        self._meter = None

    def take(self, node: Node, report: Report, request: Callable[[], SolveRequest]) -> None:
        """A rank's report, if it ran a clock of the sweep.

        Args:
            node: that it runs on.
            report: of one iteration.
            request: says what the ranks execute.
        """
        own, state = self._own, self._state
        sweep = own.sweep
        if sweep is None or sweep.finished or state.spec is None or node.pushed is None:
            return
        if node.pushed[0] != sweep.digest:
            return
        meter = self._meter
        if meter is None:
            shape = state.spec.pipeline
            ranks = Shape(shape.data_parallel, shape.stages, shape.tensor_parallel)
            meter = self._meter = Meter(self._schedule(sweep, request()), ranks, sweep.recipe.iterations)
            self._before_us = sweep.spent_us
        meter.begin(len(sweep.readings))
        if state.evident():
            meter.interrupt()  # a GPU says that it is slowed: true of today, not of the profile
            return
        reading = meter.take(report, sweep.clocks_mhz[len(sweep.readings)])
        sweep = replace(sweep, spent_us=self._before_us + round(meter.spent_us))
        own.sweep = sweep if reading is None else sweep.add(reading)
        own.counted, own.trouble = 0 if reading else meter.counted, meter.trouble

    def plan_set(self, stages: Iterable[int], request: SolveRequest) -> agent_pb2.PlanSet:
        """The sweep's clocks, as the agent wants them."""
        sweep = self._own.sweep
        assert sweep is not None
        return encode_uniform_plans(self._schedule(sweep, request), stages, sweep.clocks_mhz)

    def watch(self, iteration: JobIteration, solved: Solved | None, profile: ConfigMap | None) -> None:
        """Whether a job's iteration still takes what its profile says. Only profiles of our own are measured anew."""
        own, state = self._own, self._state
        if solved is None or profile is None or not profile.ours or not state.is_typical(iteration):
            return
        if own.stale or own.fault or state.evident() or state.spec is None or state.spec.profile.online is None:
            return
        own.drift = own.drift.observe(solved.promises.paces(iteration))
        if own.drift.persistent:
            stage, off = own.drift.stage, own.drift.pace - 1
            own.why = f"Stage {stage} takes {abs(off):.0%} {'more' if off > 0 else 'less'} time than profiled. "
            own.stale = state.profile_digest or ""
            own.drift = Drift()

    async def recall(self) -> None:
        """What an operator before this one has measured.

        Raises:
            KubeError: it is not known whether there is something.
        """
        if self._recalled:
            return
        ref, own = self._state.ref, self._own
        try:
            kept = await self._services.kube.read_config_map(ref.namespace, ref.profiling_config_map)
        except KubeNotFound:
            kept = None
        data = kept.binary.get(_KEY) if kept is not None else None
        if data and own.sweep is None:
            sweep = await asyncio.to_thread(_opened, data)
            if sweep is not None:
                own.sweep, own.saved, own.stale = sweep, len(sweep.readings), sweep.replaces
                logger.info("%s: %d clocks were measured before", ref, own.saved)
        self._recalled = True

    async def write(self, action: SaveSweep | KeepProfile) -> None:
        """What the planner wants to be written."""
        try:
            await (self._save() if isinstance(action, SaveSweep) else self._keep())
        finally:
            self._own.busy = False

    async def _save(self) -> None:
        own, sweep = self._own, self._own.sweep
        if sweep is not None and await self._store(sweep):
            own.saved = len(sweep.readings)

    async def _keep(self) -> None:
        own, spec, ref = self._own, self._state.spec, self._state.ref
        sweep = own.sweep
        assert sweep is not None
        assert spec is not None
        profile = profile_source.made_of(sweep, spec)
        csv = profile.data[spec.profile.config_map_ref.key].encode()
        try:
            await asyncio.to_thread(check_profile, csv, spec.pipeline.stages)
            await self._services.kube.write_beside(ref.namespace, None, profile)
        except InvalidProfile as error:
            own.fault = Fault(Reason.PROFILING_FAILED, f"What was measured is no profile: {error}")
        except KubeConflict as error:
            self._later(f"profile not kept, another has come before: {error}")
            self._state.profile_read_at_s = None
        except KubeError as error:
            self._later(f"profile not kept: {error}")
        else:
            own.kept, own.failures = True, 0
            self._state.profile_read_at_s = None

    async def settled(self, digest: str) -> bool:
        """A profile was read; True if it ends a sweep: it is the sweep's own, or another job's that came before."""
        own = self._own
        if own.sweep is None or own.sweep.replaces == digest:
            return False
        if own.kept:
            spent_s = own.sweep.spent_us / 1e6
            took = f"Measured at {len(own.sweep.readings)} clocks in {spent_s:.0f} s of training"
            own.remark = f"{took}: {own.sweep.finished}. {blocking_power(own.sweep.readings)}"
        again = own.remeasured + bool(own.stale)
        own.sweep, own.kept, own.stale, own.why, self._meter = None, False, "", "", None
        own.remeasured, own.drift = again, Drift(rest=DRIFT_REST * 2**again if again else 0)
        if own.saved:
            own.saved = 0
            await self._store(None)
        return True

    async def _store(self, sweep: Sweep | None) -> bool:
        ref, own = self._state.ref, self._own
        data = b"" if sweep is None else await asyncio.to_thread(lambda: zlib.compress(to_json(sweep).encode()))
        if len(data) > _MOST_BYTES:
            logger.warning("%s: a sweep of %d bytes is too large to keep", ref, len(data))
            return True
        try:
            await self._services.kube.write_owned_config_map(
                ref, ConfigMap(ref.profiling_config_map, {}, {_KEY: data} if data else {})
            )
        except KubeError as error:
            self._later(f"sweep not kept, a restart would measure again: {error}")
            return False
        own.failures = 0
        return True

    def _later(self, why: str) -> None:
        own = self._own
        own.retry_at_s = self._services.monotonic_s() + BACKOFF_S[min(own.failures, len(BACKOFF_S) - 1)]
        own.failures += 1
        logger.warning("%s: %s", self._state.ref, why)

    def _schedule(self, sweep: Sweep, request: SolveRequest) -> Schedule:
        if self._order is None or self._order[0] != sweep.schedule:
            self._order = sweep.schedule, schedule_of(request)
        return self._order[1]


def _opened(data: bytes) -> Sweep | None:
    try:
        return from_json(zlib.decompress(data).decode())
    except (zlib.error, UnicodeDecodeError):
        return None
