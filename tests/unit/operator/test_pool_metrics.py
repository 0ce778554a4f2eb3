"""The series of a pool: as many however many replicas it has, and what they count is what its engines did."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from tests.doubles.engine_pool import EnginePool

from perseus_core.serving import TIME_EDGES_US, ServingLimits
from perseus_operator.families.serving.features.comparison.switchback import Saved
from perseus_operator.families.serving.status.series import counts_of
from perseus_operator.jobs.metrics import Metrics
from perseus_operator.jobs.pools.figures import OTHER, REASONS
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.values import JobRef

Series = dict[tuple[str, str], float]
"""Values by name without its prefix, and by the label that is not the pool's."""


def series_of(metrics: Metrics, name: str = "pool") -> Series:
    found = {}
    for family in metrics.registry.collect():
        for sample in family.samples:
            labels = dict(sample.labels)
            if labels.pop("job_name", "") == name and sample.name.startswith("perseus_pool_"):
                labels.pop("job_namespace")
                found[sample.name.removeprefix("perseus_pool_"), "".join(labels.values())] = sample.value
    return found


class Watched(EnginePool):
    """A pool whose windows are kept."""

    def __init__(self, replicas: int) -> None:
        self.windows: list[EngineWindow] = []
        super().__init__(replicas, metrics=Metrics())

    def window(self, *args: Any) -> EngineWindow:
        seen = super().window(*args)
        self.windows.append(seen)
        return seen

    def series(self) -> Series:
        report = self.family.report(self.decide())
        assert report.pool is not None
        self.metrics.pools.set_pool(self.job.ref, report.pool, active=True, ready=report.conditions[-1].status is True)
        return series_of(self.metrics)


def test_what_is_counted_is_what_the_engines_did() -> None:
    pool = Watched(2)
    pool.run(40)
    found, windows = pool.series(), pool.windows
    assert found["requests_total", ""] == sum(one.requests for one in windows)
    assert found["prompt_tokens_total", ""] == sum(one.prompt_tokens for one in windows)
    assert found["generated_tokens_total", ""] == sum(one.generated_tokens for one in windows)
    assert found["energy_joules_total", ""] == pytest.approx(sum(one.energy_mj or 0 for one in windows) / 1000)
    assert found["judged_requests_total", "first_token"] == sum(sum(one.first_tokens.values()) for one in windows)
    assert found["judged_requests_total", "output_token"] == sum(sum(one.tokens.values()) for one in windows)
    by_reason = {reason: found["replica_seconds_total", reason] for reason in REASONS}
    assert sum(by_reason.values()) == pytest.approx(sum(one.time_us for one in windows) / 1e6)
    steps_us = [(one, one.steps_us + one.prompt_steps_us) for one in windows]
    running = sum(one.running * busy_us for one, busy_us in steps_us) / 1e6
    assert found["running_request_seconds_total", ""] == pytest.approx(running)


@pytest.mark.parametrize("edge", [-1, 0, 1])
def test_a_request_is_late_unless_it_is_certain_to_have_kept_its_limit(edge: int) -> None:
    place = 100
    limits = ServingLimits(None, TIME_EDGES_US[place] / 1e6)
    window = EngineWindow(pod_uid="p", pid=1, time_us=1, requests=5, tokens={place + edge: 5}, first_tokens={3: 4})
    counts = counts_of(window, limits)
    assert counts.judged == {"output_token": 5}, "the other time has no limit"
    assert counts.late == {"output_token": 5 if edge > 0 else 0}
    assert counts_of(window, None).judged == {}


