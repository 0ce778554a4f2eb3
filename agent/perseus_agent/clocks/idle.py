"""Waits in which a rank's GPU computes nothing for long: it then runs at its least clock.

What waits in every iteration is an instruction or a phase, and the plan has a clock for it. Here is what no plan knows:
a checkpoint is written, a loader falls behind, an engine for rewards does not answer. Meanwhile a GPU with an open
context draws far more at a high clock than at its least one (docs/clocks-take-time.md).

A wait begins when no mark comes and the driver says that no kernel ran. How long it will be, nobody knows, and the work
after it begins at the least clock, for as long as it takes to notice and to change. So the clock is lowered only after
the wait has been as many times longer than that as the share of it allows that may be lost. What the last returns have
taken decides, so that work which begins without a mark, and is noticed late, makes the next waits longer.

A kernel that waits for another GPU computes, for the driver: such waits are left alone.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import Final

from perseus_agent.clocks.lead import Lead
from perseus_agent.devices.base import Device, SaysWhetherBusy
from perseus_agent.errors import DeviceError
from perseus_core.units import us_from_s
from perseus_proto.channel import Position

log = logging.getLogger(__name__)

IDLE_LOSS: Final = 0.01
"""Share of a wait by which the work after it may be late: a hundredth of the published fifth of a job's time is less
than the plans' own allowance for noise."""
WAIT_LOOK_US: Final = 500_000
"""Between looks while marks come, or the wait is short."""
MARK_LOOK_US: Final = 10_000
"""Between looks for a mark at the least clock: not every mark rings."""
BUSY_LOOK_US: Final = 100_000
"""Between questions to the driver at the least clock: it knows no newer answer than of its last sample."""
SAMPLE_US: Final = 1_000_000
"""The driver's samples of what a GPU does last a sixth of a second to a second (NVML, nvmlUtilization_t)."""
RETURNS_KEPT: Final = 8
"""Of which the slowest decides how long the next wait must be."""


class IdleWatch:
    """The waits of one GPU. Its thread alone calls it; sums may be read by others. Times: µs of the machine's clock."""

    def __init__(self, device: Device, loss: float) -> None:
        """``loss``: share of a wait by which the work after it may be late; 0: the clock follows the plan alone."""
        self._device = device
        self._busy = device.busy if isinstance(device, SaysWhetherBusy) and loss else None
        self._loss = loss
        self._least_mhz = min(device.identity.supported_clocks_mhz, default=0)
        self._mark: Position | None = None
        self._since_us = 0
        """Since when neither a mark nor a kernel was seen."""
        self._low_us: int | None = None
        """Since when the least clock is asked for; None: it is not."""
        self._read_us = self._quiet_us = 0
        """When the driver is asked next, and when it last said that no kernel ran."""
        self._before_mw: int | None = None
        self._less_mw: int | None = None
        self._returns_us = deque[int](maxlen=RETURNS_KEPT)
        self.look_us = 0
        """When ``clock`` must be asked again; 0: with the next mark that rings."""
        self.low_us = 0
        """Time at the least clock, ever."""
        self.late_us = 0
        """Time by which the work after it may have been late, ever, at most."""
        self.saved_mj = 0
        """Energy that it drew less than before, ever."""

    @property
    def low(self) -> bool:
        """Whether the least clock is asked for: then each mark counts."""
        return self._low_us is not None

    def clock(self, planned_mhz: int | None, mark: Position, now_us: int, lead: Lead) -> int | None:
        """The clock to ask for: the planned one, or the least in a long wait.

        Args:
            planned_mhz: what the rank's plan wants now; None: nothing, the default clocks.
            mark: the last one of the rank.
            now_us: now.
            lead: how long changes take.
        """
        if self._busy is None or planned_mhz is None or planned_mhz <= self._least_mhz:
            self._return(now_us, 0)
            self._mark, self.look_us = None, 0
        elif mark != self._mark:
            self._return(now_us, MARK_LOOK_US + lead.raise_us(planned_mhz))
            self._mark, self._since_us, self.look_us = mark, now_us, now_us + WAIT_LOOK_US
        elif now_us >= self.look_us:
            self._look(now_us, lead.raise_us(planned_mhz))
        return planned_mhz if self._low_us is None else self._least_mhz

    def stop(self, now_us: int) -> None:
        """The rank is gone."""
        self._return(now_us, 0)
        self._mark, self.look_us = None, 0

    def _look(self, now_us: int, raise_us: int) -> None:
        """No mark has come since the look before."""
        if self._low_us is not None:
            self.look_us = now_us + MARK_LOOK_US
            if now_us >= self._read_us:
                self._read_us = now_us + BUSY_LOOK_US
                self._weigh(now_us)
                if self._kernel_ran():
                    self._return(now_us, now_us - self._quiet_us + SAMPLE_US + raise_us)
                    self._since_us, self.look_us = now_us, now_us + WAIT_LOOK_US
                else:
                    self._quiet_us = now_us
            return
        self.look_us = now_us + WAIT_LOOK_US
        enough_us = max((MARK_LOOK_US + raise_us, *self._returns_us)) / self._loss
        if now_us - self._since_us < min(enough_us, SAMPLE_US):
            return
        if self._kernel_ran():
            self._since_us = now_us
        elif now_us - self._since_us >= enough_us:
            self._low_us, self._quiet_us, self._read_us = now_us, now_us, now_us + BUSY_LOOK_US
            self._before_mw, self._less_mw, self.look_us = self._power_mw(), None, now_us + MARK_LOOK_US

    def _return(self, now_us: int, late_us: int) -> None:
        """End a wait at the least clock, after which work may have been late by so much."""
        if self._low_us is None:
            return
        span_us, self._low_us = max(now_us - self._low_us, 0), None
        self.low_us += span_us
        self.late_us += late_us
        if late_us:
            self._returns_us.append(late_us)
        if self._less_mw is not None:
            self.saved_mj += self._less_mw * span_us // us_from_s(1)

    def _weigh(self, now_us: int) -> None:
        """Find out, once in a wait, what the least clock saves; where it saves nothing, stop."""
        if self._less_mw is None and self._low_us is not None and now_us >= self._low_us + SAMPLE_US:
            power_mw = self._power_mw()
            if power_mw is None or self._before_mw is None:
                return
            self._less_mw = max(self._before_mw - power_mw, 0)
            if not self._less_mw:
                log.info("%s draws no less at its least clock while it waits", self._device.identity.uuid)
                self._busy = None

    def _kernel_ran(self) -> bool:
        """Whether the driver says so, or says nothing."""
        try:
            busy = self._busy() if self._busy is not None else None
        except DeviceError:
            return True
        if busy is None:
            self._busy = None
        return busy is not False

    def _power_mw(self) -> int | None:
        try:
            return self._device.power_mw()
        except DeviceError:
            return None
