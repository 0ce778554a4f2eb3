"""What one job's frontier is solved from: the profile and, for a custom schedule, its CSV.

Each outcome is an event of ``Training``; the profile's text stays here. A calibration that is stored with the profile
is restored, and a profile that was read may end a sweep.
"""

from __future__ import annotations

import asyncio
import hashlib

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, Profile
from perseus_operator.api.pipeline import Pipeline, ScheduleName
from perseus_operator.errors import InvalidProfile, InvalidSchedule, KubeError
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.shape import Misfit, declared_schedules
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work import schedule_source
from perseus_operator.families.training.work.calibrator import Calibrator
from perseus_operator.families.training.work.observer import Observer
from perseus_operator.families.training.work.profile_source import StoredProfile, read_profile
from perseus_operator.families.training.work.profiler import Profiler
from perseus_operator.jobs.services import Services
from perseus_operator.solving.request import SolveRequest, parse_profile, schedule_of
from perseus_solver.model.profile import Profile as ParsedProfile
from perseus_solver.schedules import Schedule


class SolveInputs:
    """Profile and schedule of one job."""

    def __init__(
        self, training: Training, services: Services, calibrator: Calibrator, profiler: Profiler, observer: Observer
    ) -> None:
        self.profile: StoredProfile | None = None
        """The profile in use."""
        self.parsed: ParsedProfile | None = None
        """The same, parsed: once, when it was read."""
        self._training = training
        self._services = services
        self._calibrator = calibrator
        self._profiler = profiler
        self._observer = observer
        self._profile_csv: bytes | None = None
        self._schedule_csv: str | None = None
        """That the spec names; None: it names none, or it could not be read."""
        self._restored_for: Profile | None = None
        """The profile beside which a stored calibration was looked for."""

    def request(self, profile_csv: bytes | None = None) -> SolveRequest:
        """The inputs as they are now, from which the digest was made; they may change while a solve waits or runs.

        Args:
            profile_csv: of a profile that is not accepted yet; None: of the accepted one.
        """
        training, profile_csv = self._training, self._profile_csv if profile_csv is None else profile_csv
        spec = training.spec
        assert spec is not None
        return SolveRequest(
            profile_csv=(profile_csv or b"").decode(errors="replace"),
            schedule=spec.pipeline.solver_name,
            stages=spec.pipeline.stages,
            microbatches=spec.pipeline.solved_microbatches,
            chunks=spec.pipeline.chunks,
            blocking_power_mw=training.blocking_power_mw,
            points=spec.points,
            calibration=self._calibrator.calibration,
            schedule_csv=training.inputs.schedule_csv or "",
            switch_loss=spec.switching.max_energy_loss_ratio if spec.switching else None,
            hardware=training.hardware.in_use.to_json() if training.hardware.in_use else "",
        )

    def schedule(self) -> Schedule:
        """What the ranks execute, by the inputs as they are now."""
        return schedule_of(self.request(), self.parsed)

    async def read(self) -> None:
        """Read the profile, and the schedule if the spec names a ConfigMap for it."""
        training = self._training
        assert training.spec is not None
        profile, mode = training.spec.profile, training.spec.mode
        fault = None
        at_s = None
        try:
            if training.shape.stated is not None and training.shape.stated.schedule_ref is not None:
                await self._read_schedule(training.shape.stated)
            fault = await self._read_profile()
            # If the spec was edited meanwhile, what was read is not what is wanted any more.
            at_s = (
                self._services.monotonic_s() if (training.spec.profile, training.spec.mode) == (profile, mode) else None
            )
        finally:
            training.inputs.read_ended(at_s=at_s, profile_fault=fault)

    async def collect_schedule(self) -> None:
        """Assemble the schedule once all training processes have reported what they execute."""
        training = self._training
        reported = {
            rank_id: schedule
            for node in training.nodes.values()
            for rank_id, schedule in node.declared_schedules.items()
        }
        assert training.spec is not None
        shape = training.spec.pipeline
        try:
            schedule_csv = await asyncio.to_thread(schedule_source.collect_schedule, shape, reported)
            if schedule_csv is not None:
                await self._accept_reported(schedule_csv, shape)
        except InvalidSchedule as error:
            training.inputs.schedule_rejected(Explanation(Reason(error.reason), str(error)))

    def comparable(self, stated: Pipeline) -> bool:
        """Whether it is known what a spec with this shape wants the training processes to execute."""
        return stated.schedule_ref is None or self._schedule_csv is not None

    async def compare(self, shape: Pipeline) -> None:
        """Find out whether what all training processes execute is a schedule of the shape that their places have."""
        training, misfit = self._training, None
        declared, schedule_csv = declared_schedules(training.nodes), training.inputs.schedule_csv
        try:
            if shape.schedule is not ScheduleName.FROM_RANKS:
                wanted_csv = self._schedule_csv or ""
                await asyncio.to_thread(schedule_source.compare_schedules, shape, declared, wanted_csv)
            elif schedule_csv is None:
                schedule_csv = await asyncio.to_thread(schedule_source.collect_schedule, shape, declared)
        except InvalidSchedule as error:
            misfit = Misfit.of(str(error), declared)
        if training.shape.is_outdated:
            return  # other processes have joined meanwhile
        training.shape_reported(shape if misfit is None else misfit.shape, misfit)
        if shape.schedule is ScheduleName.FROM_RANKS and misfit is None and schedule_csv is not None:
            await self._accept_reported(schedule_csv, shape)

    async def _accept_reported(self, schedule_csv: str, shape: Pipeline) -> None:
        inputs = self._training.inputs
        if schedule_csv != inputs.schedule_csv:
            await asyncio.to_thread(schedule_source.check_schedule, schedule_csv, shape)
        inputs.schedule_accepted(schedule_csv)
        if self._restored_for is None:
            inputs.read_requested()  # only now is it known whether a stored calibration fits

    async def _read_schedule(self, stated: Pipeline) -> None:
        training, ref = self._training, self._training.ref
        try:
            schedule_csv = await schedule_source.read_schedule_csv(self._services.kube, ref.namespace, stated)
            if schedule_csv != self._schedule_csv:
                await asyncio.to_thread(schedule_source.check_schedule, schedule_csv, stated)
                self._schedule_csv = schedule_csv
                training.shape.outdated()
        except InvalidSchedule as error:
            fault = Explanation(Reason(error.reason), str(error))
        except KubeError as error:
            if self._schedule_csv is not None:
                return  # what was read before stays
            fault = Explanation(Reason.SCHEDULE_UNREADABLE, f"spec.pipeline.scheduleRef: {error}")
        else:
            if training.shape.misfit is None:
                training.inputs.schedule_accepted(schedule_csv)
            return
        if training.shape.misfit is None:
            training.inputs.schedule_rejected(fault)

    async def _read_profile(self) -> Explanation | None:
        training = self._training
        assert training.spec is not None
        profile, mode = training.spec.profile, training.spec.mode
        try:
            if profile.online is not None:
                await self._profiler.restore()
            stored = await self._find(training.spec)
            digest = hashlib.sha256(stored.csv).hexdigest()
            parsed, stages = self.parsed, training.spec.pipeline.stages
            if parsed is None or parsed.stages != stages or digest != training.inputs.profile_digest:
                parsed = await asyncio.to_thread(parse_profile, stored.csv, stages)
            measured = stored.basis is PlanBasis.PROFILE
            if measured and self._restored_for != profile and training.schedule_known:
                await self._calibrator.restore(stored, parsed, self.request(stored.csv))
                self._restored_for = profile
            if measured and await self._profiler.end_sweep(digest):
                self._calibrator.discard_record()
        except InvalidProfile as error:
            return Explanation(Reason(error.reason), str(error))
        except KubeError as error:
            return Explanation(Reason.PROFILE_UNREADABLE, f"{profile.where}: {error}")
        if (training.spec.profile, training.spec.mode) == (profile, mode):
            self._profile_csv, self.profile, self.parsed = stored.csv, stored, parsed
            training.profile_accepted(digest, stored.power_mw, stored.latency, gpu_model=stored.gpu_model)
            training.observation.basis_accepted(stored.basis, stored.basis_source)
        return None

    async def _find(self, spec: JobSpec) -> StoredProfile:
        """The profile that the spec names, of the job's namespace or of one that its class shares; in mode Observe
        without one what the job's savings can be predicted from.
        """
        training, kube = self._training, self._services.kube
        try:
            return await read_profile(kube, training.ref.namespace, spec)
        except InvalidProfile as error:
            if error.reason not in (Reason.PROFILE_NOT_FOUND, Reason.CONFIG_MAP_NOT_FOUND):
                raise
            absent = error
        grants = self._services.grants
        shared = await grants.shared_namespace(training.job.energy_class, training.ref.namespace) if grants else None
        named = training.stated_spec is not None and training.stated_spec.profile.profile_ref is not None
        if shared is not None and named:
            try:
                return await read_profile(kube, shared, spec)
            except InvalidProfile as error:
                if error.reason != Reason.PROFILE_NOT_FOUND:
                    raise
        if spec.mode is Mode.OBSERVE:
            return await self._observer.profile(shared)
        raise absent
