"""What requests come to a pool, by measures that do not change with the clocks of its replicas.

A slowed replica has more requests at once and is busy for longer, and no more of them come. So arrivals are counted:
first tokens, and by how much the requests that wait have become more. Where requests wait longer and longer, those that
end show what the replicas can do, and these two together what is asked of them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from perseus_core.units import s_from_us
from perseus_operator.nodes.engines import EngineWindow

_SLOT_S: Final = 10.0
_MINUTE: Final = 6
"""Slots of a minute."""
_SLOTS: Final = 180
"""Half an hour: what requests have in common follows the hour of the day, and not a burst."""
_FEWEST: Final = 20
"""Requests before a mean says anything."""


@dataclass
class _Slot:
    number: int
    arrived: int = 0
    started: int = 0
    prompt_tokens: int = 0
    prompt_steps: int = 0
    generated_tokens: int = 0
    running_s: float = 0.0
    kv_s: float = 0.0

    def add(self, window: EngineWindow, started: int, more_waiting: int) -> None:
        """Count what an engine says of a window; fewer may wait than before."""
        self.arrived += started + more_waiting
        self.started += started
        self.prompt_tokens += window.prompt_tokens
        self.prompt_steps += window.prompt_steps
        self.generated_tokens += window.generated_tokens
        time_s = s_from_us(window.steps_us + window.prompt_steps_us)
        self.running_s += time_s * window.running
        self.kv_s += time_s * window.kv_share


@dataclass(frozen=True)
class Kind:
    """What requests of a pool have in common, means of the last half hour.

    Attributes:
        prompt_tokens: computed of a prompt.
        output_tokens: generated of an answer.
        kv_share: of an engine's memory for keys and values, that a request which decodes uses; 0: none does.
        chunk_tokens: of prompts that a step computes; 0: none was.
    """

    prompt_tokens: float
    output_tokens: float
    kv_share: float
    chunk_tokens: float


class Arrivals:
    """The requests that come."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque(maxlen=_SLOTS)
        self._waiting: dict[str, int] = {}
        """Requests at the end of a pod's latest window."""
        self._since_s: float | None = None

    def window_seen(self, window: EngineWindow, started: int, wall_s: float) -> None:
        """A replica did this until now.

        Args:
            window: of it.
            started: requests that got their first token; where engines only decode, those that ended.
            wall_s: the time.
        """
        if self._since_s is None:
            self._since_s = wall_s
        number = math.floor(wall_s / _SLOT_S)
        if not self._slots or self._slots[-1].number != number:
            self._slots.append(_Slot(number))
        slot = self._slots[-1]
        slot.add(window, started, window.waiting - self._waiting.get(window.pod_uid, window.waiting))
        self._waiting[window.pod_uid] = window.waiting

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self._waiting = {uid: waiting for uid, waiting in self._waiting.items() if uid in uids}

    def per_s(self, wall_s: float) -> float | None:
        """Requests a second of the last minute, to ten seconds; None: no whole minute was seen yet."""
        number = math.floor(wall_s / _SLOT_S)
        if self._since_s is None or math.floor(self._since_s / _SLOT_S) >= number - _MINUTE:
            return None
        arrived = sum(slot.arrived for slot in self._slots if 0 < number - slot.number <= _MINUTE)
        return max(0, arrived) / (_SLOT_S * _MINUTE)

    @property
    def kind(self) -> Kind | None:
        """What requests have in common; None: too few were seen."""
        started = sum(slot.started for slot in self._slots)
        running_s = sum(slot.running_s for slot in self._slots)
        if started < _FEWEST:
            return None
        steps = sum(slot.prompt_steps for slot in self._slots)
        prompt_tokens = sum(slot.prompt_tokens for slot in self._slots)
        return Kind(
            prompt_tokens=prompt_tokens / started,
            output_tokens=sum(slot.generated_tokens for slot in self._slots) / started,
            kv_share=sum(slot.kv_s for slot in self._slots) / running_s if running_s else 0.0,
            chunk_tokens=prompt_tokens / steps if steps else 0.0,
        )
