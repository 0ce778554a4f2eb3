"""What the demo measures depends on the iterations that it sees, and not on when it sees them."""

from __future__ import annotations

import queue
from collections.abc import Callable
from math import sin
from types import SimpleNamespace
from typing import Any

import pytest

from perseus_sim.demo import observer
from perseus_sim.demo.observer import ACCURACY, FEWEST, MOST, DemoFailed, Observer
from perseus_sim.demo.time_scale import TimeScale
from perseus_sim.training.coordinator import Executed, PipelineIteration

PIPELINES, SPEED = 2, 4


class Trained:
    """A job whose iterations are made up."""

    def __init__(self) -> None:
        self.training = SimpleNamespace(samples=queue.SimpleQueue(), failure=None)
        self.namespace = "default"

    def ran(self, number: int, time_us: int = 250_000, energy_mj: int = 100_000) -> None:
        for dp in range(PIPELINES):
            begin_us = 1_000_000 * number
            steps = tuple((Executed(begin_us + stage, begin_us + 100_000, 5_000_000),) for stage in range(2))
            self.training.samples.put(PipelineIteration(dp, number, begin_us, time_us, time_us, energy_mj, steps))


@pytest.fixture
def job() -> Trained:
    return Trained()


@pytest.fixture
def see(job: Trained, monkeypatch: pytest.MonkeyPatch) -> Observer:
    monkeypatch.setattr(observer.time, "sleep", lambda _: None)
    made: Any = job
    return Observer(None, "job", made, PIPELINES, TimeScale(SPEED))


def feed(job: Trained, times_us: Callable[[int], int]) -> Callable[[], None]:
    """One more iteration each time."""
    numbers = iter(range(1000))

    def more() -> None:
        number = next(numbers)
        job.ran(number, times_us(number))

    return more


def test_as_many_iterations_are_measured_as_the_accuracy_needs(
    job: Trained, see: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(scatter_us: int) -> int:
        more = feed(job, lambda number: 250_000 + round(scatter_us * sin(1.7 * number)))
        monkeypatch.setattr(observer.time, "sleep", lambda _: more())
        see._iterations.clear()
        found = see.measure(0, "training")
        assert found is not None
        assert min(found.numbers) == 1
        assert found.time_s.median == pytest.approx(1.0, rel=0.02)
        assert found.energy_j.median == pytest.approx(SPEED * PIPELINES * 100)
        assert found.time_s.relative_margin <= ACCURACY or len(found.numbers) == MOST
        return len(found.numbers)

    assert measured(0) == FEWEST
    assert FEWEST < measured(700) < measured(1_400) < MOST
    assert measured(50_000) == MOST


def test_iterations_in_which_the_machine_was_late_move_nothing(
    job: Trained, see: Observer, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = feed(job, lambda number: 250_000 + number + (100_000 if number % 4 == 0 else 0))
    monkeypatch.setattr(observer.time, "sleep", lambda _: more())
    found = see.measure(0, "training")
    assert found is not None
    assert len(found.numbers) < MOST
    assert found.time_s.median == pytest.approx(1.0, rel=ACCURACY)


def test_iterations_of_another_plan_do_not_count(job: Trained, see: Observer) -> None:
    for number in range(40):
        job.ran(number, 250_000 if number < 20 else 500_000)
    found = see.measure(5, "training", lambda: 20)
    assert found is not None
    assert max(found.numbers) < 20
    assert found.time_s.median == pytest.approx(1.0)
    assert see.measure(15, "training", lambda: 20) is None  # too few


class Planned(Observer):
    """An operator whose plans replace each other: each has a frontier of its own, and only the latest is stored."""

    def __init__(self, job: Trained, begins: list[int]) -> None:
        made: Any = job
        super().__init__(None, "job", made, PIPELINES, TimeScale(SPEED))
        self._begins = begins

    def status_of(self, begin: int) -> dict[str, Any]:
        return {"plan": {"fromIteration": begin}, "frontier": {"digest": str(begin)}}

    def applied(self) -> dict[str, Any] | None:
        if len(self._begins) > 1:
            del self._begins[0]
        return self.status_of(self._begins[0])

    def frontier(self, status: dict[str, Any]) -> Any:
        begin = status["plan"]["fromIteration"]
        return f"frontier of {begin}" if begin >= self._begins[0] else None


def test_a_plan_that_is_replaced_once_it_was_measured_keeps_its_frontier(job: Trained, see: Observer) -> None:
    for number in range(60):
        job.ran(number)
    planned = Planned(job, [10, 40])
    measured, status, frontier = planned.measure_plan_of_frontier(planned.status_of(10), "training", print)
    assert (status["plan"]["fromIteration"], str(frontier)) == (10, "frontier of 10")
    assert max(measured.numbers) < 40


def test_a_plan_whose_frontier_has_gone_is_not_measured_for_ever(job: Trained, see: Observer) -> None:
    for number in range(60):
        job.ran(number)
    planned = Planned(job, [40])
    measured, status, frontier = planned.measure_plan_of_frontier(planned.status_of(10), "training", print)
    assert (status["plan"]["fromIteration"], str(frontier)) == (40, "frontier of 40")
    assert min(measured.numbers) > 40


def test_plans_without_a_frontier_end_the_demo(job: Trained, see: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(60):
        job.ran(number)
    planned = Planned(job, [40])
    monkeypatch.setattr(planned, "frontier", lambda _: None)
    with pytest.raises(DemoFailed, match="could be read"):
        planned.measure_plan_of_frontier(planned.status_of(40), "training", print)


def test_a_wait_ends_with_the_training_and_not_with_a_slow_machine(job: Trained, see: Observer) -> None:
    looks = iter(range(10_000))
    assert see.wait(lambda: next(looks) if next(looks) > 5_000 else None, "something") > 5_000
    job.training.failure = "rank 3 has gone"
    with pytest.raises(DemoFailed, match="rank 3 has gone"):
        see.wait(lambda: None, "something")


def test_the_iteration_that_is_drawn_is_a_usual_one(job: Trained, see: Observer) -> None:
    for number in range(12):
        job.ran(number, 250_000 + 10 * (number - 7))
    found = see.measure(0, "training")
    assert found is not None
    drawn = see.executed(found)
    assert drawn.iteration == round(sum(found.numbers) / len(found.numbers))
    assert drawn.begin_s.tolist() == pytest.approx([0, SPEED * 1e-6])
    assert drawn.end_s.tolist() == pytest.approx([SPEED * 0.1] * 2)
    assert drawn.power_w.tolist() == pytest.approx([50.0, 50.0], rel=1e-4)
    assert drawn.time_s == pytest.approx(1.0, rel=1e-3)
    assert drawn.energy_j == pytest.approx(SPEED * 100)
