"""Any graph of work with any knobs is planned like a pipeline; on small graphs, against every choice there is."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from perseus_solver.certify import check_frontier
from perseus_solver.errors import Infeasible
from perseus_solver.frontier import Planner
from perseus_solver.kinds import SAME_TIME
from perseus_solver.model.problem import Problem

Nodes = dict[Any, list[tuple[Any, float, float]]]
Edges = list[tuple[Any, Any, float]]


def made_up_graph(seed: int) -> tuple[Nodes, Edges, dict[Any, int] | None, float]:
    """Return at most six nodes of few options, edges with delays, and perhaps stages that wait at some watts."""
    random = np.random.default_rng(seed)
    names = [f"node {k}" for k in random.permutation(int(random.integers(1, 7)))]
    nodes = {
        name: [(("knob", k), *random.uniform(0.1, 10.0, 2).round(2)) for k in range(int(random.integers(1, 4)))]
        for name in names
    }
    pairs = itertools.combinations(names, 2)
    edges = [(a, b, float(random.choice([0.0, 0.5]))) for a, b in pairs if random.random() < 0.4]
    if random.random() < 0.5:
        shuffled = random.permutation(names).tolist()
        return {name: nodes[name] for name in shuffled}, edges, None, 0.0
    _, stages = np.unique(random.integers(0, 3, len(names)), return_inverse=True)
    return nodes, edges, dict(zip(names, stages.tolist(), strict=True)), float(random.uniform(0.0, 2.0))


def totals(
    nodes: Nodes, edges: Edges, stage_of: dict[Any, int] | None, waiting_w: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return time and energy of every choice, by a recursion that shares no code with the solver."""
    before: dict[Any, list[tuple[Any, float]]] = {node: [] for node in nodes}
    for first, second, delay_s in edges:
        before[second].append((first, delay_s))
    last: dict[int, Any] = {}
    for node in nodes if stage_of else ():
        stage = stage_of[node]  # type: ignore[index]
        if stage in last:
            before[node].append((last[stage], 0.0))
        last[stage] = node
    found = []
    for choice in itertools.product(*nodes.values()):
        option = dict(zip(nodes, choice, strict=True))

        def end(node: Any, option: dict[Any, tuple[Any, float, float]] = option) -> float:
            return max((end(a) + delay for a, delay in before[node]), default=0.0) + option[node][1]

        makespan = max(end(node) for node in nodes)
        busy_s, energy_j = sum(one[1] for one in choice), sum(one[2] for one in choice)
        found.append((makespan, energy_j + waiting_w * (len(last) * makespan - busy_s)))
    return np.array([t for t, _ in found]), np.array([e for _, e in found])


@pytest.mark.parametrize("seed", range(24))
def test_plans_of_small_graphs_lie_between_bound_and_optimum(seed: int) -> None:
    nodes, edges, stage_of, waiting_w = made_up_graph(seed)
    problem = Problem.from_graph(nodes, edges, stage_of=stage_of, blocking_power_w=waiting_w)
    time_s, energy_j = totals(nodes, edges, stage_of, waiting_w)
    planner = Planner(problem)
    frontier = planner.frontier(30)
    check_frontier(problem, frontier, planner.proofs)
    assert frontier.t_min_s == pytest.approx(time_s.min())
    stages_w = waiting_w * (len(set(stage_of.values())) if stage_of else 0)
    for index, point in enumerate(frontier):
        fits = time_s <= point.iteration_time_s * (1 + SAME_TIME)
        waited_s = point.iteration_time_s - time_s if index > frontier.least_energy else np.zeros_like(time_s)
        best_j = (energy_j + stages_w * waited_s)[fits].min()
        assert point.energy_lower_bound_j <= best_j * (1 + 1e-9)
        assert point.energy_j >= best_j * (1 - 1e-9)
        chosen = problem.knobs(point)
        assert set(chosen) == set(nodes)
        computing_j = sum(next(e for k, _, e in nodes[node] if k == knob) for node, knob in chosen.items())
        assert waiting_w or computing_j == pytest.approx(point.energy_j)
        assert (np.isclose(point.energy_j, energy_j) & np.isclose(point.iteration_time_s, time_s)).any()

    deadline_s = float(np.random.default_rng(seed).uniform(time_s.min(), time_s.max()))
    plan = planner.plan(deadline_s)
    best_j = energy_j[time_s <= deadline_s * (1 + SAME_TIME)].min()
    assert plan.iteration_time_s <= deadline_s * (1 + SAME_TIME)
    assert plan.energy_lower_bound_j <= best_j * (1 + 1e-9)
    assert best_j * (1 - 1e-9) <= plan.energy_j
    with pytest.raises(Infeasible):
        planner.plan(0.99 * float(time_s.min()))


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("blocks", [12, 90])
def test_graphs_of_equal_blocks_are_planned_and_proven(assigned: bool, blocks: int) -> None:
    """Two streams that exchange data in every block, as layers and communication do: repeated, but no schedule."""
    compute = [(("MHz", f), 1.0 + 0.7 * (1400 / f - 1), 30 * (f / 1400) ** 2 + 5) for f in (1400, 1200, 1000, 800)]
    network = [((f, c), 0.9 * (1400 / f) ** 0.2 / c, 2.0 * c + f / 700) for f in (1400, 1000) for c in (1, 2)]
    nodes, edges = {}, []
    for k in range(blocks):
        nodes |= {("layer", k): compute, ("send", k): network}
        edges.append((("layer", k), ("send", k)))
        if k:
            edges.append((("layer", k - 1), ("layer", k)))
        if k > 1:
            edges.append((("send", k - 2), ("layer", k)))
    stage_of = {node: int(node[0] == "send") for node in nodes} if assigned else None
    problem = Problem.from_graph(nodes, edges, stage_of=stage_of, blocking_power_w=3.0 if assigned else 0.0)
    planner = Planner(problem)
    frontier, proofs = planner.frontier(40), planner.proofs
    check_frontier(problem, frontier, proofs)
    assert np.median(frontier.gap) < 0.02
    assert set(problem.knobs(frontier[0]).values()) <= {knob for knob, _, _ in (*compute, *network)}
