"""When an agent asks for which clock: the rule of design note 0019, computed for whole plans at once.

A change of the planned clock has a moment from which it is right: a higher clock when its first instruction begins, a
lower one when the instruction before has ended. Between two iterations the higher of both clocks is right. An agent
asks for a higher clock L + s before that moment and for a lower one L - s before, where L is the median and s the
scatter of the time that a change to this clock takes. Changes that would be asked for in the wrong order are left out
so that nothing is late, and so is a lower clock that would be wanted for less than its calls take, or one between two
others for less than one call of all GPUs of a lock.

Between two marks the timetable advances with the time, as far as the next mark. So a request is placed by the last mark
before it and by the time from there. Only marks of begins count here: what the end of an instruction says about the
next begin is known when that comes.

The loops are compiled (``compiled/control.c``).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from perseus_core.hardware import Hardware
from perseus_solver.compiled import at, library
from perseus_solver.kinds import Floats, Index
from perseus_solver.rehearsal.requests import Requests, Start

_SURE: Final = 1.15
"""How many times as long as for the calls a clock must be wanted to be in a plan. Agents measure calls, and one whose
calls are a little slower would leave out what was rehearsed.
"""
NO_CLOCK = -1
"""Of an instruction that sets no clock."""


class Leads(NamedTuple):
    """How long before it is right a clock is asked for, and which changes are left out; seconds.

    Attributes:
        raise_s, lower_s: float[clocks], of a clock that is higher, or lower, than the one before.
        worth_s: a lower clock that is wanted for less is not asked for.
        turn_s: in which all GPUs of a lock make their calls. Nor is a clock between two others that is wanted for less.
    """

    raise_s: Floats
    lower_s: Floats
    worth_s: float
    turn_s: float

    @classmethod
    def of(cls, hardware: Hardware, clocks_mhz: Sequence[int], *, error: float = 0.0) -> Leads:
        """Return how early agents ask on some hardware.

        Args:
            hardware: that they measure.
            clocks_mhz: that plans have.
            error: relative standard deviation of the time by which marks are wrong.
        """
        latencies, call_s = [hardware.latency_of(mhz) for mhz in clocks_mhz], hardware.latency.call_s
        # The last GPU of a lock waits for all others; calls scatter as changes do.
        longest_wait_s = (hardware.gpus_per_lock - 1) * call_s * math.exp(hardware.latency.sigma**2 / 2)
        ahead_s = np.array([latency.p50_s + longest_wait_s / 2 for latency in latencies])
        deviation_s = np.array([latency.deviation_s + longest_wait_s / 2 for latency in latencies]) + error * ahead_s
        turn_s = _SURE * (call_s + longest_wait_s)
        return cls(ahead_s + deviation_s, ahead_s - deviation_s, _SURE * call_s + turn_s, turn_s)


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What an agent expects of iterations, and how it asks.

    Attributes:
        begin_s, end_s: float[plans, n], when instructions run, from the begin of the iteration.
        period_s: float[plans], time from one iteration to the next.
        clock: int[plans, n], planned clocks; `NO_CLOCK` where an instruction sets none.
        stage_offset: int[stages + 1], the instructions of each stage.
        leads: how early.
        margin_s: float[plans, n], how much before its begin and after its end an instruction may run, s.
    """

    begin_s: Floats
    end_s: Floats
    period_s: Floats
    clock: Index
    stage_offset: Index
    leads: Leads
    margin_s: Floats

    def changes(self, stage: int, plan: int, since_s: float, until_s: float) -> tuple[Floats, Index]:
        """Return when a stage asks for other clocks, and for which, in a span of one iteration at least.

        Times count from the stage's first begin. If there is none in the span, the clock counts as asked for at its
        begin.

        Raises:
            MemoryError: there is too little memory for the work arrays.
        """

        def write(room: int, asked_s: Floats, wanted: Index) -> int:
            arrays = at(asked_s), at(wanted, np.int64)
            return self._call("changes", stage, plan, since_s, until_s, room, *arrays)

        asked_s, wanted = _written(write, len(self.clock[plan]), np.float64, np.int64)
        return asked_s, wanted

    def asked(self) -> Index:
        """Return int[plans, n], the clock that is asked for for each instruction: the planned one, or what takes its
        place where a change is left out; `NO_CLOCK` where an instruction sets none.

        A plan of these clocks is asked for as it is: what is left out of it in turn is so here, too.

        Raises:
            MemoryError: there is too little memory for the work arrays.
        """
        clock = self.clock.copy()
        self._call("asked", len(clock), at(clock, np.int64), clock=clock)
        return clock

    def start(self) -> Start:
        """Return the clocks in effect and on their way when an iteration begins that follows others like it.

        Raises:
            MemoryError: there is too little memory for the work arrays.
        """
        plans, stages = len(self.clock), len(self.stage_offset) - 1
        first = np.empty(plans * stages + 1, dtype=np.int64)

        def write(room: int, effect_s: Floats, target: Index) -> int:
            return self._call("start", plans, room, at(first, np.int64), at(effect_s), at(target, np.int32))

        effect_s, target = _written(write, 2 * self.clock.size, np.float64, np.int32)
        clock = np.zeros(plans * stages, dtype=np.int32)
        some = first[1:] > first[:-1]
        clock[some] = target[first[:-1][some]]
        return Start(clock.reshape(plans, stages), first, effect_s, target)

    def timetable(self, *, corrected: bool) -> Requests:
        """Return what the agents ask for in an iteration.

        Args:
            corrected: marks correct the timetable; otherwise all times count from the begin of the iteration.

        Raises:
            MemoryError: there is too little memory for the work arrays.
        """
        first = np.empty(self.clock.size + 1, dtype=np.int64)

        def write(room: int, after_s: Floats, clock: Index, moment: Index) -> int:
            arrays = at(first, np.int64), at(after_s), at(clock, np.int32), at(moment, np.int32)
            return self._call("timetable", len(self.clock), corrected, room, *arrays)

        return Requests(first, *_written(write, self.clock.size, np.float64, np.int32, np.int32))

    def _call(self, name: str, *arguments: Any, clock: Index | None = None) -> int:
        """Call a compiled function, on other planned clocks where some are given, and return how much it found."""
        leads, offset, planned = self.leads, self.stage_offset, self.clock if clock is None else clock
        expected = _Expected(
            len(offset) - 1, at(offset, np.int64), at(self.begin_s), at(self.end_s), at(self.margin_s),
            at(self.period_s), at(planned, np.int64), _leads(leads), leads.raise_s.max(), leads.lower_s.min(),
        )  # fmt: skip
        return _found(getattr(library(), f"control_{name}")(ctypes.byref(expected), *arguments))


