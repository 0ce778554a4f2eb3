"""What one job's frontier is solved from: the profile and, for a custom schedule, its CSV.

Each outcome is an event of ``JobState``; the profile's text stays here. A calibration that is stored with the profile
is restored, and a profile that was read may end a sweep.
"""

from __future__ import annotations

import asyncio
import hashlib

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.job import JobSpec, Mode, Profile
from perseus_operator.controller import schedule_source
from perseus_operator.controller.calibrator import Calibrator
from perseus_operator.controller.observer import Observer
from perseus_operator.controller.profile_source import StoredProfile, read_profile
from perseus_operator.controller.profiler import Profiler
from perseus_operator.controller.services import Services
from perseus_operator.errors import InvalidProfile, InvalidSchedule, KubeError
from perseus_operator.planning.observation import Basis
from perseus_operator.planning.state import JobState
from perseus_operator.solving.request import SolveRequest, check_profile


class SolveInputs:
    """Profile and schedule of one job."""

    def __init__(
        self, state: JobState, services: Services, calibrator: Calibrator, profiler: Profiler, observer: Observer
    ) -> None:
        self.profile: StoredProfile | None = None
        """The profile in use."""
        self._state = state
        self._services = services
        self._calibrator = calibrator
        self._profiler = profiler
        self._observer = observer
        self._profile_csv: bytes | None = None
        self._restored_for: Profile | None = None
        """The profile beside which a stored calibration was looked for."""

    def request(self, profile_csv: bytes | None = None) -> SolveRequest:
        """The inputs as they are now, from which the digest was made; they may change while a solve waits or runs.

        Args:
            profile_csv: of a profile that is not accepted yet; None: of the accepted one.
        """
        state, profile_csv = self._state, self._profile_csv if profile_csv is None else profile_csv
        spec = state.spec
        assert spec is not None
        return SolveRequest(
            profile_csv=(profile_csv or b"").decode(errors="replace"),
            schedule=spec.pipeline.solver_name,
            stages=spec.pipeline.stages,
            microbatches=spec.pipeline.solved_microbatches,
            chunks=spec.pipeline.chunks,
            blocking_power_mw=state.blocking_power_mw,
            points=spec.points,
            calibration=self._calibrator.calibration,
            schedule_csv=state.inputs.schedule_csv or "",
            switch_loss=spec.switching.max_energy_loss_ratio if spec.switching else None,
            hardware=state.hardware.in_use.to_json() if state.hardware.in_use else "",
        )

    async def read(self) -> None:
        """Read the profile, and the schedule if the spec names a ConfigMap for it."""
        state = self._state
        assert state.spec is not None
        profile, mode = state.spec.profile, state.spec.mode
        fault = None
        at_s = None
        try:
            if state.spec.pipeline.schedule_ref is not None:
                await self._read_schedule()
            fault = await self._read_profile()
            # If the spec was edited meanwhile, what was read is not what is wanted any more.
            at_s = self._services.monotonic_s() if (state.spec.profile, state.spec.mode) == (profile, mode) else None
        finally:
            state.inputs.read_ended(at_s=at_s, profile_fault=fault)

    async def collect_schedule(self) -> None:
        """Assemble the schedule once all training processes have reported what they execute."""
        state = self._state
        reported = {rank_id: own for node in state.nodes.values() for rank_id, own in node.declared_schedules.items()}
        try:
            schedule_csv = await asyncio.to_thread(schedule_source.collect_schedule, state, reported)
            if schedule_csv is not None:
                await self._accept_schedule(schedule_csv)
                if self._restored_for is None:
                    state.inputs.read_requested()  # only now is it known whether a stored calibration fits
        except InvalidSchedule as error:
            state.inputs.schedule_rejected(Explanation(Reason(error.reason), str(error)))

    async def _read_schedule(self) -> None:
        state, ref = self._state, self._state.ref
        assert state.spec is not None
        try:
            schedule_csv = await schedule_source.read_schedule_csv(
                self._services.kube, ref.namespace, state.spec.pipeline
            )
            await self._accept_schedule(schedule_csv)
        except InvalidSchedule as error:
            state.inputs.schedule_rejected(Explanation(Reason(error.reason), str(error)))
        except KubeError as error:
            if state.inputs.schedule_csv is None:  # otherwise what was read before stays
                message = f"spec.pipeline.scheduleRef: {error}"
                state.inputs.schedule_rejected(Explanation(Reason.SCHEDULE_UNREADABLE, message))

    async def _accept_schedule(self, schedule_csv: str) -> None:
        state = self._state
        assert state.spec is not None
        if schedule_csv != state.inputs.schedule_csv:
            await asyncio.to_thread(schedule_source.check_schedule, schedule_csv, state.spec.pipeline)
        state.inputs.schedule_accepted(schedule_csv)

    async def _read_profile(self) -> Explanation | None:
        state = self._state
        assert state.spec is not None
        profile, mode = state.spec.profile, state.spec.mode
        try:
            if profile.online is not None:
                await self._profiler.restore()
            found = await self._find(state.spec)
            digest = hashlib.sha256(found.csv).hexdigest()
            if digest != state.inputs.profile_digest:
                await asyncio.to_thread(check_profile, found.csv, state.spec.pipeline.stages)
            own = found.basis is Basis.PROFILE
            if own and self._restored_for != profile and state.schedule_known:
                await self._calibrator.restore(found, self.request(found.csv))
                self._restored_for = profile
            if own and await self._profiler.end_sweep(digest):
                self._calibrator.discard_record()
        except InvalidProfile as error:
            return Explanation(Reason(error.reason), str(error))
        except KubeError as error:
            return Explanation(Reason.PROFILE_UNREADABLE, f"{profile.where}: {error}")
        if (state.spec.profile, state.spec.mode) == (profile, mode):
            self._profile_csv, self.profile = found.csv, found
            state.profile_accepted(digest, found.power_mw, found.latency, gpu_model=found.gpu_model)
            state.observation.basis_accepted(found.basis, found.basis_source)
        return None

    async def _find(self, spec: JobSpec) -> StoredProfile:
        """The profile that the spec names, of the job's namespace or of one that its class shares; in mode Observe
        without one what the job's savings can be predicted from.
        """
        state, kube = self._state, self._services.kube
        try:
            return await read_profile(kube, state.ref.namespace, spec)
        except InvalidProfile as error:
            if error.reason not in (Reason.PROFILE_NOT_FOUND, Reason.CONFIG_MAP_NOT_FOUND):
                raise
            absent = error
        grants = self._services.grants
        shared = await grants.shared_namespace(state.energy_class, state.ref.namespace) if grants else None
        named = state.stated_spec is not None and state.stated_spec.profile.profile_ref is not None
        if shared is not None and named:
            try:
                return await read_profile(kube, shared, spec)
            except InvalidProfile as error:
                if error.reason != Reason.PROFILE_NOT_FOUND:
                    raise
        if spec.mode is Mode.OBSERVE:
            return await self._observer.profile(shared)
        raise absent
