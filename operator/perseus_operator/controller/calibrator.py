"""Calibrates one job: keeps its iterations, has them fitted by a worker process, remembers the result for later jobs.

Owned by the job's runner, which says when. Each outcome is noted in ``JobState.learning``; whether a calibration is
due, and that a new one means a new frontier, is the planner's business.
"""

from __future__ import annotations

import asyncio
import logging

from perseus_operator.api.conditions import Reason
from perseus_operator.controller.services import Services
from perseus_operator.errors import InvalidProfile, KubeError, KubeNotFound, SolveFailed
from perseus_operator.objects import ConfigMap
from perseus_operator.planning.iterations import JobIteration
from perseus_operator.planning.state import Fault, JobState
from perseus_operator.solving import calibration
from perseus_operator.solving.frontier import Solved
from perseus_operator.solving.request import SolveRequest

logger = logging.getLogger(__name__)


class Learner:
    """What has been learnt of the job, and from what."""

    def __init__(self, state: JobState, services: Services) -> None:
        self._state = state
        self._services = services
        self._record: calibration.Record | None = None
        self.calibration = ""
        """JSON of the calibration to plan with; empty: none."""

    def take(self, iteration: JobIteration, solved: Solved | None) -> None:
        """One iteration of the job, under the plans of this frontier."""
        if solved is None or not self._state.is_typical(iteration):
            return
        if self._record is None or self._record.schedule.instructions != solved.schedule.instructions:
            self._record = calibration.Record(solved.schedule)
        if self._record.add(iteration, solved.promises):
            self._state.learning.kept = len(self._record)
            self._state.learning.since += 1

    def restart(self) -> None:
        """Another profile: iterations of plans made from the old one explain nothing any more. What is used stays."""
        self._record = None
        learning = self._state.learning
        learning.kept, learning.since, learning.begun = 0, 0, False

    async def calibrate(self, inputs: SolveRequest, profile: ConfigMap | None) -> None:
        """Judge the model on what was seen; plan with what was learnt if that makes a difference.

        Args:
            inputs: of the frontier in use.
            profile: the ConfigMap beside which the result is kept.
        """
        learning, record = self._state.learning, self._record
        try:
            if record is None:
                return
            data = await asyncio.to_thread(record.request(inputs).to_bytes)
            learnt = calibration.open_learnt(await self._services.solver.calibrate(data))
        except (InvalidProfile, SolveFailed) as error:
            learning.fault = Fault(Reason.CALIBRATION_FAILED, str(error))
        else:
            learning.verdict, learning.fault = learnt.verdict, None
            if learnt.is_worth_using(learning.in_use):
                self.calibration, learning.in_use = learnt.text, learnt.verdict.digest
                await self._keep(learnt.text, inputs, profile)
        finally:
            learning.running = False

    async def recall(self, profile: ConfigMap, inputs: SolveRequest) -> None:
        """What an earlier job with the same profile and pipeline has learnt.

        Raises:
            KubeError: it is not known whether there is something.
        """
        learning, name = self._state.learning, calibration.kept_name(profile.name)
        try:
            kept = await self._services.kube.read_config_map(self._state.ref.namespace, name)
        except KubeNotFound:
            return
        text = kept.data.get(calibration.kept_key(inputs))
        if text is None:
            return
        try:
            learnt = await asyncio.to_thread(calibration.check_calibration, text, inputs)
        except SolveFailed as error:
            learning.fault = Fault(Reason.CALIBRATION_INVALID, f"ConfigMap {name}: {error}; planning without it.")
        else:
            learning.verdict, learning.fault = learnt.verdict, None
            self.calibration, learning.in_use = learnt.text, learnt.verdict.digest

    async def _keep(self, text: str, inputs: SolveRequest, profile: ConfigMap | None) -> None:
        """Beside the profile, in an object of our own: the profile's is the user's."""
        ref, kube = self._state.ref, self._services.kube
        if profile is None:
            return
        if len(text) > calibration.MAX_STORED_BYTES:
            logger.warning("%s: calibration of %d bytes is too large to keep", ref, len(text))
            return
        kept = ConfigMap(calibration.kept_name(profile.name), {calibration.kept_key(inputs): text}, {})
        try:
            await kube.write_beside(ref.namespace, profile, kept)
        except KubeError as error:
            logger.warning("%s: calibration could not be kept for other jobs: %s", ref, error)
