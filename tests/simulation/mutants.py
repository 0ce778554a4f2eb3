"""The code broken on purpose: what the simulation must find.

Those of which the simulation cannot know anything, since their part of the system is not in it, are in
``NOT_IN_THE_WORLD`` with the reason.
"""

from __future__ import annotations

from typing import Final

from tests.simulation.mutants_of_agents import MUTANTS_OF_AGENTS
from tests.simulation.mutants_of_operators import MUTANTS_OF_OPERATORS

MUTANTS: Final = {mutant.name: mutant for mutant in (*MUTANTS_OF_AGENTS, *MUTANTS_OF_OPERATORS)}

NOT_IN_THE_WORLD: Final = {
    "Student's t with one degree of freedom too many": "a mutant of statistics: no order of events shows it",
    "ClockLine.asked quadratic in a rank's times (H3)": "schedules are short, and a quadratic of six is nothing",
}
"""Of the lists of the issue, those that no seed can find yet, and why."""
