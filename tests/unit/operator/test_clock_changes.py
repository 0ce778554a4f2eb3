"""Plans with few changes of clock: asked for in the spec, bounded in energy, counted in the status."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from perseus_operator.api.job import JobSpec, Switching
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.features.frontier.inputs import inputs_digest
from perseus_operator.families.training.status.status import figures
from perseus_operator.solving.frontier import open_frontier
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.usefixtures("short_search")

REQUEST = SolveRequest(
    profile_csv(3), "1f1b", stages=3, microbatches=8, chunks=None, blocking_power_mw=83_640, points=12
)
SPEC: dict[str, Any] = {
    "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
    "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
}


def test_without_being_asked_for_plans_are_those_of_least_energy() -> None:
    assert parse_spec(JobSpec, SPEC).switching is None
    assert parse_spec(JobSpec, {**SPEC, "switching": {}}).switching == Switching(max_energy_loss="0.2%")


def test_a_loss_is_a_percentage() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.switching\.maxEnergyLoss: .*a percentage such as"):
        parse_spec(JobSpec, {**SPEC, "switching": {"maxEnergyLoss": "0.002"}})


def test_another_loss_is_another_frontier(make_job: Any) -> None:
    base = make_job().spec
    asked = [replace(base, switching=Switching(max_energy_loss=loss)) for loss in ("0.2%", "0.20%", "1%")]
    digests = [inputs_digest(spec, "csv") for spec in (base, *asked)]
    assert digests[1] == digests[2]
    assert len(set(digests)) == 3


def test_plans_change_clocks_less_often_and_cost_no_more_than_allowed() -> None:
    least, calm = (
        open_frontier(
            solve_in_process(replace(REQUEST, switch_loss=loss)), REQUEST, digest="d", solve_ms=1, restored=False
        )
        for loss in (None, 0.01)
    )
    assert calm.view.times_us[0] <= least.view.times_us[0]
    assert sum(calm.view.clock_changes) / len(calm.view.times_us) < 0.8 * sum(least.view.clock_changes) / len(
        least.view.times_us
    )
    waiting_mj_per_us = REQUEST.blocking_power_mw * REQUEST.stages / 1e6
    for time_us, energy_mj in zip(least.view.times_us, least.view.energies_mj, strict=True):
        point = calm.view.lookup(time_us)
        waited_mj = (time_us - calm.view.times_us[point]) * waiting_mj_per_us
        assert calm.view.energies_mj[point] + waited_mj <= energy_mj * 1.01 + 1


def test_the_status_counts_the_changes_of_the_plan_in_force(make_job: Any) -> None:
    job = make_job()
    job.solve()
    made = job.run()
    assert job.state.frontier is not None
    assert figures(job.state, made).plan.clock_changes is None  # type: ignore[union-attr]
    job.state.solve.frontier = replace(job.state.frontier, clock_changes=tuple(range(40, 51)))
    shown = figures(job.state, made).plan
    assert shown is not None
    assert shown.clock_changes == 40 + shown.point
