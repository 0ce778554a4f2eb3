"""Frontiers for real GPUs: solved in the worker, kept in a PerseusFrontier, and read by the planner and by users."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.doubles.job_hardware import job_hardware
from tests.doubles.stored_objects import stored_object

from perseus_core.grain import Grain
from perseus_core.marks import MarkSource
from perseus_operator.api.job import JobSpec, Switching
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import KubeNotFound
from perseus_operator.objects.values import ConfigMap, StoredObject
from perseus_operator.plugin.job import PlannedJob
from perseus_operator.plugin.reports import explanation, frontier_document
from perseus_operator.plugin.tables import Terminal, explanation_text, frontier_text
from perseus_operator.solving.frontier import (
    SolvedFrontier,
    frontier_to_spec,
    open_frontier,
    stored_frontier,
)
from perseus_operator.solving.rehearsed import prefer_few_changes
from perseus_operator.solving.request import SolveRequest
from perseus_operator.solving.verification import RestoreRequest, verify_in_process
from perseus_operator.solving.worker import solve_in_process
from perseus_sim.profiles import profile_csv, steps_csv
from perseus_solver.model.result import InvalidFrontier

pytestmark = pytest.mark.usefixtures("short_search")

A100 = job_hardware("NVIDIA A100-SXM4-80GB", 5_400, 14_000)
RUN_AHEAD = replace(A100, marks=MarkSource.HOST)
REQUEST = SolveRequest(profile_csv(2, forward_s=0.012), "1f1b", 2, 6, None, 83_640, 16)


def solved(request: SolveRequest) -> SolvedFrontier:
    return open_frontier(solve_in_process(request), request, digest="d", solve_ms=1, restored=False)


@pytest.fixture(scope="module")
def real() -> SolvedFrontier:
    """For an A100 as published."""
    return solved(replace(REQUEST, hardware=A100.to_json()))


@pytest.fixture(scope="module")
def ideal() -> SolvedFrontier:
    """For clocks that change at once."""
    return solved(REQUEST)


@pytest.mark.parametrize("points", [100, 4])
def test_a_job_of_single_instructions_has_no_gap_where_every_clock_is_a_point(points: int) -> None:
    noisy = replace(A100, noise=0.02).to_json()
    request = SolveRequest(steps_csv(), "Steps", 1, 1, None, 300_000, points, hardware=noisy)
    view = solved(request).view
    assert len(view.times_us) <= points
    assert (view.mean_gap_ppm == 0) == (points == 100), "of few points a better one may be missing"


def test_a_rehearsed_frontier_says_its_grains_and_what_to_expect(real: SolvedFrontier, ideal: SolvedFrontier) -> None:
    view = real.view
    assert view.hardware == A100.to_json()
    assert len(view.grains) == len(view.medians_us) == len(view.times_us)
    assert all(median_us <= kept_us for median_us, kept_us in zip(view.medians_us, view.times_us, strict=True))
    assert view.highest_mj is not None
    assert view.energies_mj[-1] < view.highest_mj
    assert (ideal.view.hardware, ideal.view.grains) == ("", ())
    assert ideal.view.expected_us == ideal.view.times_us
    assert ideal.view.highest_mj == view.highest_mj


def test_what_is_kept_has_all_of_it(real: SolvedFrontier) -> None:
    spec = frontier_to_spec(real)
    assert spec is not None
    claimed = stored_frontier(stored_object("job", spec), real.view.digest)
    assert claimed is not None
    data = verify_in_process(RestoreRequest(real.request, claimed[0]))
    again = open_frontier(data, real.request, digest="d", solve_ms=claimed[1], restored=True)
    assert again.view == replace(real.view, restored=True)


@pytest.mark.parametrize("column", ["ideal_time_s", "ideal_energy_j", "p50_s"])
def test_rehearsed_figures_that_the_clocks_cannot_give_are_refused(real: SolvedFrontier, column: str) -> None:
    rehearsed = real.frontier.rehearsed
    assert rehearsed is not None
    forged = replace(real.frontier, rehearsed=replace(rehearsed, **{column: -getattr(rehearsed, column)}))
    with pytest.raises(InvalidFrontier):
        verify_in_process(RestoreRequest(real.request, forged.to_bytes()))


def test_a_rehearsed_frontier_must_begin_with_the_fastest_plan_and_its_time(real: SolvedFrontier) -> None:
    """A slow one that is consistent made training 1.5 times as long at "no slowdown"."""
    frontier = real.frontier
    assert frontier.rehearsed is not None
    for forged in (
        frontier.select(range(len(frontier) // 2, len(frontier))),
        replace(frontier, time_s=np.append(0.5 * frontier.time_s[0], frontier.time_s[1:])),
        replace(frontier, time_s=1e-3 * frontier.time_s),
        replace(frontier, energy_j=1e9 * frontier.energy_j),
        replace(frontier, rehearsed=replace(frontier.rehearsed, below_share=frontier.rehearsed.below_share * np.nan)),
        replace(frontier, rehearsed=replace(frontier.rehearsed, confidence=0.01)),
        replace(frontier, rehearsed=None),
    ):
        with pytest.raises(InvalidFrontier):
            verify_in_process(RestoreRequest(real.request, forged.to_bytes()))


def test_where_hosts_run_ahead_a_stage_keeps_its_clock() -> None:
    view = solved(replace(REQUEST, hardware=RUN_AHEAD.to_json())).view
    assert set(view.grains) <= {Grain.STAGE, Grain.NONE}
    assert set(view.clock_changes) == {0}


def test_fewer_changes_are_preferred_within_the_loss_that_is_allowed(real: SolvedFrontier) -> None:
    calm = prefer_few_changes(real.frontier, 0.1)
    assert len(calm) < len(real.frontier)
    assert calm.time_s[0] == real.frontier.time_s[0]
    assert calm.rehearsed is not None
    assert len(calm.rehearsed.grains) == len(calm.rehearsed.p50_s) == len(calm)
    for point in real.frontier:
        found = calm[calm.lookup(point.iteration_time_s)]
        waited_j = calm.blocking_power_w * calm.stages * (point.iteration_time_s - found.iteration_time_s)
        assert found.energy_j + waited_j <= 1.1 * point.energy_j + 1e-6
        assert found.clock_changes <= point.clock_changes


def test_a_job_that_asks_for_few_changes_gets_them_on_real_gpus_too(real: SolvedFrontier) -> None:
    # These points are 3 % of energy apart: a loss of less can leave none out.
    loss = Switching(max_energy_loss="10%").max_energy_loss_ratio
    asked = solved(replace(real.request, switch_loss=loss)).view
    # At each deadline, not on average over plans: one that is left out may have had fewer changes than most.
    given = [asked.clock_changes[asked.lookup(time_us)] for time_us in real.view.times_us]
    assert all(few <= many for few, many in zip(given, real.view.clock_changes, strict=True))
    assert sum(given) < sum(real.view.clock_changes)


# ----------------------------------------------------------------------------------------------------- for users


def planned(real: SolvedFrontier, clocks: Sequence[Mapping[str, int]] = (), **plan: Any) -> PlannedJob:
    spec = parse_spec(
        JobSpec,
        {
            "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 6},
            "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 83_640},
        },
    )
    hardware = {
        "gpu": "NVIDIA A100-SXM4-80GB",
        "switchLatencyMedianMicroseconds": 5_400,
        "switchLatencyP99Microseconds": 14_000,
        "figures": "Assumed",
        "source": "published: eight A800-SXM-80GB",
        "marks": "Gpu",
        "medianLeadMicroseconds": 40_000,
        **({"clocks": list(clocks)} if clocks else {}),
    }
    status = {
        "plan": {"point": 1, "fromIteration": 3, "plannedSlowdown": "1.00%", **plan},
        "hardware": hardware,
        "conditions": [],
    }
    return PlannedJob("team", "gpt3", spec, status, real.frontier, real.planned_times.simulator)


def test_explain_says_the_gpus_and_why_the_plan_has_its_grain(real: SolvedFrontier) -> None:
    why = "Clock changes take 60 ms and instructions 12 ms: one clock for each stage saves more than changes would."
    text = explanation_text(explanation(planned(real, grain="Stage", reason=why)), Terminal(width=200))
    assert why in text
    assert "NVIDIA A100-SXM4-80GB; clock changes take 5.4 ms (99 %: 14 ms, published: eight A800-SXM-80GB)" in text
    assert "marks: gpu, 40 ms before the GPU in the median" in text


@pytest.mark.parametrize(
    ("clocks", "says"),
    [
        ({1_335: 30_000}, "A800-SXM-80GB), 30 ms to 1,335 MHz; marks"),
        (
            {1_140: 51_000, 1_200: 17_000, 1_335: 30_000},
            "A800-SXM-80GB), from 17 ms to 1,200 MHz up to 51 ms to 1,140 MHz; marks",
        ),
    ],
)
def test_explain_says_how_far_changes_differ_by_clock(
    real: SolvedFrontier, clocks: Mapping[int, int], says: str
) -> None:
    known = [{"megahertz": mhz, "medianMicroseconds": us, "p99Microseconds": 2 * us} for mhz, us in clocks.items()]
    assert says in explanation_text(explanation(planned(real, known)), Terminal(width=300))


def test_the_frontier_shows_how_finely_each_plan_sets_clocks(real: SolvedFrontier, ideal: SolvedFrontier) -> None:
    document = frontier_document(planned(real))
    assert [point["grain"] for point in document["points"]] == [grain.label for grain in real.view.grains]
    assert "CLOCK FOR EACH" in frontier_text(document, Terminal(), everything=True)
    plain = frontier_document(replace(planned(real), frontier=ideal.frontier))
    assert "CLOCK FOR EACH" not in frontier_text(plain, Terminal(), everything=True)


def test_the_plugin_finds_the_profile_behind_a_rehearsed_frontier(real: SolvedFrontier) -> None:
    from perseus_operator.plugin.job import _simulator

    spec = parse_spec(
        JobSpec,
        {
            "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 6},
            "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83_640},
        },
    )

    class Reader:
        def job(self, namespace: str, name: str) -> Any:
            raise AssertionError

        def config_map(self, namespace: str, name: str) -> ConfigMap:
            return ConfigMap(name, {"profile.csv": REQUEST.profile_csv}, {})

        def stored(self, plural: str, namespace: str, name: str) -> StoredObject:
            raise KubeNotFound(name)

    assert not isinstance(_simulator(Reader(), "team", spec, real.frontier), str)
