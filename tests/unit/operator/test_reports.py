"""Reports of a job: writes that are few and in time, and events that do not repeat."""

from __future__ import annotations

import pytest
from tests.unit.operator.conftest import Desk, spec_of

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.controller.status_writer import NEVER_S, SAME_EVENT_S
from perseus_operator.jobs.pace import Pace
from perseus_operator.objects.values import Now


def test_turns_come_in_order_and_not_more_often_than_allowed() -> None:
    pace = Pace(10.0)
    assert pace.turn_s(100.0) == 100.0
    turns = [pace.turn_s(100.0) for _ in range(500)]
    assert turns == pytest.approx([100.0 + 0.1 * n for n in range(1, 501)])
    assert pace.turn_s(1_000.0) == 1_000.0, "what was not used is not saved up"
    assert pace.turn_s(1_000.0) == pytest.approx(1_000.1)


async def settle(desk: Desk) -> None:
    """Until nothing is to be written."""
    while await desk.report() == NEVER_S:
        before = len(desk.written)
        await desk.report()
        if len(desk.written) == before:
            return


async def test_an_agent_that_comes_and_goes_is_two_events_and_not_two_hundred() -> None:
    desk = Desk()
    desk.job.run()
    await settle(desk)
    node, fault = desk.job.nodes[0], Explanation(Reason.AGENT_UNAVAILABLE, "Node node-0: no answer.")
    desk.written.clear()
    for _ in range(100):
        for node.fault in (fault, None):
            desk.job.now_s += 1
            await desk.report()
    assert desk.posted.count("AgentUnavailable") == 1
    assert desk.posted.count("Leased") == 1
    assert len(desk.written) >= 200, "the conditions tell every time"
    desk.job.now_s += SAME_EVENT_S
    node.fault = fault
    await desk.report()
    assert desk.posted.count("AgentUnavailable") == 2


async def test_figures_wait_for_their_turn_and_what_matters_does_not() -> None:
    pace = Pace(0.1)
    desk = Desk(pace=pace)
    desk.job.run()
    await settle(desk)
    for _ in range(3):
        pace.turn_s(desk.job.now_s)  # other jobs
    desk.job.now_s += 6  # longer than the interval of figures
    desk.job.train(1)
    desk.written.clear()
    assert await desk.report() == pytest.approx(30 - 6)
    assert desk.written == []
    desk.job.nodes[0].fault = Explanation(Reason.AGENT_UNAVAILABLE, "no answer")
    await desk.report()
    assert len(desk.written) == 1


async def test_a_job_that_changes_plans_at_once_is_written_once_and_one_that_does_not_says_so() -> None:
    desk = Desk()
    desk.job.run()
    await settle(desk)
    for edit, told_in_time in (("MinEnergy", True), ("MaxThroughput", False)):
        desk.job.now_s += 20
        desk.job.state.job.generation += 1
        desk.job.state.spec_accepted(spec_of(objective={"type": edit}))
        desk.written.clear()
        plan, now = desk.job.decide(), Now(desk.job.now_s, desk.job.wall_s)
        assert not plan.applied
        wait_s = desk.reporter.report(desk.job.state.job, desk.described(plan), now)
        if told_in_time:
            assert (wait_s, desk.spawned) == (pytest.approx(1.0), [])
        else:  # its agents are slow
            desk.job.now_s += wait_s
            desk.reporter.report(desk.job.state.job, desk.described(plan), Now(desk.job.now_s, desk.job.wall_s))
            await desk.spawned.pop()
            (said,) = desk.written
            assert ("Ready", "Applying") in {(c["type"], c["reason"]) for c in said["conditions"]}
            desk.written.clear()
        desk.job.settle()
        await desk.report()
        assert len(desk.written) == 1
        assert desk.reporter.stored["observedGeneration"] == desk.job.state.job.generation
        assert desk.reporter.stored["conditions"][-1]["status"] == "True"
