"""What the demo sees of the system: the PerseusJob as any user reads it, and the counters of the simulated GPUs.

Nothing here depends on how quick the machine is. What is waited for is a state, with one limit of minutes; what is
measured takes as many iterations as its accuracy needs, and carries its interval.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from kubernetes import client

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import RunningJob
from perseus_sim.demo.results import Executed, Measurement, Prediction
from perseus_sim.demo.time_scale import TimeScale
from perseus_sim.training.coordinator import PipelineIteration
from perseus_solver.model.result import Frontier

LIMIT_S: Final = 900.0
"""The longest wait for anything: many times what a busy machine needs, so that it ends at all."""
ACCURACY: Final = 0.002
"""Iterations are measured until the margins of median time and energy are at most this share of them."""
FEWEST: Final = 8
MOST: Final = 100
"""Of the iterations of one measurement, whatever their margins are then."""
SETTLING: Final = 8
"""Iterations after which agents know when the GPUs begin each instruction under a new plan, and how far operator and
agents may be behind the GPUs when they say where it begins."""
PLANS: Final = 20
"""So many plans may replace each other before one is measured."""
_AGAIN: Final = "computed again"

T = TypeVar("T")


class DemoFailed(Exception):
    """Something that should have happened did not, or not as predicted."""


class Observer:
    """Reads one job, once its training runs."""

    def __init__(self, api: Any, name: str, job: RunningJob, pipelines: int, scale: TimeScale) -> None:
        self._objects = client.CustomObjectsApi(api)
        self._name = name
        self._job = job
        self._pipelines = pipelines
        self._scale = scale
        self._iterations: dict[tuple[int, int], PipelineIteration] = {}

    # ----------------------------------------------------------------------------------- the PerseusJob

    def read(self, plural: str = keys.PLURAL) -> dict[str, Any] | None:
        """Return the PerseusJob, or another object of its name; None: there is none."""
        place = keys.API_GROUP, keys.API_VERSION, self._job.namespace, plural, self._name
        try:
            stored: Any = self._objects.get_namespaced_custom_object(*place)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise
        return dict(stored)

    def delete(self) -> None:
        """Delete the PerseusJob."""
        place = keys.API_GROUP, keys.API_VERSION, self._job.namespace, keys.PLURAL, self._name
        self._objects.delete_namespaced_custom_object(*place)

    def status(self) -> dict[str, Any]:
        """Return its status."""
        status: dict[str, Any] = (self.read() or {}).get("status", {})
        return status

    def wait(self, seen: Callable[[], T | None], what: str) -> T:
        """Wait until something is seen, and return it.

        Raises:
            DemoFailed: it was not seen within ``LIMIT_S``, or the training has ended.
        """
        deadline_s = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline_s:
            result = seen()
            if result is not None:
                return result
            if self._job.training.failure is not None:
                raise DemoFailed(f"training failed: {self._job.training.failure}")
            time.sleep(0.05)
        raise DemoFailed(f"waited {LIMIT_S:g} s for {what}")

    def wait_condition(self, kind: str) -> dict[str, Any]:
        """Wait until a condition is true, and return the status."""

        def true() -> dict[str, Any] | None:
            status = self.status()
            state = condition(status, kind)
            if state.get("reason") in {"SpecInvalid", "ProfileInvalid", "SolveFailed"}:
                raise DemoFailed(f"{kind}: {state['message']}")
            return status if state.get("status") == "True" else None

        return self.wait(true, f"condition {kind}")

    def applied(self) -> dict[str, Any] | None:
        """Return the status while a plan is in force."""
        status = self.status()
        applied = condition(status, "PlanApplied").get("status") == "True"
        return status if applied and "predicted" in status else None

    def planned(self) -> dict[str, Any] | None:
        """Return the status while a plan for measured hardware is in force, and no other frontier is computed."""
        status = self.applied()
        if status is None or status["hardware"]["figures"] != "Measured":
            return None
        return None if _AGAIN in condition(status, "FrontierReady").get("message", "") else status

    def frontier(self, status: dict[str, Any]) -> Frontier | None:
        """Return the frontier that a status is about, in the profile's time; None: another one is stored now."""
        stored = (self.read(keys.FRONTIER_PLURAL) or {}).get("spec", {})
        if stored.get("digest") != status["frontier"]["digest"]:
            return None
        return self._scale.frontier(Frontier.from_bytes(base64.b64decode(stored["data"])))

    def prediction(self, status: dict[str, Any]) -> Prediction:
        """Return what a status predicts."""
        predicted = status["predicted"]
        return Prediction(
            time_s=self._scale.s(predicted["iterationTimeMicroseconds"]),
            energy_j=self._scale.j(predicted["energyMillijoules"]),
            saved=float(status["plan"]["expectedSavings"].rstrip("%")) / 100,
        )

    # -------------------------------------------------------------------------------------- iterations

    def complete(self) -> list[int]:
        """Return the iterations that every pipeline has ended."""
        samples = self._job.training.samples
        while not samples.empty():
            sample = samples.get()
            self._iterations[sample.dp, sample.iteration] = sample
        numbers = {iteration for _, iteration in self._iterations}
        return sorted(i for i in numbers if all((p, i) in self._iterations for p in range(self._pipelines)))

    def measure(self, after: int, what: str, until: Callable[[], int | None] = lambda: None) -> Measurement | None:
        """Measure the job from an iteration on until the margins are small enough.

        Args:
            after: the last iteration that does not count.
            what: is measured, for a message.
            until: the first iteration that does not count any more; None: none yet.

        Returns:
            The measurement; None: too few iterations count, or they scatter too much to say anything.
        """

        def precise(numbers: Sequence[int]) -> bool:
            medians = self._medians(numbers)
            return max(medians.time_s.relative_margin, medians.energy_j.relative_margin) <= ACCURACY

        def enough() -> list[int] | None:
            ended, complete = until(), self.complete()
            chosen = [i for i in complete if i > after and (ended is None or i < ended)][:MOST]
            usable = len(chosen) == MOST or (len(chosen) >= FEWEST and precise(chosen))
            if ended is not None and complete and complete[-1] >= ended:
                return chosen if usable else []
            return chosen if usable else None

        chosen = self.wait(enough, f"iterations of {what}")
        return self._medians(chosen) if chosen else None

    def measure_plan(
        self, status: dict[str, Any], what: str, say: Callable[[str], None]
    ) -> tuple[Measurement, dict[str, Any]]:
        """Measure a plan, and return the status that predicts it. If another plan begins too soon, as when slower clock
        changes are seen, that one is measured instead.

        Raises:
            DemoFailed: none of ``PLANS`` plans lasted long enough.
        """
        for _ in range(PLANS):
            latest, begins = [status], status["plan"]["fromIteration"]

            def replaced(latest: list[dict[str, Any]] = latest, begins: int = begins) -> int | None:
                now = self.applied()
                if now is None:
                    return None
                if now["plan"]["fromIteration"] == begins:
                    latest[0] = now
                    return None
                return int(now["plan"]["fromIteration"])

            measured = self.measure(begins + SETTLING, what, replaced)
            if measured is not None:
                return measured, latest[0]
            status = self.wait(self.applied, "another plan")
            say(f"another plan from iteration {status['plan']['fromIteration']}: it is measured instead")
        raise DemoFailed(f"{PLANS} plans replaced each other too soon to be measured")

    def measure_plan_of_frontier(
        self, status: dict[str, Any], what: str, say: Callable[[str], None]
    ) -> tuple[Measurement, dict[str, Any], Frontier]:
        """Measure a plan as ``measure_plan`` does, and return the frontier that it is of, too.

        Raises:
            DemoFailed: the frontier of no plan could be read.
        """
        for _ in range(PLANS):
            frontier = self.frontier(status)  # now: once another plan replaces this one, it is not stored any more
            measured, seen = self.measure_plan(status, what, say)
            if frontier is not None and seen["frontier"]["digest"] == status["frontier"]["digest"]:
                return measured, seen, frontier
            status = self.wait(self.applied, "a plan in force")
        raise DemoFailed(f"{PLANS} frontiers replaced each other before they could be read")

    def energy_j(self, pipeline: int, numbers: Sequence[int]) -> list[float]:
        """Return what a pipeline took in some iterations."""
        return [self._scale.j(self._iterations[pipeline, i].energy_mj) for i in numbers]

    def span_s(self, pipeline: int, number: int) -> float:
        """Return how long a pipeline computed in an iteration, without the wait for the others."""
        return self._scale.s(self._iterations[pipeline, number].span_us)

    def executed(self, measurement: Measurement, pipeline: int = 0) -> Executed:
        """Return what a pipeline ran in the iteration that is nearest to the median of a measurement."""
        usual_s = measurement.time_s.median
        number = min(measurement.numbers, key=lambda i: abs(self._time_s(i) - usual_s))
        ran = self._iterations[pipeline, number]
        steps = np.array([step for stage in ran.executed for step in stage], dtype=np.float64)
        begin_us, end_us, energy_uj = steps.T
        return Executed(
            iteration=number,
            begin_s=self._scale.speed * (begin_us - ran.begin_us) / 1e6,
            end_s=self._scale.speed * (end_us - ran.begin_us) / 1e6,
            power_w=energy_uj / (end_us - begin_us),
            time_s=self._scale.s(ran.time_us),
            energy_j=self._scale.j(ran.energy_mj),
        )

    def _time_s(self, number: int) -> float:
        """Return how long an iteration of the job took."""
        return max(self._scale.s(self._iterations[p, number].time_us) for p in range(self._pipelines))

    def _medians(self, numbers: Sequence[int]) -> Measurement:
        by_pipeline = [self.energy_j(pipeline, numbers) for pipeline in range(self._pipelines)]
        return Measurement.of(numbers, [self._time_s(i) for i in numbers], list(zip(*by_pipeline, strict=True)))


def condition(status: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of a status; empty: it has none of that kind."""
    return next((c for c in status.get("conditions", ()) if c["type"] == kind), {})
