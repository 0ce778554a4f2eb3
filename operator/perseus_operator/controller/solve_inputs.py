"""What one job's frontier is solved from: the profile and, where the schedule has no name, the order of instructions.

Owned by the job's runner, which says when to read. Each outcome is noted in ``JobState``; the profile's text stays
here. What is kept with a profile (a calibration, a sweep that it ends) is handed on to who knows about it.
"""

from __future__ import annotations

import asyncio
import hashlib

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import Profile
from perseus_operator.controller import profile_source, schedule_source
from perseus_operator.controller.calibrator import Learner
from perseus_operator.controller.profiler import Profiler
from perseus_operator.controller.services import Services
from perseus_operator.errors import InvalidOrder, InvalidProfile, KubeError
from perseus_operator.objects import ConfigMap
from perseus_operator.planning.state import Fault, JobState
from perseus_operator.solving.request import SolveRequest, check_profile


class Inputs:
    """Profile and order of one job."""

    def __init__(self, state: JobState, services: Services, learner: Learner, profiler: Profiler) -> None:
        self.profile_map: ConfigMap | None = None
        """Where the profile was found."""
        self._state = state
        self._services = services
        self._learner = learner
        self._profiler = profiler
        self._csv: bytes | None = None
        self._recalled: Profile | None = None
        """The profile beside which a calibration was looked for."""

    def request(self, csv: bytes | None = None) -> SolveRequest:
        """The inputs as they are now, which the digest was made from: while a solve waits or runs they may change."""
        state, csv = self._state, self._csv if csv is None else csv
        spec = state.spec
        assert spec is not None
        return SolveRequest(
            profile_csv=(csv or b"").decode(errors="replace"),
            schedule=spec.pipeline.solver_name,
            stages=spec.pipeline.stages,
            microbatches=spec.pipeline.microbatches or 0,
            chunks=spec.pipeline.chunks,
            blocking_power_mw=state.blocking_power_mw,
            points=spec.points,
            calibration=self._learner.calibration,
            order=state.order or "",
            switch_loss=spec.switching.max_energy_loss_ratio if spec.switching else None,
        )

    async def read(self) -> None:
        """Read what the spec names."""
        state = self._state
        assert state.spec is not None
        asked = state.spec.profile
        try:
            if state.spec.pipeline.schedule_ref is not None:
                await self._read_order()
            fault = await self._read_profile()
        finally:
            state.reading = False
        if state.spec.profile == asked:  # otherwise edited meanwhile: what was read is not what is wanted any more
            state.profile_read_at_s = self._services.monotonic_s()
            state.profile_fault = fault

    async def hear(self) -> None:
        """The training processes have told more of what they run."""
        state = self._state
        told = {place: own for node in state.nodes.values() for place, own in node.told.items()}
        try:
            order = await asyncio.to_thread(schedule_source.collect, state, told)
            if order is not None:
                await self._accept_order(order)
                if self._recalled is None:
                    state.profile_read_at_s = None  # only now can it be told whether a calibration fits
        except InvalidOrder as error:
            state.order_fault = Fault(Reason(error.reason), str(error))

    async def _read_order(self) -> None:
        state, ref = self._state, self._state.ref
        assert state.spec is not None
        try:
            await self._accept_order(
                await schedule_source.find(self._services.kube, ref.namespace, state.spec.pipeline)
            )
        except InvalidOrder as error:
            state.order_fault = Fault(Reason(error.reason), str(error))
        except KubeError as error:
            if state.order is None:  # otherwise what was read before stays
                state.order_fault = Fault(Reason.SCHEDULE_UNREADABLE, f"spec.pipeline.scheduleRef: {error}")

    async def _accept_order(self, order: str) -> None:
        state = self._state
        assert state.spec is not None
        if order != state.order:
            await asyncio.to_thread(schedule_source.check, order, state.spec.pipeline)
            state.order = order
        state.order_fault = None

    async def _read_profile(self) -> Fault | None:
        state = self._state
        assert state.spec is not None
        asked = state.spec.profile
        try:
            if asked.online is not None:
                await self._profiler.recall()
            found = await profile_source.find(self._services.kube, state.ref.namespace, state.spec)
            digest = hashlib.sha256(found.csv).hexdigest()
            if digest != state.profile_digest:
                await asyncio.to_thread(check_profile, found.csv, state.spec.pipeline.stages)
            if self._recalled != asked and state.order_known:
                await self._learner.recall(found.config_map, self.request(found.csv))
                self._recalled = asked
            if await self._profiler.settled(digest):
                self._learner.restart()
        except InvalidProfile as error:
            return Fault(Reason(error.reason), str(error))
        except KubeError as error:
            return Fault(Reason.PROFILE_UNREADABLE, f"ConfigMap {asked.config_map_ref.name}: {error}")
        if state.spec.profile == asked:
            self._csv, self.profile_map = found.csv, found.config_map
            state.profile_digest, state.measured_power_mw = digest, found.power_mw
        return None
