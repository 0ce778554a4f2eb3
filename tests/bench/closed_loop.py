"""The whole of serving on simulated replicas that begin with nothing known: exploration, fit, table, law.

One replica is the canary. It is held at one clock after the other, downwards, as ``Exploration`` says, and its steps
are cut into windows. Whenever it leaves a clock, a model is fitted to all windows; from the first fit that explains
them on, all other replicas follow the law with the table that it makes, and until then they run at the default clocks.
Once there is no lower clock to try, the canary follows the law as well. A fit that does not explain leaves every
replica where it is.
"""

from __future__ import annotations

import math
from typing import Final

from perseus_core.serving import DEFAULT_CLOCKS, ClockTable
from perseus_sim.serving.canary import Recording, ladder, table_of, windows_of
from perseus_sim.serving.controllers import Law
from perseus_sim.serving.engine import Engine
from perseus_sim.serving.fleet import Asked, Controller, Setting
from perseus_sim.serving.objective import Objective
from perseus_solver.serving import FitResult, Verdict, Window, fit
from perseus_solver.serving.exploration import Exploration, Sight, Why, windows_needed

_LOOK_S: Final = 1.0
"""How often the canary is judged."""
_SETTLES_S: Final = 1.0
"""After a change of the clock: what ends meanwhile says nothing of either clock."""
_REQUESTS: Final = 20
"""That ended at a clock before their times count; of fewer, the mean times of windows do."""
_SCATTER: Final = 0.05
"""Of a window, before a fit says it."""
_ENDS: Final = frozenset({Why.LOWEST, Why.WAITS, Why.NEAR_LIMIT})


class ClosedLoop:
    """What the replicas of one run share.

    Args:
        setting: what they run on.
        objective: the limits.

    Attributes:
        table: that the replicas follow; None: there is none yet.
        result: of the latest fit; None: nothing was fitted yet.
        tables_s: when each table came.
        explored: whether the canary has tried every clock that it may.
    """

    def __init__(self, setting: Setting, objective: Objective) -> None:
        self.table: ClockTable | None = None
        self.result: FitResult | None = None
        self.tables_s: list[float] = []
        self.explored = False
        self._setting, self._objective = setting, objective
        self._windows: list[Window] = []

    def controller(self, replica: int) -> Controller:
        """Make the controller of a replica; the first is the canary."""
        following = _Following(self, self._setting, self._objective)
        return following if replica else _Canary(self, self._setting, self._objective, following)

    def left(self, now_s: float, windows: list[Window], prompt_tokens: float, *, explored: bool) -> None:
        """Take in what the canary has shown at a clock that it leaves.

        Args:
            now_s: the time.
            windows: at that clock.
            prompt_tokens: of a prompt, mean.
            explored: whether it was the last.
        """
        machine, objective, driver = self._setting.machine, self._objective, self._setting.driver
        self._windows += windows
        self.explored = explored
        self.result = fit(self._windows, machine.clocks_mhz[-1])
        if self.result.verdict is Verdict.EXPLAINED:
            self.table = table_of(machine, objective, self.result, prompt_tokens, driver.latency.p50_s)
            self.tables_s.append(now_s)

    @property
    def scatter(self) -> float:
        """Of a window's steps, as a share."""
        scatter = self.result.scatter if self.result is not None else math.nan
        return _SCATTER if math.isnan(scatter) else scatter


class _Following:
    """A replica that follows the law as soon as there is a table."""

    def __init__(self, loop: ClosedLoop, setting: Setting, objective: Objective) -> None:
        self._loop, self._machine, self._objective = loop, setting.machine, objective
        self._law: Law | None = None
        self.period_s = 0.1

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Return the law's clock; the default clocks while there is no table."""
        table = self._loop.table
        if table is None:
            return Asked(DEFAULT_CLOCKS)
        if self._law is None:
            self._law = Law(table, self._objective, self._machine)
        self._law.law.table = table
        return self._law.decide(now_s, engine)


class _Canary:
    """The replica that is held at one clock after the other."""

    def __init__(self, loop: ClosedLoop, setting: Setting, objective: Objective, following: _Following) -> None:
        self._loop, self._objective, self._following = loop, objective, following
        self._machine = setting.machine
        self._recording: Recording | None = None
        clocks = (*ladder(self._machine), self._machine.clocks_mhz[-1])
        self._exploration = Exploration(clocks, objective.per_token_s)
        self._since_s = self._looked_s = 0.0
        self._ended = self._started = 0
        self._windows: list[Window] = []
        self.period_s = 0.1

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Return the clock that is tried; that of the law once all were."""
        if self._loop.explored:
            return self._following.decide(now_s, engine)
        if self._recording is None:
            self._recording = engine.machine = Recording(engine.machine)
        if now_s - self._since_s < _SETTLES_S:
            self._begin(engine)
        elif now_s - self._looked_s >= _LOOK_S:
            self._looked_s = now_s
            self._look(now_s, engine)
        clock_mhz = self._exploration.attempt.clock_mhz
        return Asked(DEFAULT_CLOCKS if clock_mhz == self._machine.clocks_mhz[-1] else clock_mhz)

    def _begin(self, engine: Engine) -> None:
        """Count from now on."""
        assert self._recording is not None
        del self._recording.steps[:-1]
        self._ended, self._started = len(engine.finished), len(engine.started)

    def _look(self, now_s: float, engine: Engine) -> None:
        assert self._recording is not None
        before, clock_mhz = self._exploration, self._exploration.attempt.clock_mhz
        self._windows = list(windows_of(clock_mhz, self._recording.steps[:-1]))
        needed = windows_needed(self._loop.scatter)
        after = self._exploration = before.after(now_s, self._sight(engine, clock_mhz), needed)
        ended = after.why in _ENDS and len(self._windows) >= needed
        if after.place == before.place and not ended:
            return
        prompts = [one.request.prompt_tokens - one.request.cached_tokens for one in engine.started]
        prompt_tokens = max(1.0, sum(prompts) / max(1, len(prompts)))
        self._loop.left(now_s, self._windows, prompt_tokens, explored=ended)
        self._since_s = now_s

    def _sight(self, engine: Engine, clock_mhz: int) -> Sight:
        """What was seen at the present clock; what the default clocks would have missed as well is no miss."""
        slower = self._machine.clocks_mhz[-1] / clock_mhz
        ended, started = engine.finished[self._ended :], engine.started[self._started :]
        shares = [self._objective.token_share(one) for one in ended]
        shares += [self._objective.first_token_share(one, self._machine) for one in started]
        times_s = sorted(one.per_token_s for one in ended)
        if len(times_s) < _REQUESTS:
            times_s = sorted(window.step_s for window in self._windows if window.steps)
        p99_s = times_s[min(len(times_s) - 1, math.ceil(0.99 * len(times_s)) - 1)] if times_s else math.nan
        return Sight(len(self._windows), p99_s, missed=any(1.0 < share <= slower for share in shares))
