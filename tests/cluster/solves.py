"""A queue of solves on a cluster: jobs that are only planned, each with its own profile, and who has solved them."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from journey import Journey
from training import TRAINING

from perseus_core import keys
from perseus_sim.profiles import profile_csv

STAGES = 16


class Solves:
    """The queue, and the work of each worker of the solver service."""

    def __init__(self, journey: Journey, jobs: int, microbatches: int) -> None:
        self._journey, self.jobs, self._microbatches = journey, jobs, microbatches
        self.done: dict[str, float] = {}
        """How many frontiers each worker has solved, by the name of its pod, also those that have gone."""

    def ask(self) -> None:
        """Apply the jobs."""
        documents: list[dict[str, Any]] = []
        for number in range(self.jobs):
            name = f"wide-{number}"
            csv = profile_csv(STAGES, imbalance=1.25, forward_s=0.05 + 0.001 * number)
            metadata = {"name": name, "namespace": TRAINING}
            profile = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"profile.csv": csv}}
            spec = {
                "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": self._microbatches},
                "profile": {"configMapRef": {"name": name}, "blockingPowerMilliwatts": 83_640},
                "mode": "Recommend",
            }
            version = f"{keys.API_GROUP}/{keys.API_VERSION}"
            documents += [profile, {"apiVersion": version, "kind": keys.KIND, "metadata": metadata, "spec": spec}]
        self._journey.kubectl("apply", "-f", "-", stdin=documents)

    def look(self) -> None:
        """Ask every worker how much it has done."""
        for pod in self._journey.pods("solver"):
            with contextlib.suppress(Exception):  # it starts, or has ended
                page = metrics(self._journey, pod, keys.DEFAULT_SOLVER_METRICS_PORT)
                found = re.findall(r'perseus_solver_work_total\{outcome="answered",task="solve"\} (\S+)', page)
                self.done[pod.metadata.name] = max(self.done.get(pod.metadata.name, 0.0), sum(map(float, found)))

    def ended(self) -> bool:
        """Whether every job has its frontier; then ``done`` has all the work."""
        ready = [
            condition
            for job in self._journey.read("-n", TRAINING, "get", keys.PLURAL)["items"]
            for condition in job.get("status", {}).get("conditions", ())
            if (condition["type"], condition["status"]) == ("FrontierReady", "True")
        ]
        self.look()
        return len(ready) == self.jobs


def metrics(journey: Journey, pod: Any, port: int) -> str:
    """The metrics of a pod."""
    where = f"namespaces/{pod.metadata.namespace}/pods/{pod.metadata.name}:{port}"
    return journey.kubectl("get", "--raw", f"/api/v1/{where}/proxy/metrics")
