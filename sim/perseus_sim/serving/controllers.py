"""What decides the clocks of simulated replicas: the law of the agent, and its rivals.

Every rival is given the machine's true times and watts, which it would have to measure, and looks as often as its
authors say. None reads what its authors do not use.
"""

from __future__ import annotations

import math
from collections import deque

from perseus_agent.serving.law import EngineLaw, LawSettings
from perseus_core.serving import DEFAULT_CLOCKS, ClockTable, EngineSample
from perseus_sim.serving.engine import Engine, Load
from perseus_sim.serving.fleet import Asked
from perseus_sim.serving.machine import Machine, Step
from perseus_sim.serving.objective import Objective


class Fixed:
    """One clock, or the default clocks: what users do by hand."""

    period_s = math.inf

    def __init__(self, clock_mhz: int = DEFAULT_CLOCKS) -> None:
        self._clock_mhz = clock_mhz

    def decide(self, now_s: float, engine: Engine) -> Asked:  # noqa: ARG002  # a controller's arguments
        """Return the clock."""
        return Asked(self._clock_mhz)


class Law:
    """The law of ``perseus_agent.serving.law``, behind the plugin's samples."""

    def __init__(
        self, table: ClockTable, objective: Objective, machine: Machine, settings: LawSettings | None = None
    ) -> None:
        settings = settings or LawSettings(attainment=objective.attainment)
        self.period_s = settings.period_s
        self.law = EngineLaw(table, settings, machine.clocks_mhz[-1])
        self._objective = objective
        self._machine = machine
        self._started = self._ended = 0

    def said(self, now_s: float, engine: Engine) -> Load:  # noqa: ARG002  # others say more
        """Return what the engine says."""
        return engine.load

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Give the law a sample and return its clock."""
        load, objective = self.said(now_s, engine), self._objective
        started, ended = engine.started[self._started :], engine.finished[self._ended :]
        self._started += len(started)
        self._ended += len(ended)
        sample = EngineSample(
            now_s,
            load.waiting,
            load.prefilling,
            load.running,
            min(1.0, load.kv_tokens / self._machine.kv_capacity),
            engine.preempted,
            tuple(objective.first_token_share(one, self._machine) for one in started),
            tuple(objective.token_share(one) for one in ended),
        )
        choice = self.law.decide(now_s, [sample])
        return Asked(choice.clock_mhz, choice.urgent)


class _WithProfile:
    """A rival that knows the machine, and chooses among some clocks."""

    period_s: float
    step_mhz = 105

    def __init__(self, machine: Machine, objective: Objective) -> None:
        self._machine, self._objective = machine, objective
        clocks = machine.clocks_mhz
        self._clocks = sorted({*clocks[-1 :: -(self.step_mhz // 15)], clocks[-1]})

    def _asked(self, clock_mhz: int) -> Asked:
        return Asked(DEFAULT_CLOCKS if clock_mhz == self._clocks[-1] else clock_mhz)

    def _seconds(self, clock_mhz: int, running: float, kv_tokens: float, prompt_tokens: float = 0.0) -> float:
        step = Step(max(1, round(running)), round(kv_tokens), round(prompt_tokens), prompt_tokens**2 / 2, 0)
        return self._machine.seconds(self._machine.costs(clock_mhz), step)

    def _joules(self, clock_mhz: int, running: float, kv_tokens: float) -> float:
        step = Step(max(1, round(running)), round(kv_tokens), 0, 0.0, 0)
        costs = self._machine.costs(clock_mhz)
        return self._machine.joules(costs, step, self._machine.seconds(costs, step))

    def _least(self, limit_s: float, running: float, kv_tokens: float) -> int:
        """The clock of least energy that keeps a time between tokens."""
        kept = [mhz for mhz in self._clocks if self._seconds(mhz, running, kv_tokens) <= limit_s]
        return min(kept, key=lambda mhz: self._joules(mhz, running, kv_tokens), default=self._clocks[-1])


class DynamoLlm(_WithProfile):
    """DynamoLLM's rule for clocks (HPCA'25): each 5 s the least energy that keeps the limits at the load just seen.

    Assumed: the time to the first token of a mean prompt is predicted as that of a queue with Poisson arrivals and the
    mean service time (Pollaczek and Khinchine), and must stay within half of its limit, for its tail.
    """

    period_s = 5.0

    def __init__(self, machine: Machine, objective: Objective) -> None:
        super().__init__(machine, objective)
        self._started = 0

    def decide(self, now_s: float, engine: Engine) -> Asked:  # noqa: ARG002
        """Choose for the last five seconds."""
        started = engine.started[self._started :]
        self._started += len(started)
        load = engine.load
        tokens = sum(one.request.prompt_tokens for one in started) / max(1, len(started))
        rate = len(started) / self.period_s
        limit_s = 0.5 * self._objective.first_token_s
        kept = []
        for mhz in self._clocks:
            step_s = self._seconds(mhz, load.running, load.kv_tokens)
            service_s = self._seconds(mhz, load.running, load.kv_tokens, tokens) - step_s
            busy = rate * service_s
            waits_s = busy * service_s / (2 * (1 - busy)) if busy < 1 else math.inf
            scale = max(1.0, self._objective.undisturbed * service_s / self._objective.first_token_s)
            if step_s <= self._objective.per_token_s and waits_s + service_s + step_s <= limit_s * scale:
                kept.append(mhz)
        least = min(kept, key=lambda mhz: self._joules(mhz, load.running, load.kv_tokens), default=self._clocks[-1])
        return self._asked(least)


class ThrottLlem(_WithProfile):
    """throttLL'eM (HPCA'25): the least clock for the batch and memory that are predicted; prefill is left alone.

    Assumed: its predictions of lengths are right, and it looks 40 iterations ahead.
    """

    period_s = 0.1
    _ahead = 40

    def decide(self, now_s: float, engine: Engine) -> Asked:  # noqa: ARG002
        """Choose for the largest load ahead."""
        load = engine.load
        running = load.running + load.prefilling
        kv_tokens = load.kv_tokens + running * self._ahead
        return self._asked(self._least(self._objective.per_token_s, running, kv_tokens))


class Voltana(_WithProfile):
    """VoltanaLLM (arXiv 2509.04827): the highest clock while a request waits, else the least that keeps the limit.

    Assumed: as in its table, times are linear in batch and tokens; both phases share one engine here, not in its own.
    """

    period_s = 0.05

    def decide(self, now_s: float, engine: Engine) -> Asked:  # noqa: ARG002
        """Choose for the load now."""
        load = engine.load
        if load.waiting or load.prefilling:
            return Asked(DEFAULT_CLOCKS, urgent=True)
        return self._asked(self._least(self._objective.per_token_s, load.running, load.kv_tokens))


class GreenLlm(_WithProfile):
    """GreenLLM (arXiv 2508.16449): prefill by a model of its queue; decode by tokens a second and the 95th percentile.

    Assumed: the queue is what waits, in mean prompts; the coarse loop chooses once a second, the fine one moves by a
    step each 0.1 s to keep the percentile of the last two seconds between 65 and 100 % of the limit.
    """

    period_s = 0.1

    def __init__(self, machine: Machine, objective: Objective) -> None:
        super().__init__(machine, objective)
        self._coarse = self._fine = 0
        self._looks = 0
        self._ended: deque[tuple[float, float]] = deque()
        self._seen = 0
        self._prompt_tokens = 1000.0

    def decide(self, now_s: float, engine: Engine) -> Asked:
        """Choose the higher of both."""
        load, limit_s = engine.load, self._objective.per_token_s
        for one in engine.started[self._seen :]:
            self._prompt_tokens += 0.05 * (one.request.prompt_tokens - self._prompt_tokens)
        self._seen = len(engine.started)
        if self._looks % 10 == 0:
            self._coarse = self._clocks.index(self._least(limit_s, load.running, load.kv_tokens))
            self._fine = 0
        self._looks += 1
        for one in engine.finished[len(engine.finished) - 20 :]:
            self._ended.append((one.end_s, one.per_token_s))
        while self._ended and self._ended[0][0] < now_s - 2.0:
            self._ended.popleft()
        if self._ended:
            tail_s = sorted(value for _, value in self._ended)[int(0.95 * (len(self._ended) - 1))]
            self._fine += 1 if tail_s > limit_s else -1 if tail_s < 0.65 * limit_s and self._fine > 0 else 0
        decode = min(max(self._coarse + self._fine, 0), len(self._clocks) - 1)
        return self._asked(max(self._clocks[decode], self._prefill(load.waiting + load.prefilling, load.running)))

    def _prefill(self, waiting: int, running: int) -> int:
        """The least clock at which the queue ends within half of the limit."""
        if not waiting:
            return self._clocks[0]
        tokens = waiting * self._prompt_tokens
        limit_s = 0.5 * self._objective.first_token_s
        kept = (mhz for mhz in self._clocks if self._seconds(mhz, running, 0, tokens) <= limit_s)
        return next(kept, self._clocks[-1])
