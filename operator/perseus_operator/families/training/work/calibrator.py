"""Calibrates one job: records its iterations, has a worker process fit them, stores the result for later jobs.

Each outcome is an event of ``Training.calibration``. The planner decides when a calibration is due, and that a new one
needs a new frontier.
"""

from __future__ import annotations

import asyncio
import logging

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.api.stored import MAX_CALIBRATION_BYTES
from perseus_operator.errors import InvalidProfile, KubeError, KubeNotFound, SolveFailed
from perseus_operator.families.training.training import Training
from perseus_operator.families.training.work.profile_source import StoredProfile
from perseus_operator.jobs.services import Services
from perseus_operator.nodes.iterations import JobIteration
from perseus_operator.solving.calibration import (
    CalibrationResult,
    RecentIterations,
    calibration_key,
    check_calibration,
    parse_calibration_result,
)
from perseus_operator.solving.frontier import SolvedFrontier
from perseus_operator.solving.request import SolveRequest
from perseus_solver.model.profile import Profile as ParsedProfile

logger = logging.getLogger(__name__)


class Calibrator:
    """The recorded iterations of one job, and the calibration in use."""

    def __init__(self, training: Training, services: Services) -> None:
        self._training = training
        self._services = services
        self._record: RecentIterations | None = None
        self._calibration = ""

    @property
    def calibration(self) -> str:
        """JSON of the calibration to plan with; empty: none."""
        return self._calibration if self._training.calibration.digest_in_use else ""

    def record(self, iteration: JobIteration, solved: SolvedFrontier | None) -> None:
        """Record an iteration that ran plans of this frontier, if it is typical."""
        if solved is None or not self._training.is_typical(iteration):
            return
        if self._record is None or self._record.schedule.instructions != solved.schedule.instructions:
            self._record = RecentIterations(solved.schedule)
        if self._record.add(iteration, solved.planned_times):
            self._training.calibration.iteration_recorded(len(self._record))

    def discard_record(self) -> None:
        """The profile has changed: iterations under plans of the old one explain nothing any more."""
        self._record = None
        self._training.calibration.record_discarded()

    async def calibrate(self, inputs: SolveRequest, profile: StoredProfile | None) -> None:
        """Calibrate on the recorded iterations; plan with the result if it changes predictions noticeably.

        Args:
            inputs: of the frontier in use.
            profile: with which the result is stored.
        """
        progress, record = self._training.calibration, self._record
        program = progress.programs
        try:
            if record is None:
                return
            answer = await self._services.solver.calibrate(record.request(inputs), self._training.ref.namespace)
            result = await asyncio.to_thread(parse_calibration_result, answer)
        except (InvalidProfile, SolveFailed) as error:
            progress.failed(Explanation(Reason.CALIBRATION_FAILED, str(error)))
        else:
            if progress.programs != program:
                return
            progress.calibrated(result.quality)
            if result.is_worth_using(progress.digest_in_use):
                self._adopt(result)
                await self._store(result.text, inputs, profile)
        finally:
            progress.run_ended()

    async def restore(self, profile: StoredProfile, parsed: ParsedProfile, inputs: SolveRequest) -> None:
        """Use the calibration that an earlier job with the same profile and schedule stored, if there is one.

        Args:
            profile: where it is stored.
            parsed: the same profile.
            inputs: of the job's frontier.

        Raises:
            KubeError: it is not known whether there is one.
        """
        progress = self._training.calibration
        program = progress.programs
        try:
            stored = await self._services.kube.read_profile(profile.namespace, profile.name)
        except KubeNotFound:
            return
        text = (stored.status.get("calibrations") or {}).get(calibration_key(inputs))
        if not isinstance(text, str):
            return
        try:
            result = await asyncio.to_thread(check_calibration, text, inputs, parsed)
        except SolveFailed as error:
            message = f"PerseusProfile {profile.name}, status.calibrations: {error}; plans do without it."
            progress.failed(Explanation(Reason.CALIBRATION_INVALID, message))
        else:
            if progress.programs == program:
                progress.calibrated(result.quality)
                self._adopt(result)

    def _adopt(self, result: CalibrationResult) -> None:
        self._calibration = result.text
        self._training.calibration.adopted(result.quality.digest)

    async def _store(self, text: str, inputs: SolveRequest, profile: StoredProfile | None) -> None:
        """Store it in the status of the PerseusProfile; where a ConfigMap of the user holds the profile, in that of an
        empty one of this name.
        """
        ref, kube = self._training.ref, self._services.kube
        if profile is None or profile.namespace != ref.namespace:
            return  # what is another namespace's is read, and never written
        if len(text) > MAX_CALIBRATION_BYTES:
            logger.warning("%s: calibration of %d bytes is too large to store", ref, len(text))
            return
        stored = {calibration_key(inputs): text}
        try:
            await kube.write_calibrations(ref.namespace, profile.name, stored, profile.config_map)
        except KubeError as error:
            logger.warning("%s: calibration not stored for other jobs: %s", ref, error)