def test_a_pool_is_shown_as_its_status_says_it_is() -> None:
    pool = Watched(3)
    before = pool.series()
    for absent in ("attainment_ratio", "saved_ratio", "table_lowest_clock_hertz",
                   "model_explains", "energy_joules_total", "clock_hertz"):  # fmt: skip
        assert not [value for (name, _), value in before.items() if name == absent], "absent is not zero"
    assert before["table", ""] == before["ready", ""] == 0
    pool.run(30)
    trying = pool.series()
    assert trying["canary_clock_hertz", ""] == 1e6 * (pool.family.pool.trials.clock_mhz or pool.machine.clocks_mhz[-1])
    pool.run(900, lambda: pool.conditions()["ClocksApplied"].status is True)
    pool.run(30)
    found, status = pool.series(), pool.status()
    assert found["ready", ""] == found["table", ""] == found["model_explains", ""] == 1
    assert found["table_lowest_clock_hertz", ""] == 1e6 * status["engine"]["lowestMegahertz"]
    assert found["limit_seconds", "first_token"] == 0.5
    assert found["limit_seconds", "output_token"] == 0.05
    assert found["attainment_wanted_ratio", ""] == 0.99
    shown = float(status["attainment"]["timePerOutputToken"].rstrip("%")) / 100
    assert found["attainment_ratio", "output_token"] == pytest.approx(shown, abs=1e-4)
    clocks = [1e6 * one["clockMegahertz"] for one in status["replicas"]]
    assert found["clock_hertz", ""] == pytest.approx(sum(clocks) / len(clocks), rel=0.05)
    assert found["pods", "seen"] == 3
    pool.family.pool.switchback.restored(Saved(0.31, 0.28, 0.34, 12, 1.0))
    found = pool.series()
    saved = [found[name, ""] for name in ("saved_ratio", "saved_low_ratio", "saved_high_ratio", "comparisons")]
    assert saved == [0.31, 0.28, 0.34, 12]


def test_pods_are_counted_by_what_is_known_of_their_engine() -> None:
    pool = Watched(3)
    pool.run(3)
    pool.silent = {"pod-1"}
    pool.pods(*pool._pods)
    pool.run(1)
    found = pool.series()
    assert [found["pods", engine] for engine in ("seen", "silent", "unknown", "different")] == [2, 1, 0, 0]


def test_the_number_of_series_depends_neither_on_replicas_nor_on_what_agents_say() -> None:
    few, many = Watched(1), Watched(12)
    for pool in (few, many):
        pool.run(60)  # a hundred requests of each
    assert few.series().keys() == many.series().keys()
    lie = EngineWindow(pod_uid="p", pid=1, time_us=10, held_us=Counter({f"Word{n}": 1 for n in range(9)}))
    many.metrics.pools.count(many.job.ref, counts_of(lie, None))
    assert few.series().keys() == many.series().keys()
    assert many.series()["replica_seconds_total", OTHER] == pytest.approx(9e-6)


def test_a_pool_that_goes_takes_its_series_along_and_no_others() -> None:
    pool = Watched(1)
    pool.run(5)
    pool.metrics.pools.count_fit(pool.job.ref, "Explained")
    other = JobRef("ns", "other", "uid-2")
    report = pool.family.report(pool.decide())
    assert report.pool is not None
    pool.metrics.pools.set_pool(other, report.pool, active=True, ready=False)
    pool.series()
    pool.metrics.forget_job(pool.job.ref)
    assert series_of(pool.metrics) == {}
    assert series_of(pool.metrics, "other")
    assert 'job_name="pool"' not in pool.metrics.exposition().decode()
    pool.metrics.forget_job(pool.job.ref)  # a second time does nothing
    pool.run(1)
    assert pool.series()["requests_total", ""] == 2, "made again under its name, it counts anew"


def test_without_a_counter_of_energy_nothing_says_that_none_is_drawn() -> None:
    pool = Watched(1)
    pool.measures_energy = False
    pool.run(5)
    assert ("energy_joules_total", "") not in pool.series()
    pool.metrics.pools.count(pool.job.ref, replace(counts_of(pool.windows[0], None), energy_mj=5_000))
    assert pool.series()["energy_joules_total", ""] == 5
