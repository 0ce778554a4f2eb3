"""A queue of solves on a real cluster: the chart's autoscaler starts workers, by the rule that the documentation gives
for the adapter, and they take part of the work."""

from __future__ import annotations

from pathlib import Path

import pytest
from installation import PATIENCE_S, SYSTEM
from journey import AGENTS, Journey
from metrics_adapter import adapter
from solves import Solves

pytestmark = pytest.mark.timeout(900)

MOST = 3
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true"),
    *("--set", "solver.enabled=true,solver.resources.requests.cpu=100m"),
    *("--set", f"solver.autoscaling.enabled=true,solver.autoscaling.maxReplicas={MOST}"),
)


@pytest.fixture
def journey(cleared_journey: Journey) -> Journey:
    cleared_journey.install(*INSTALL)
    return cleared_journey


def test_a_queue_starts_workers_which_take_part_of_it(journey: Journey, tmp_path: Path) -> None:
    solves = Solves(journey, jobs=12, microbatches=64)

    def all_started() -> bool:
        solves.look()
        return len(journey.pods("solver")) == MOST

    with adapter(journey, "solver-service.md", INSTALL, tmp_path):
        solves.ask()
        journey.eventually("the autoscaler starts workers", all_started, PATIENCE_S)
        scaler = journey.read("-n", SYSTEM, "get", "hpa", "perseus-solver")
        conditions = {condition["type"]: condition["status"] for condition in scaler["status"]["conditions"]}
        assert conditions["ScalingActive"] == "True"
        journey.eventually("every frontier is solved", solves.ended, PATIENCE_S)
    journey.say(f"{solves.jobs} frontiers were solved by {len(solves.done)} workers: {sorted(solves.done.values())}")
    assert sum(solves.done.values()) == solves.jobs
    assert sum(count > 0 for count in solves.done.values()) > 1
