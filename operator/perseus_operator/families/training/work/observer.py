"""Observes one job in mode Observe, and finds what its savings can be predicted from; no clock is set for that.

Iterations at whatever clocks the GPUs are at are aggregated as those of a sweep are. What the prediction rests on is,
in this order: the profile that the job names (``profile_source``), a stored one with the same fingerprint and the same
durations, the published curves of the GPU model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from perseus_core.gpus import curves_of
from perseus_core.iteration import IterationReport
from perseus_core.units import mw_from_w, us_from_s
from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.pipeline import Pipeline
from perseus_operator.api.schema import parse
from perseus_operator.api.stored import ProfileSpec
from perseus_operator.errors import InvalidProfile, InvalidSpec
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.profile.estimate import SAME, distance, estimate
from perseus_operator.families.training.features.profile.observation import ITERATIONS
from perseus_operator.families.training.features.profile.reading import Reading
from perseus_operator.families.training.features.profile.sweep import Key
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.profile_aggregator import JobShape, ProfileAggregator
from perseus_operator.families.training.work.profile_source import StoredProfile, shape_of
from perseus_operator.jobs.services import Services
from perseus_operator.objects.values import StoredObject
from perseus_solver.schedules import Schedule

MOST_CANDIDATES: Final = 16
"""Profiles of a namespace that are looked at: each may hold a megabyte, and a tenant may store any number."""


class Observer:
    """What is observed of one job."""

    def __init__(self, training: Training, services: Services) -> None:
        self._training = training
        self._services = services
        self._aggregator: tuple[tuple[Pipeline, str | None], ProfileAggregator] | None = None
        """And the shape and schedule that it aggregates."""
        self._found: tuple[Reading, StoredProfile] | None = None
        """What the observation led to: profiles are searched once for each."""

    def observe(self, report: IterationReport, schedule: Callable[[], Schedule]) -> None:
        """Take in a rank's report of an iteration.

        Args:
            report: of one iteration.
            schedule: returns what the ranks execute.
        """
        training = self._training
        spec = training.spec
        observes = spec is not None and spec.mode is Mode.OBSERVE and spec.shape_known and training.schedule_known
        if spec is None or not observes or training.observation.observed is not None:
            self._aggregator = None
            return
        shape, runs = spec.pipeline, (spec.pipeline, training.inputs.schedule_csv)
        if self._aggregator is None or self._aggregator[0] != runs:
            ranks = JobShape(shape.data_parallel, shape.stages, shape.tensor_parallel)
            self._aggregator = runs, ProfileAggregator(schedule(), ranks, ITERATIONS)
            self._aggregator[1].begin(None)
        aggregator = self._aggregator[1]
        if training.nodes.slowed_pipelines:
            aggregator.interrupt()
            return
        reading = aggregator.observe(report, 0)
        training.observation.iteration_observed(aggregator.counted, aggregator.rejection)
        if reading is not None:
            training.observation.completed(reading)
            training.inputs.read_requested()

    async def profile(self, shared: str | None) -> StoredProfile:
        """Return what the job's savings can be predicted from, where it has no profile.

        Args:
            shared: namespace whose profiles the job may read, too; None: none.

        Raises:
            InvalidProfile: nothing yet; the message says what is missing.
            KubeError: stored profiles could not be read.
        """
        spec, observed = self._training.spec, self._training.observation.observed
        assert spec is not None
        if observed is None:
            raise InvalidProfile(Reason.OBSERVING, self._progress())
        if self._found is None or self._found[0] is not observed:
            profile = await self._matching(spec, observed, shared)
            self._found = observed, profile or self._estimated(observed)
        return self._found[1]

    def _progress(self) -> str:
        observation = self._training.observation
        obstacle = f" The latest one cannot be used: {observation.obstacle}." if observation.obstacle else ""
        counted = f"{observation.observed_iterations} of {ITERATIONS} iterations are observed"
        return f"The job has no profile. {counted}, at whatever clocks its GPUs are.{obstacle}"

    async def _matching(self, spec: JobSpec, observed: Reading, shared: str | None) -> StoredProfile | None:
        """The stored profile that is nearest to the job; None: none is of the same GPUs, driver and shape, or none of
        those takes as long.
        """
        best: tuple[float, StoredProfile] | None = None
        for namespace in dict.fromkeys((self._training.ref.namespace, shared or self._training.ref.namespace)):
            async for stored in self._services.kube.list_profiles(namespace, MOST_CANDIDATES):
                candidate = await self._compared(spec, observed, stored, namespace)
                if candidate is not None and (best is None or candidate[0] < best[0]):
                    best = candidate
        return None if best is None else best[1]

    async def _compared(
        self, spec: JobSpec, observed: Reading, stored: StoredObject, namespace: str
    ) -> tuple[float, StoredProfile] | None:
        """By what share a stored profile is off, and the profile; None: it is not of this job."""
        gpus = {(gpu.model, gpu.driver) for gpu in self._training.nodes.gpus}
        try:
            profile = parse(ProfileSpec, stored.spec, stored.name)
            if profile.csv is None or profile.blocking_power_milliwatts is None:
                return None
            if {(profile.gpu_model, profile.driver_version or "")} != gpus or profile.measured_on != shape_of(spec):
                return None
            times_us = await asyncio.to_thread(_times_us, profile.csv.encode(), spec.pipeline.stages)
        except (InvalidSpec, InvalidProfile):
            return None  # somebody's, and not named by this job
        apart = distance(observed, times_us)
        if apart is None or apart > SAME:
            return None
        same = f"the same GPUs, driver and shape, and instructions that take as long within {apart:.1%}"
        return apart, StoredProfile(
            stored.name,
            profile.csv.encode(),
            namespace,
            power_mw=profile.blocking_power_milliwatts,
            gpu_model=profile.gpu_model or "",
            basis=PlanBasis.MATCHING,
            basis_source=f"PerseusProfile {stored.name} of namespace {namespace}: {same}",
        )

    def _estimated(self, observed: Reading) -> StoredProfile:
        models = sorted({gpu.model for gpu in self._training.nodes.gpus})
        if len(models) != 1:
            message = f"The job runs on {len(models)} models of GPU: predictions need one, or a profile."
            raise InvalidProfile(Reason.PROFILE_NOT_FOUND, message)
        curves = curves_of(models[0])
        if curves is None:
            message = f"The job has no profile, and for {models[0]} no curves are published: nothing can be predicted."
            raise InvalidProfile(Reason.PROFILE_NOT_FOUND, message)
        estimated = estimate(observed, curves)
        how = "partly assumed" if curves.assumed else "fitted to published profiles"
        source = f"curves of {curves.name}, {how}, through the time and energy of {ITERATIONS} iterations of the job"
        return StoredProfile(
            f"curves of {curves.name}",
            estimated.csv.encode(),
            self._training.ref.namespace,
            power_mw=mw_from_w(estimated.blocking_power_w),
            basis=PlanBasis.MODEL,
            basis_source=source,
        )


def _times_us(csv: bytes, stages: int) -> dict[Key, dict[int, float]]:
    """Microseconds by stage, kind and chunk, and by clock.

    Raises:
        InvalidProfile: it is no usable profile.
    """
    from perseus_solver.errors import SolverError
    from perseus_solver.model.profile import read_profile

    try:
        profile = read_profile(csv, stages=stages)
    except SolverError as error:
        raise InvalidProfile(Reason.PROFILE_INVALID, str(error)) from error
    return {
        (stage, kind.label, chunk): {
            round(mhz): us_from_s(time_s)
            for mhz, time_s in zip(table.frequency_mhz.tolist(), table.time_s.tolist(), strict=True)
        }
        for (stage, kind, chunk), table in profile.tables.items()
    }
