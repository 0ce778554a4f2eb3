"""Reads what a GPU's driver holds it to, now and then: it changes seldom, and by the hand of another program."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from perseus_agent.devices.base import Device, TellsPowerPolicy
from perseus_agent.errors import DeviceError
from perseus_core.power_policy import PowerPolicy

log = logging.getLogger(__name__)

READ_S: Final = 10.0
"""How often: a change is reported with the next renewal of a lease, some seconds later."""


class PolicyReader:
    """Of one GPU. Belongs to the thread of its GPU; any thread may read ``latest``."""

    def __init__(self, device: Device, clock: Callable[[], float] = time.monotonic) -> None:
        self.latest: PowerPolicy | None = None
        """None: the driver has none, or has not been read."""
        self._device = device if isinstance(device, TellsPowerPolicy) else None
        self._clock = clock
        self._due_s = 0.0

    def read(self) -> None:
        """Read it if it is time; where the driver does not answer, what it said last stays."""
        now_s = self._clock()
        if self._device is None or now_s < self._due_s:
            return
        self._due_s = now_s + READ_S
        try:
            policy = self._device.power_policy()
        except DeviceError as error:
            log.debug("power policy not read: %s", error, extra={"gpu": self._device.identity.uuid})
            return
        if policy != self.latest and (self.latest is not None or policy not in (None, PowerPolicy())):
            log.info("%s", policy or "no power policy any more", extra={"gpu": self._device.identity.uuid})
        self.latest = policy
