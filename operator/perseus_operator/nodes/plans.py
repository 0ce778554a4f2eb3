"""The plan sets that one agent stores for a job, and which points of them its pipelines run.

An agent follows points of one plan set, and may store another one beside it, which is to be followed later. Fields are
read everywhere and changed only here:

    the lease            lease_acquired, lease_lost
    plan sets            stored, stored_beside, adopted
    points               selection_sent, selection_accepted, selection_outdated
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StoredPlans:
    """A plan set on an agent, as this operator pushed it."""

    plan_id: str
    digest: str
    """Of the frontier, or of the sweep, whose plans these are."""
    stages: frozenset[int]

    def serve(self, stages: Set[int], digest: str) -> bool:
        """Whether these are the plans of this digest, for all of these stages."""
        return self.digest == digest and stages <= self.stages


@dataclass
class NodePlans:
    """Belongs to one node of a job."""

    node: str = ""
    """Its name."""
    selections: dict[str, Mapping[int, int | None]] = field(default_factory=dict)
    """Of all nodes of the job by name, so that all can be outdated at once; see ``selected``."""
    plan_id: str = ""
    """Plan set of which the agent is to follow points; empty: none."""
    pushed: StoredPlans | None = None
    """That plan set; None: there is none, or an earlier operator pushed it."""
    beside: StoredPlans | None = None
    """The plan set that the agent stores beside it; None: there is none."""
    driven: bool = False
    """The agent may be following a plan of the job, selected by this operator or an earlier one."""
    from_iteration: int = 0
    """First iteration that runs the latest selection."""

    @property
    def selected(self) -> Mapping[int, int | None]:
        """Point of each pipeline (by dp) that need not be selected again."""
        return self.selections.get(self.node, {})

    def lease_acquired(self, plan_id: str, *, following: bool) -> None:
        """The agent granted a lease. Selections are repeated: those that it holds may belong to an earlier plan set.

        Args:
            plan_id: of the plan set that the agent stores for the job; empty: none.
            following: whether it already follows a selection.
        """
        if plan_id != self.plan_id:
            self.pushed = None  # it names the one that was stored last, which may be the one beside
        self.plan_id, self.driven, self.beside = plan_id, following, None
        self.selection_outdated()

    def lease_lost(self) -> None:
        """What the agent holds is no longer known."""
        self.pushed = self.beside = None
        self.plan_id, self.driven = "", False
        self.selection_outdated()

    def stored(self, plans: StoredPlans) -> None:
        """The agent stores these plans; what was selected in an earlier plan set no longer counts."""
        if plans.plan_id != self.plan_id:
            self.plan_id, self.beside = plans.plan_id, None
            self.selection_outdated()
        self.pushed = plans

    def stored_beside(self, plans: StoredPlans) -> None:
        """The agent stores these plans beside those that it follows."""
        self.beside = plans

    def adopted(self, digest: str) -> None:
        """Plans of this digest are to be followed; an agent that stores them beside others need not be sent them."""
        beside, self.beside = self.beside, None
        if beside is not None and beside.digest == digest:
            self.stored(beside)

    def selection_sent(self) -> None:
        """From now on the agent may follow a plan, even if its answer never comes."""
        self.driven = True

    def selection_accepted(self, points: Mapping[int, int | None], *, plan_id: str, from_iteration: int) -> None:
        """The agent runs these points (by dp) from an iteration on, unless its plan set was replaced meanwhile."""
        if self.plan_id == plan_id:
            self.selections[self.node] = {**self.selected, **points}
        self.from_iteration = from_iteration

    def selection_outdated(self) -> None:
        """Select again."""
        self.selections.pop(self.node, None)
