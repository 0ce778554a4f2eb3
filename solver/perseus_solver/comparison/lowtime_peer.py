"""Run lowtime, the solver of the Perseus authors, on the same problem. This is the only module that imports lowtime.

It follows lowtime's own recipe: effective energies, Pareto filter, an exponential fitted to each table, durations
rounded down to a time grid, Phillips-Dessouky from slow to fast. The results are choices of options; times and energies
come from this solver's simulator. Planning never needs lowtime.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import SolverError
from perseus_solver.model.problem import Problem

FEW_OPTIONS = 3  # lowtime's recipe loosens its Pareto filter when no more than this many options survive
LOOSER = 0.95


class PeerFailed(SolverError):
    """lowtime is not installed, was not asked for, or could not solve this problem."""


def installed() -> bool:
    """Whether lowtime can be imported (extra ``bench``)."""
    return find_spec("lowtime") is not None


def check_installed() -> None:
    """Raise an error if lowtime cannot be imported.

    Raises:
        PeerFailed: the message says how to install it.
    """
    if not installed():
        raise PeerFailed("lowtime is not installed: pip install 'perseus-k8s[bench]'")


def lowtime_plans(problem: Problem, *, unit_time_s: float) -> Iterator[npt.NDArray[np.intp]]:
    """Yield lowtime's plans, slow to fast, each as int[n] positions in the options. The caller may stop at any time.

    Args:
        problem: a problem without delays between stages, which lowtime does not support.
        unit_time_s: its time grid and step, seconds. A finer grid takes proportionally more steps.

    Raises:
        PeerFailed: the problem has delays, or lowtime's fit of a table failed.
    """
    import networkx as nx
    from lowtime.cost_model import ExponentialModel
    from lowtime.operation import (
        CandidateExecutionOptions,
        DummyOperation,
        ExecutionOption,
        Operation,
        OperationSpec,
    )
    from lowtime.solver import PhillipsDessouky

    if problem.edge_delay_s.any():
        raise PeerFailed("lowtime supports no delays between stages; plan without delays")
    specs = []
    for table in problem.options:
        effective = table.energy_j - problem.blocking_power_w * table.time_s
        options = [
            ExecutionOption(real_time=t, unit_time=unit_time_s, cost=e, knob=k)
            for k, (t, e) in enumerate(zip(table.time_s.tolist(), effective.tolist(), strict=True))
        ]
        try:
            candidates = CandidateExecutionOptions(options=options)
            if len(candidates.options) <= FEW_OPTIONS:
                candidates = CandidateExecutionOptions(options=options, noise_factor=LOOSER)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # many of its fits fail; only the best one counts
                fit = ExponentialModel(candidates, search_strategy="best")
            specs.append(OperationSpec(options=candidates, cost_model=fit))
        except (ValueError, RuntimeError, TypeError) as error:
            raise PeerFailed(f"lowtime cannot fit {table.kind.label} of stage {table.stage}: {error}") from error

    n = problem.instructions
    operations = [Operation(spec=specs[k]) for k in problem.option_of.tolist()]
    dag = nx.DiGraph()
    source, sink = n, n + 1
    dag.graph.update(source_node=source, sink_node=sink)
    for node, operation in enumerate(operations):
        dag.add_node(node, op=operation)
    dag.add_node(source, op=DummyOperation())
    dag.add_node(sink, op=DummyOperation())
    dag.add_edges_from(zip(problem.edge_from.tolist(), problem.edge_to.tolist(), strict=True))
    dag.add_edges_from((source, int(i)) for i in np.setdiff1d(np.arange(n), problem.edge_to))
    dag.add_edges_from((int(i), sink) for i in np.setdiff1d(np.arange(n), problem.edge_from))
    for _ in PhillipsDessouky(dag, attr_name="op").run():
        yield np.array([operation.assigned_knob for operation in operations], dtype=np.intp)
