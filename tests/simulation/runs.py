"""One seed from its begin to its end, and what came of it."""

from __future__ import annotations

import logging
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tests.simulation import drawing, machine
from tests.simulation import faults as all_faults
from tests.simulation.kinds import Fault
from tests.simulation.promises import Promises
from tests.simulation.scheduler import NS
from tests.simulation.world import World

FAULTS_S: Final = 30.0
QUIET_S: Final = 45.0
STATES: Final = {
    "a lease ran out": "lease expired",
    "a keeper gave GPUs back": "GPUs locked: ",
    "a keeper ended a silent agent": "the agent is silent and GPUs are locked",
    "an older operator was refused": "has seen epoch",
    "a newer operator commands": "A newer operator commands",
    "a journal was damaged": "an earlier agent had locked is not known",
    "a GPU was locked by a process before": "an earlier agent had locked the GPU",
    "a GPU was lost": "LOST begins",
    "a foreign lock was noticed": "FOREIGN_WRITE begins",
    "a reset was refused": "not given back",
    "a shard changed hands": "shards taken",
    "a plan was changed": "PlanChanged",
    "a plan was withdrawn": "BoundExceeded",
    "an agent was drained": "the agent ends",
    "a process waited for the kubelet": "a process waits",
}
"""Rare states that seeds must reach, by what a log or the trace says."""


@dataclass
class Outcome:
    """What came of a seed."""

    seed: int
    failure: str = ""
    faults: list[str] = field(default_factory=list)
    steps: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    digest: int = 0
    reached: list[str] = field(default_factory=list)
    trace: list[str] = field(default_factory=list)

    def record(self) -> dict[str, object]:
        """For the process that asked."""
        return asdict(self)


class _Log(logging.Handler):
    """The log of all processes is a part of the trace; a defect in it is a broken promise."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.reached: Counter[str] = Counter()

    def createLock(self) -> None:  # all threads are one
        self.lock = None

    def emit(self, record: logging.LogRecord) -> None:
        message, scheduler = record.getMessage(), self._world.scheduler
        gpu = getattr(record, "gpu", "")
        scheduler.note(f"{record.levelname} {message}{f' [{gpu}]' if gpu else ''}")
        self.look(message)
        if record.exc_info and record.exc_info[0] is not None and record.levelno >= logging.ERROR:
            lines = traceback.format_exception(*record.exc_info)
            scheduler.fail(f"a defect is logged: {message}: {lines[-1].strip()}\n{''.join(lines)}")

    def look(self, message: str) -> None:
        """Note which rare states it shows."""
        for state, words in STATES.items():
            if words in message:
                self.reached[state] += 1


def run(seed: int, faults: Sequence[Fault] | None = None, *, tracing: bool = False) -> Outcome:
    """Run a seed, with the faults that it draws, or with these."""
    folder = Path(tempfile.mkdtemp(prefix="perseus-seed-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    began_s = machine.REAL_PROCESS_TIME()
    chosen = list(drawing.draw(seed, until_s=FAULTS_S) if faults is None else faults)
    try:
        world = World(seed, folder)
        scheduler = world.scheduler
        scheduler.tracing = tracing
        log, root = _Log(world), logging.getLogger()
        root.handlers[:] = [log]
        root.setLevel(logging.INFO)
        promises = Promises(world)
        world.start()
        all_faults.inject(world, chosen, promises.begun, promises.ended)
        last_s = max((fault.at_s + fault.lasts_s for fault in chosen), default=0.0)
        end_ns = scheduler.now_ns + int((last_s + QUIET_S) * NS)
        begin_ns = scheduler.now_ns
        scheduler.run(end_ns)
        if not scheduler.failures:
            promises.check_end(QUIET_S)
        return Outcome(
            seed,
            scheduler.failures[0] if scheduler.failures else "",
            [str(fault) for fault in chosen],
            scheduler.steps,
            (scheduler.now_ns - begin_ns) / NS,
            machine.REAL_PROCESS_TIME() - began_s,
            scheduler.digest,
            sorted(log.reached.keys() | promises.serving.reached),
            list(scheduler.trace) if tracing else [],
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def warm_up() -> None:
    """Run a seed without faults: what it imports and solves, all seeds share."""
    run(0, ())
