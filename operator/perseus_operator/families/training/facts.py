"""What several features of a training job decide by: what it asks for, where it runs, what was measured and solved.

A decision takes its feature's own part and these facts, never the whole job. None of them is changed by a decision.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_operator.api.job import JobSpec
from perseus_operator.budgets.allocation import Share
from perseus_operator.nodes.iterations import History, Measured
from perseus_operator.nodes.job_nodes import JobNodes
from perseus_operator.solving.view import FrontierView


@dataclass(frozen=True)
class Facts:
    """The facts at one moment.

    Attributes:
        spec: of the job, with what it leaves out, as far as that is known.
        nodes: of the job.
        history: iterations, the latest of them; None: the job's shape is not known.
        baseline: what an iteration takes at default clocks; None: not measured.
        frontier: that is in force; None: none is known yet.
        calibrated: whether plans are made with calibrated times.
        share: of a PowerBudget; None: no budget selects the job.
        excess: measured power over that of the plans that were followed, at least 1.
    """

    spec: JobSpec
    nodes: JobNodes
    history: History | None
    baseline: Measured | None
    frontier: FrontierView | None
    calibrated: bool
    share: Share | None
    excess: float = 1.0
