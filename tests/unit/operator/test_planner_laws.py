"""Laws that hold in every sequence of events: stragglers told and seen, ranks that come and go, agents that fail,
edits.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus_operator.api.conditions import Explanation, Reason
from perseus_operator.families.training.decide import Decision
from perseus_operator.families.training.features.stragglers.annotation import parse_annotation
from perseus_operator.nodes.actions import Acquire, Push, Select
from perseus_operator.nodes.workloads import Selection

OBJECTIVES = (
    {"type": "MaxThroughput"},
    {"type": "MinEnergy"},
    {"type": "MaxSlowdown", "maxSlowdown": "7.5%"},
    {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 1_300_000}},
    {"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 900_000}},
    {"type": "PowerCap", "powerCapWatts": 1_700},
)
MODES = ("Enforce", "Recommend", "Observe")

event = st.one_of(
    st.tuples(st.just("train"), st.tuples(st.floats(0.9, 2.0), st.floats(0.9, 2.0))),
    st.tuples(st.just("tell"), st.sampled_from(["", "0:0:1.2", "1:3:1.07", "0:0:50,1:0:1.3", "0:0:1"])),
    st.tuples(st.just("edit"), st.tuples(st.sampled_from(OBJECTIVES), st.sampled_from(MODES))),
    st.tuples(st.just("wait"), st.floats(0, 60)),
    st.tuples(st.just("fail"), st.sampled_from(["node-0", "node-1"])),
    st.tuples(st.just("restart"), st.sampled_from(["pods", "ranks", "agent"])),
    st.tuples(st.just("act"), st.integers(1, 4)),
)


def check(job: Any, made: Decision) -> None:
    """The laws."""
    frontier, spec = job.state.frontier, job.spec
    last = len(frontier.times_us) - 1
    selects = [action for action in made.actions if isinstance(action, Select)]
    assert len({action.node for action in made.actions if hasattr(action, "node")}) == len(
        [action for action in made.actions if hasattr(action, "node")]
    ), "one action per node"
    if not spec.mode.sets_clocks:
        assert not any(isinstance(action, Push) for action in made.actions)
        assert all(action.resting.mhz == 0 for action in made.actions if isinstance(action, Acquire))
    if not spec.mode.sets_clocks or not made.wanted:
        assert not selects
    if not made.wanted:
        return
    assert set(made.wanted) == {0, 1}
    assert all(0 <= point <= last for point in made.wanted.values())
    slowest = max(made.slowdowns.values(), default=1.0)
    own_us = {p: made.slowdowns.get(p, 1.0) * frontier.times_us[point] for p, point in made.wanted.items()}
    # Nobody takes longer than the slowest pipeline must, or than the objective allows.
    healthy_alone = frontier.times_us[made.advised_point]
    assert max(own_us.values()) <= max(slowest * frontier.t_min_us, healthy_alone) + 50_000 * slowest
    # The slowest pipeline is never slowed beyond what the objective allows for everybody.
    if made.slowdowns:
        straggler = max(made.slowdowns, key=made.slowdowns.__getitem__)
        assert made.wanted[straggler] <= min(made.wanted.values())
        assert own_us[straggler] <= max(slowest * frontier.t_min_us, frontier.times_us[made.advised_point] + 50_000) + 1
    else:
        assert len(set(made.wanted.values())) == 1
    for action in selects:
        node = job.state.nodes[action.node]
        assert not node.busy
        assert node.leased_pods is not None
        assert node.plans.pushed is not None
        assert node.plans.pushed.digest == frontier.digest
        assert action.from_iteration > job.state.nodes.furthest_iteration - 1
        assert dict(action.points).keys() == node.pipelines


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(event, max_size=25))
def test_laws_hold_in_every_sequence(make_job: Any, events: list[tuple[str, Any]]) -> None:
    job = make_job()
    job.run()
    iteration, pid = 0, 1
    for kind, value in events:
        if kind == "train":
            job.train(iteration, value)
            iteration += 1
        elif kind == "tell":
            job.state.stragglers.declarations_observed(parse_annotation(value), now_s=job.now_s)
        elif kind == "edit":
            job.state.spec_accepted(make_job(objective=value[0], mode=value[1]).spec)
            job.solve()
        elif kind == "wait":
            job.now_s += value
        elif kind == "fail":
            node = job.state.nodes[value]
            node.fault, node.retry_at_s = Explanation(Reason.AGENT_UNAVAILABLE, "dark"), job.now_s + 5
        elif kind == "restart":
            pid, iteration = pid + 1, 0
            if value == "agent":
                job.nodes[0].lease_lost()
            else:
                if value == "pods":
                    job.state.pods_observed(Selection(()), {n.name: n.address for n in job.nodes}, wall_s=0.0)
                    job.start_pods()
                job.connect_ranks(pid)
        else:
            for _ in range(value):
                job.act()
        made = job.decide()
        check(job, made)
        assert job.decide() == made, "the planner has no memory of its own"
    # Left alone, it comes to rest, and at rest what is wanted is in force.
    job.now_s += 6
    for node in job.nodes:
        node.fault = None
    made = job.settle()
    assert made.applied == bool(made.wanted)
