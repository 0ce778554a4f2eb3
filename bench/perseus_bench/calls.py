"""Trial: how long the driver's calls take, alone and while the node's other GPUs are locked."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Final

from perseus_agent.devices.base import Device
from perseus_agent.errors import DeviceError
from perseus_bench.bench import Bench
from perseus_bench.measures import durations_of, spread, waits_for_others
from perseus_bench.report import CallTimes

PAUSE_S: Final = 0.005
"""Between two calls: a driver that is called without pause is not what an agent meets."""
CALLS: Final = range(10, 401)
"""How many at least and at most."""


def time_calls(bench: Bench, seconds: float, others: Sequence[Device]) -> CallTimes:
    """Time ``lock_clocks`` and ``reset_clocks``.

    Args:
        bench: the GPU under test.
        seconds: for all calls together.
        others: further GPUs of the node, held by the caller, which are locked from one thread each.

    Raises:
        DeviceError: the driver refused.
        Interrupted: the user ended the run.
    """
    clocks = cycle(spread(bench.clocks_mhz, 4))
    locks: list[float] = []
    resets: list[float] = []
    for _ in _until(bench, seconds / (2 if others else 1), locks):
        locks.append(bench.lock(next(clocks)))
        bench.wait(PAUSE_S)
        resets.append(bench.reset())
        bench.wait(PAUSE_S)
    contended: list[float] = []
    if others:
        with _locked_without_pause(others):
            for _ in _until(bench, seconds / 2, contended):
                contended.append(bench.lock(next(clocks)))
                bench.wait(PAUSE_S)
        bench.reset()
    alone, together = durations_of(locks), durations_of(contended) if contended else None
    shared = None if together is None else waits_for_others(alone.p50_s, together.p50_s, len(others))
    return CallTimes(alone, durations_of(resets), together, len(others), shared)


def _until(bench: Bench, seconds: float, done: Sequence[float]) -> Iterator[None]:
    end_s = bench.now_s + seconds
    while len(done) < CALLS.start or (bench.now_s < end_s and len(done) < CALLS.stop - 1):
        yield


@contextmanager
def _locked_without_pause(others: Sequence[Device]) -> Iterator[None]:
    stop = threading.Event()
    refused: list[DeviceError] = []

    def run(device: Device) -> None:
        clocks = cycle(spread(device.identity.supported_clocks_mhz, 4))
        try:
            while not stop.is_set():
                device.lock_clocks(next(clocks))
        except DeviceError as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(device,), name="contention", daemon=True) for device in others]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if refused:
        raise refused[0]
