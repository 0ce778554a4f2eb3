"""The acceptance run: five trials in an order in which each can use what the ones before it measured.

A trial that fails is noted and the others go on; an interruption ends all. The GPU is in the journal from before its
first lock until after its last reset, and that reset is tried until it works, whatever happened before.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib import metadata
from typing import Final, TypeVar

from perseus_agent.clocks.journal import Journal
from perseus_agent.devices.base import Device
from perseus_agent.errors import AgentError, DeviceError, JournalError
from perseus_bench.bench import Bench, Interrupted
from perseus_bench.calls import time_calls
from perseus_bench.pipeline import run_pipeline
from perseus_bench.plateau import scan_clocks
from perseus_bench.report import AcceptanceReport
from perseus_bench.restoration import Agents, restore_after_kill
from perseus_bench.switches import time_switches

T = TypeVar("T")
SHARES: Final = {"calls": 0.06, "scan": 0.30, "switches": 0.44, "pipeline": 0.12}
"""Of the minutes; the rest is for the restoration, which takes as long as it takes."""
RESET_S: Final = 30.0
"""For the last reset: a passing refusal is tried again for so long."""


def accept(
    bench: Bench,
    journal: Journal,
    agents: Agents,
    *,
    minutes: float,
    driver_version: str,
    simulated: bool = False,
    others: Sequence[Device] = (),
    notes: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> AcceptanceReport:
    """Run all trials on one GPU and return it to its default clocks.

    Args:
        bench: the GPU under test.
        journal: of the node; its lock is held by the caller.
        agents: processes of the restoration trial.
        minutes: for everything.
        driver_version: for the report.
        simulated: whether GPU or workload is simulated: the report says so.
        others: further GPUs, controllable and free, that are locked to find out what they share.
        notes: what the caller has to say in the report.
        say: gets one line at the begin of each trial.

    Returns:
        The report. ``clocks_returned`` is False if some GPU could not be reset: then the journal lists it.

    Raises:
        JournalError: a GPU could not be written to the journal; nothing was locked.
    """
    identity = bench.device.identity
    report = AcceptanceReport(
        date=datetime.now(UTC).date().isoformat(),
        gpu_model=identity.model,
        driver_version=driver_version,
        supported_clocks_mhz=identity.supported_clocks_mhz,
        perseus_version=metadata.version("perseus-k8s"),
        python_version=platform.python_version(),
        workload=bench.workload.name if bench.workload else "",
        minutes=minutes,
        simulated=simulated,
        notes=tuple(notes),
    )
    held = [bench.device, *others]
    for device in held:
        journal.record_lock(device.identity.uuid)
    trials = _Trials(report, minutes * 60, say)
    try:
        trials.run(bench, agents, others)
    finally:
        returned = [_give_back(device, journal) for device in held]
        trials.report = replace(trials.report, clocks_returned=all(returned))
    return trials.report


class _Trials:
    def __init__(self, report: AcceptanceReport, seconds: float, say: Callable[[str], None]) -> None:
        self.report = report
        self._seconds = seconds
        self._say = say

    def run(self, bench: Bench, agents: Agents, others: Sequence[Device]) -> None:
        seconds = {name: share * self._seconds for name, share in SHARES.items()}
        try:
            calls = self._try("calls", lambda: time_calls(bench, seconds["calls"], others))
            self.report = replace(self.report, calls=calls)
            scan = self._try("clocks under load", lambda: scan_clocks(bench, seconds["scan"]))
            self.report = replace(self.report, scan=scan)
            if scan is None:
                return self._note("changes, restoration and pipeline were not tried: they need the scan of clocks")
            switches = self._try("changes", lambda: time_switches(bench, scan, seconds["switches"]))
            self.report = replace(self.report, switches=switches)
            pipeline = None
            if switches is None or bench.workload is None:
                self._note("the pipeline was not tried: it needs a workload and the latencies of changes")
            else:
                pipeline = self._try("pipeline", lambda: run_pipeline(bench, scan, switches, seconds["pipeline"]))
            self.report = replace(self.report, pipeline=pipeline)
            restoration = self._try("restoration after kill -9", lambda: restore_after_kill(bench, scan, agents))
            self.report = replace(self.report, restoration=restoration)
        except Interrupted:
            return self._note("interrupted: what follows was not tried")
        done = (calls, scan, switches, restoration, pipeline if bench.workload else calls)
        self.report = replace(self.report, complete=all(trial is not None for trial in done))
        return None

    def _try(self, name: str, trial: Callable[[], T]) -> T | None:
        self._say(name)
        try:
            return trial()
        except Interrupted:
            raise
        except AgentError as error:
            self._note(f"{name}: {error}")
            return None

    def _note(self, note: str) -> None:
        self.report = replace(self.report, notes=(*self.report.notes, note))


def _give_back(device: Device, journal: Journal) -> bool:
    """Reset a GPU, however often a passing refusal makes it necessary; then the journal forgets it."""
    until_s = time.monotonic() + RESET_S
    while True:
        try:
            device.reset_clocks()
            break
        except DeviceError:
            if time.monotonic() > until_s:
                return False
            time.sleep(0.1)
    try:
        journal.record_reset(device.identity.uuid)
    except JournalError:  # then it is reset once more at the agent's next start: harmless
        return True
    return True