class Remaining(NamedTuple):
    """What is left of changes.

    Attributes:
        asked_s: float[left], when each is asked for.
        wanted: int[left], for which clock.
        change: int[left], which of all changes it is.
    """

    asked_s: Floats
    wanted: Index
    change: Index


def requests(right_s: Floats, wanted: Index, leads: Leads) -> Remaining:
    """Return when changes are asked for, without those that are not worth it or would be asked for in the wrong order.

    A clock that is left out is replaced by the lower one of those beside it that are higher: nothing is late, and that
    costs the least energy. Of those near each other the shortest is left out first, for what is left of a deeper dip
    may last long enough.

    Args:
        right_s: float[changes], the moments from which clocks are right, increasing.
        wanted: int[changes], which; each differs from the one before.
        leads: how much before that a clock is asked for, and how long it must be wanted.
    """
    right_s, wanted, change = right_s.copy(), wanted.astype(np.int64), np.arange(len(wanted))
    asked_s, lacks_s = np.empty(len(wanted)), np.empty(len(wanted))
    left = library().control_requests(
        ctypes.byref(_leads(leads)), len(wanted), at(right_s), at(wanted, np.int64), at(change, np.int64),
        at(asked_s), at(lacks_s),
    )  # fmt: skip
    return Remaining(asked_s[:left], wanted[:left], change[:left])


def _written(write: Callable[..., int], room: int, *dtypes: npt.DTypeLike) -> Any:
    """Return arrays that a compiled function writes; if there are more numbers than there was room for, once more."""
    while True:
        arrays = [np.empty(room, dtype=dtype) for dtype in dtypes]
        written = write(room, *arrays)
        if written <= room:
            return [array[:written] for array in arrays]
        room = written


def _found(count: int) -> int:
    if count < 0:
        raise MemoryError
    return count


class _Leads(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("raise", "lower")),
        *((name, ctypes.c_double) for name in ("worth", "turn")),
    )


class _Expected(ctypes.Structure):
    _fields_ = (
        ("stages", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("offset", "begin", "end", "margin", "period", "clock")),
        ("leads", _Leads),
        *((name, ctypes.c_double) for name in ("longest", "soonest")),
    )


def _leads(leads: Leads) -> _Leads:
    return _Leads(at(leads.raise_s), at(leads.lower_s), leads.worth_s, leads.turn_s)
