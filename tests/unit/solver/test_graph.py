"""Graphs of work as problems: what is refused, and by which name."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_solver.errors import InvalidProblem
from perseus_solver.frontier import Planner
from perseus_solver.model.problem import Problem

OPTIONS = [("fast", 1.0, 10.0), ("slow", 2.0, 6.0)]
NODES: dict[Any, Any] = {"a": OPTIONS, "b": OPTIONS, "c": OPTIONS}


@pytest.mark.parametrize(
    ("nodes", "edges", "more", "message"),
    [
        ({}, [], {}, "nodes must not be empty"),
        ({"a": []}, [], {}, "node 'a' has no options"),
        ({"a": [("k", 0.0, 1.0)]}, [], {}, "node 'a', knob 'k': time_s must be between 1e-09 and 1e+09, not 0.0"),
        ({"a": [("k", 1.0, -1.0)]}, [], {}, "node 'a', knob 'k': energy_j must be between 0 and 1e+09, not -1.0"),
        ({"a": [("k", 1.0, float("nan"))]}, [], {}, "energy_j must be between"),
        ({"a": [("k", 1.0, 0.0)]}, [], {}, "nodes must take energy"),
        ({"a": [("k", 1.0, 1.0), ("k", 2.0, 0.5)]}, [], {}, "node 'a' has two options of one knob"),
        (NODES, [("a", "x")], {}, "edge 'a' to 'x': there is no node 'x'"),
        (NODES, [("a",)], {}, "edge ('a',) must be (before, after)"),
        (NODES, [("a", "b", -1.0)], {}, "edge 'a' to 'b': delay must be finite, zero or more, not -1.0"),
        (NODES, [("a", "b"), ("b", "a")], {}, "nodes wait for each other in a cycle, or for one: 'a', 'b'"),
        (NODES, [("a", "a")], {}, "in a cycle, or for one: 'a'"),
        (NODES, [], {"stage_of": {"a": 0, "b": 0}}, "stage_of has no stage for node 'c'"),
        (NODES, [], {"stage_of": {"a": 0, "b": 0, "c": 2}}, "every stage from 0 to 2; 1 has no node"),
        (NODES, [], {"stage_of": {"a": 0, "b": 0, "c": -1}}, "stage_of must be whole numbers from 0"),
        (NODES, [("b", "a")], {"stage_of": dict.fromkeys("abc", 0)}, "nodes of one stage run in the order given"),
        (NODES, [], {"blocking_power_w": 5.0}, "blocking_power_w needs stage_of"),
        (NODES, [], {"overhead_s": -1.0}, "overhead_s must be a finite number"),
    ],
)
def test_what_is_no_graph_is_refused_by_name(nodes: Any, edges: Any, more: Any, message: str) -> None:
    with pytest.raises(InvalidProblem) as error:
        Problem.from_graph(nodes, edges, **more)
    assert message in str(error.value)


def test_two_options_may_have_the_same_clock() -> None:
    node = [((1400, "ring"), 1.0, 10.0), ((1400, "tree"), 1.3, 6.0), ((1000, "tree"), 1.6, 5.0)]
    problem = Problem.from_graph({"all-reduce": node, "layer": OPTIONS}, [("layer", "all-reduce", 0.25)])
    planner = Planner(problem)
    assert planner.t_min_s == pytest.approx(2.25)
    plan = planner.plan(2.6)
    assert problem.knobs(plan) == {"layer": "fast", "all-reduce": (1400, "tree")}
    assert (plan.iteration_time_s, plan.energy_j) == pytest.approx((2.55, 16.0))
    assert repr(problem) == "Problem(graph of 2 nodes and 1 edges, 2 to 3 options each)"


def test_stages_wait_at_their_power_and_run_in_order() -> None:
    together = Problem.from_graph(NODES, [], stage_of={"a": 0, "b": 0, "c": 1}, blocking_power_w=2.0, overhead_s=0.5)
    fastest = Planner(together).plan(2.5)
    assert fastest.iteration_time_s == pytest.approx(2.5)
    # a and b at 10 J each, c in the time that it has for 6 J; both stages wait in the overhead.
    assert fastest.energy_j == pytest.approx(26.0 + 2.0 * 2 * 0.5)


def test_a_plan_of_another_problem_has_no_knobs() -> None:
    small, large = (Problem.from_graph(dict.fromkeys(range(n), OPTIONS), []) for n in (2, 3))
    with pytest.raises(InvalidProblem, match="the plan is of another problem"):
        small.knobs(Planner(large).plan(5.0))
