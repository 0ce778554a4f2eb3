"""When this process looks for objects that only refer to each other.

Python does so in whichever thread makes the next object, and goes through all that are alive: schedules and reports are
long, a rank decides how long, and a GPU's thread would wait. So the main thread does it, now and then, and through old
objects only while no training process is connected. Whatever comes with one and goes with it forms no such circles.
"""

from __future__ import annotations

import gc
from typing import Final

INTERVAL_S: Final = 10.0


def begin() -> None:
    """Leave it to ``collect`` from now on, and what is there now out of it."""
    gc.collect()
    gc.freeze()
    gc.disable()


def collect(*, idle: bool) -> None:
    """Free what was made lately; what is older only while the agent is idle."""
    gc.collect(2 if idle else 0)
