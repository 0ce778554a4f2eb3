"""Gets the frontier of one job: from its PerseusFrontier, if an earlier solve had the same inputs, or from a solver
process.

A PerseusFrontier is garbage-collected with its PerseusJob. It spares a restarted operator to solve again; what is found
there is verified before it is used. Jobs with the same inputs share one solve.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from perseus_core.units import ms_from_s
from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.errors import AnswerRefused, InvalidProfile, KubeError, SolveFailed, SolveTimeout
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.services import Services
from perseus_operator.solving.frontier import (
    SolvedFrontier,
    frontier_to_spec,
    open_frontier,
    stored_frontier,
)
from perseus_operator.solving.request import SolveRequest
from perseus_solver.errors import SolverError
from perseus_solver.model.profile import Profile

logger = logging.getLogger(__name__)


class FrontierLoader:
    """The frontier of one job."""

    def __init__(self, training: Training, services: Services) -> None:
        self.solved: SolvedFrontier | None = None
        """The frontier in force with its plans; the planner's view of it is in the job's training."""
        self._coming: SolvedFrontier | None = None
        """The same of the state's coming one."""
        self._training = training
        self._services = services

    async def load(self, digest: str, request: SolveRequest, profile: Profile | None) -> None:
        """Restore or solve the frontier of these inputs, and note the outcome.

        Args:
            digest: of the inputs, see ``frontier_inputs.inputs_digest``.
            request: the inputs.
            profile: of the inputs, parsed.
        """
        training, metrics = self._training, self._services.metrics
        try:
            solved = await self._restore(digest, request, profile)
            restored = solved is not None
            if solved is None:
                solved = self._services.cache.known(digest) or await self._solve(digest, request, profile)
                await self._store(solved)
            else:
                metrics.restores.inc()
        except InvalidProfile as error:
            training.solve.failed(digest, Explanation(Reason.PROFILE_INVALID, str(error)))
        except AnswerRefused as error:
            metrics.solves.labels("failed").inc()
            refused = Explanation(Reason.SOLVE_FAILED, f"{error}; it is asked again after a pause")
            training.solve.refused(digest, refused, now_s=self._services.monotonic_s())
        except SolveFailed as error:
            metrics.solves.labels("failed").inc()
            reason = Reason.SOLVE_TIMEOUT if isinstance(error, SolveTimeout) else Reason.SOLVE_FAILED
            training.solve.failed(digest, Explanation(reason, str(error)))
        else:
            if training.solve.solving_forgotten:
                return
            training.solve_succeeded(replace(solved.view, restored=restored), solved.planned_times)
            self._coming = solved
            if training.solve.coming is None:
                self._adopted()
        finally:
            training.solve.ended()

    def adopt(self) -> None:
        """Let the coming frontier be in force."""
        self._training.frontier_adopted()
        self._adopted()

    def _adopted(self) -> None:
        self.solved, self._coming = self._coming, None

    def find(self, digest: str) -> SolvedFrontier | None:
        """Return the frontier of a digest, in force or coming; None: it is neither."""
        frontiers = (self.solved, self._coming)
        return next((solved for solved in frontiers if solved is not None and solved.view.digest == digest), None)

    async def _restore(self, digest: str, request: SolveRequest, profile: Profile | None) -> SolvedFrontier | None:
        ref, kube = self._training.ref, self._services.kube
        try:
            stored = await kube.read_frontier(ref)
        except KubeError:
            return None
        claimed = stored_frontier(stored, digest)
        if claimed is None:
            return None
        data, solve_ms = claimed

        async def verify() -> SolvedFrontier | None:
            try:
                frontier = await self._services.solver.restore(request, data, ref.namespace)
            except (InvalidProfile, SolveFailed) as error:
                logger.warning("%s: the stored frontier is not used: %s", ref, error)
                return None
            return await _opened(frontier, request, profile, digest, solve_ms, restored=True)

        solved = await self._services.cache.restored(ref.namespace, digest, data, verify)
        if solved is not None and ref.uid not in stored.owners:
            # An earlier job of the same name owns the object, and takes it along when it is deleted.
            await self._store(solved)
        return solved

    async def _solve(self, digest: str, request: SolveRequest, profile: Profile | None) -> SolvedFrontier:
        """Each job waits for its own turn, even if others wait for the same; what comes of it they share."""
        data, seconds = await self._services.solver.solve(request, self._training.ref.namespace)

        async def read() -> SolvedFrontier:
            logger.info("%s: frontier solved in %.3f s", self._training.ref, seconds)
            self._services.metrics.solves.labels("solved").inc()
            return await _opened(data, request, profile, digest, ms_from_s(seconds), restored=False)

        solved = await self._services.cache.solved(digest, read)
        assert solved is not None
        return solved

    async def _store(self, solved: SolvedFrontier) -> None:
        ref = self._training.ref
        spec = frontier_to_spec(solved)
        if spec is None:
            logger.warning("%s: frontier of %d bytes is too large to store", ref, len(solved.data))
            return
        try:
            await self._services.kube.write_frontier(ref, spec)
        except KubeError as error:
            logger.warning("%s: frontier not stored, a restarted operator will solve again: %s", ref, error)


async def _opened(
    data: bytes, request: SolveRequest, profile: Profile | None, digest: str, solve_ms: int, *, restored: bool
) -> SolvedFrontier:
    """Read a frontier in a thread. Raises SolveFailed: it is none."""
    try:
        return await asyncio.to_thread(
            open_frontier, data, request, digest=digest, solve_ms=solve_ms, restored=restored, profile=profile
        )
    except SolverError as error:
        raise SolveFailed(f"the solver's answer is not used: {error}") from error
