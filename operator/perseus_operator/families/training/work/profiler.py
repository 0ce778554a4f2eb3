"""Measures the profile of one job: aggregates telemetry of its sweep, and stores what has been measured.

Each outcome is an event of ``Training.profiling``; ``features.profile.decision`` decides the next step. After every
clock the sweep is stored in the job's PerseusFrontier, so that a restarted operator goes on with it. The finished
profile is a PerseusProfile without an owner and outlives the job.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import zlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from perseus_core.iteration import IterationReport
from perseus_core.units import s_from_us
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.stored import MAX_SWEEP_BYTES
from perseus_operator.errors import InvalidProfile, KubeConflict, KubeError, KubeNotFound
from perseus_operator.families.training.features.hardware.hardware import job_latency
from perseus_operator.families.training.features.profile.decision import SaveSweep, StoreProfile
from perseus_operator.families.training.features.profile.progress import ProfilingProgress
from perseus_operator.families.training.features.profile.sweep import Sweep, blocking_power, from_json, to_json
from perseus_operator.families.training.shape import is_shared
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work import profile_source
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_operator.families.training.work.profile_source import StoredProfile
from perseus_operator.families.training.work.profile_versions import store_profile
from perseus_operator.jobs.services import Services, backoff_s
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.nodes.node import Node
from perseus_operator.solving.frontier import SolvedFrontier, encode_uniform_plans
from perseus_operator.solving.request import parse_profile
from perseus_proto.v1alpha1 import agent_pb2
from perseus_solver.schedules import Schedule

logger = logging.getLogger(__name__)

_MAX_UNPACKED_BYTES: Final = 16 << 20
"""Of a stored sweep: it is unpacked here."""


class Profiler:
    """The sweep of one job, if it needs one."""

    def __init__(self, training: Training, services: Services) -> None:
        self._training = training
        self._services = services
        self._restored = False
        self._aggregator: ProfileAggregator | None = None
        self._spent_before_us = 0
        """Training time spent on the sweep before this aggregator was made."""
        self._schedule_cache: tuple[str, Schedule] | None = None

    @property
    def _progress(self) -> ProfilingProgress:
        return self._training.profiling

    def begin(self, sweep: Sweep) -> None:
        """Measure this sweep from now on."""
        self._progress.sweep_begun(sweep)
        self._aggregator = None

    def observe(self, node: Node, report: IterationReport, schedule: Callable[[], Schedule]) -> None:
        """Take in a rank's report, if it ran a clock of the sweep.

        Args:
            node: where the rank runs.
            report: of one iteration.
            schedule: returns what the ranks execute.
        """
        progress, training = self._progress, self._training
        sweep = progress.sweep
        pushed = node.plans.pushed
        if sweep is None or sweep.finished or training.spec is None or pushed is None or pushed.digest != sweep.digest:
            return
        aggregator = self._aggregator
        if aggregator is None:
            shape = training.spec.pipeline
            ranks = JobShape(shape.data_parallel, shape.stages, shape.tensor_parallel)
            aggregator = ProfileAggregator(self._schedule(sweep, schedule), ranks, sweep.recipe.iterations)
            self._aggregator, self._spent_before_us = aggregator, sweep.spent_us
        aggregator.begin(sweep.point, sweep.measured)
        if training.nodes.slowed_pipelines:
            aggregator.interrupt()  # something slows a GPU now, which says nothing about the profile
            return
        reading = aggregator.observe(report, sweep.clocks_mhz[sweep.point])
        sweep = replace(sweep, spent_us=self._spent_before_us + round(aggregator.spent_us))
        progress.iteration_measured(
            sweep if reading is None else sweep.add(reading),
            counted=0 if reading else aggregator.counted,
            rejection=aggregator.rejection,
        )

    def plan_set(self, stages: Iterable[int], schedule: Callable[[], Schedule]) -> agent_pb2.PlanSet:
        """The sweep's clocks as a plan set for agents."""
        sweep = self._progress.sweep
        assert sweep is not None
        return encode_uniform_plans(self._schedule(sweep, schedule), stages, sweep.clocks_mhz)

    def observe_drift(
        self, iteration: JobIteration, solved: SolvedFrontier | None, profile: StoredProfile | None
    ) -> None:
        """Compare an iteration with the profile. Only profiles that an operator measured are measured again."""
        progress, training = self._progress, self._training
        if solved is None or profile is None or not profile.ours or not training.is_typical(iteration):
            return
        if (
            progress.stale_profile
            or progress.fault
            or training.nodes.slowed_pipelines
            or training.spec is None
            or training.spec.profile.online is None
        ):
            return
        if progress.iteration_compared(solved.planned_times.paces(iteration)):
            progress.profile_outdated(training.inputs.profile_digest or "")

    async def restore(self) -> None:
        """Go on with the sweep that an earlier operator stored, if there is one.

        Raises:
            KubeError: it is not known whether there is one.
        """
        if self._restored:
            return
        ref, progress = self._training.ref, self._progress
        try:
            stored = await self._services.kube.read_frontier(ref)
        except KubeNotFound:
            stored = None
        if stored is not None and stored.ours and progress.sweep is None:
            sweep = await asyncio.to_thread(_parse_sweep, stored.spec.get("sweep"))
            if sweep is not None:
                progress.sweep_restored(sweep)
                logger.info("%s: restored a sweep with %d measured clocks", ref, len(sweep.readings))
        self._restored = True

    async def write(self, action: SaveSweep | StoreProfile) -> None:
        """Store the sweep or the profile, as the planner decided."""
        try:
            await (self._save_sweep() if isinstance(action, SaveSweep) else self._store_profile())
        finally:
            self._progress.write_ended()

    async def _save_sweep(self) -> None:
        sweep = self._progress.sweep
        if sweep is not None and await self._store_sweep(sweep):
            self._progress.readings_written(sweep.measured)

    async def _store_profile(self) -> None:
        progress, spec, ref = self._progress, self._training.spec, self._training.ref
        sweep = progress.sweep
        assert sweep is not None
        assert spec is not None
        gpus = self._training.nodes.gpus
        # Of ranks that fit no pipeline only their number is known, which changes as those of replicas do.
        measured_on = profile_source.shape_of(spec) if self._training.shape.misfit is None else None
        profile = profile_source.profile_from_sweep(sweep, measured_on, gpus, job_latency(gpus))
        assert spec.profile.profile_ref is not None
        try:
            await asyncio.to_thread(parse_profile, profile["csv"].encode(), spec.pipeline.stages)
            stated = self._training.stated_spec
            owner = ref if stated is not None and not is_shared(stated.profile) else None
            kube, name, served = self._services.kube, spec.profile.profile_ref.name, self._services.namespaces
            await store_profile(kube, ref.namespace, name, profile, owner, served=served)
        except InvalidProfile as error:
            progress.failed(Explanation(Reason.PROFILING_FAILED, f"The measurements make no valid profile: {error}"))
        except KubeConflict as error:
            self._retry_later(f"profile not stored, another job stored one first: {error}")
            self._training.inputs.read_requested()
        except KubeError as error:
            self._retry_later(f"profile not stored: {error}")
        else:
            progress.profile_written()
            self._training.inputs.read_requested()

    async def end_sweep(self, digest: str) -> bool:
        """End the sweep if the profile that was read, of this digest, makes it unnecessary.

        Returns:
            Whether it does: the profile is the sweep's own, or one that another job stored first.
        """
        progress = self._progress
        sweep = progress.sweep
        if sweep is None or sweep.replaces == digest:
            return False
        summary = ""
        if progress.profile_stored:
            measured = f"Measured at {len(sweep.readings)} clocks in {s_from_us(sweep.spent_us):.0f} s of training"
            summary = f"{measured}: {sweep.finished}. {blocking_power(sweep.readings)} {sweep.certainty}".rstrip()
        stored = progress.readings_stored
        progress.sweep_ended(summary)
        self._aggregator = None
        if stored:
            await self._store_sweep(None)
        return True

    async def _store_sweep(self, sweep: Sweep | None) -> bool:
        ref = self._training.ref
        data = b"" if sweep is None else await asyncio.to_thread(lambda: zlib.compress(to_json(sweep).encode()))
        if len(data) > MAX_SWEEP_BYTES:
            logger.warning("%s: a sweep of %d bytes is too large to store", ref, len(data))
            return True
        try:
            text = base64.b64encode(data).decode() if data else None
            await self._services.kube.write_frontier(ref, {"sweep": text})
        except KubeError as error:
            self._retry_later(f"sweep not stored, a restarted operator would measure again: {error}")
            return False
        return True

    def _retry_later(self, why: str) -> None:
        retry_at_s = self._services.monotonic_s() + backoff_s(self._progress.failures)
        self._progress.write_failed(retry_at_s=retry_at_s)
        logger.warning("%s: %s", self._training.ref, why)

    def _schedule(self, sweep: Sweep, schedule: Callable[[], Schedule]) -> Schedule:
        if self._schedule_cache is None or self._schedule_cache[0] != sweep.schedule:
            self._schedule_cache = sweep.schedule, schedule()
        return self._schedule_cache[1]


def _parse_sweep(stored: object) -> Sweep | None:
    if not isinstance(stored, str):
        return None
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(base64.b64decode(stored, validate=True), _MAX_UNPACKED_BYTES)
        return from_json(text.decode()) if unpacker.eof else None
    except (ValueError, zlib.error):
        return None
