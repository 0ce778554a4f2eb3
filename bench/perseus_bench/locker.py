"""The process that the restoration trial kills: it locks one GPU as the agent does, and waits.

``python -m perseus_bench.locker DEVICES GPU-UUID MHZ JOURNAL``
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from perseus_agent.clocks.journal import Journal, boot_id
from perseus_agent.devices.base import open_device_set
from perseus_bench.restoration import LOCKED


def main(devices: str, gpu_uuid: str, mhz: str, journal_path: str) -> None:
    """Lock and wait for SIGKILL."""
    journal, _ = Journal.open(Path(journal_path), boot_id())
    device = next(each for each in open_device_set(devices).devices if each.identity.uuid == gpu_uuid)
    journal.record_lock(gpu_uuid)
    device.lock_clocks(int(mhz))
    print(LOCKED, flush=True)  # noqa: T201  # read by the parent
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
