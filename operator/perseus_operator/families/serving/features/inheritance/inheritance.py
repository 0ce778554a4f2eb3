"""Whether what a stored profile says of an engine is so, before all replicas run by it.

A fingerprint that is equal is a reason to try, no proof: anybody may have written the profile, and hardware differs. So
windows of this engine are compared with the stored model twice, first at default clocks, then while the canary alone
follows the table. What does not agree is dropped, and all begins as if there had been nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

from perseus_operator.objects.formatting import megahertz, percent
from perseus_solver.serving import FitResult, Seen, Window, compare, windows_needed

_MOST_PASSED: Final = 600
"""Windows that can confirm nothing, ten minutes of one replica, before a profile is dropped: its loads are others."""
_MOST_COMPARED: Final = 500
"""Windows of a stage: beyond, each load is so rare that nothing is said of any."""
_FAILURES: Final = 5
"""Reads that fail before an engine is measured as if there were no profile."""


class Stage(enum.Enum):
    """How far it is."""

    UNREAD = "Unread"
    READING = "Reading"
    DEFAULT = "Default"
    """Windows at default clocks are compared."""
    CANARY = "Canary"
    """Those of the canary, which follows the table, are."""
    ENDED = "Ended"
    """There is no profile, or it is confirmed, or it was dropped."""


@dataclass(frozen=True)
class ReadProfile:
    """A profile of the engine is to be looked for."""


@dataclass(frozen=True)
class StoredWindows:
    """What a profile holds.

    Attributes:
        source: its name, and its namespace where that is another.
        windows: of an engine of the same fingerprint.
        prompt_tokens: computed of a prompt, mean.
    """

    source: str
    windows: tuple[Window, ...]
    prompt_tokens: float


class Inheritance:
    """That of one fingerprint."""

    def __init__(self) -> None:
        self.stage = Stage.UNREAD
        self.source = ""
        """The profile that is compared, or that was confirmed; empty: none."""
        self.refusal = ""
        """Why a profile is not used."""
        self.windows: list[Window] = []
        """Of this engine, in this stage."""
        self._passed = 0
        self._failures = 0
        self._read_at_s = 0.0

    # ---------------------------------------------------------------------------------------------------------- events

    def read_started(self) -> None:
        """A profile is being looked for."""
        self.stage = Stage.READING

    def read_failed(self, why: str, *, again_at_s: float) -> None:
        """The API server did not say whether there is one."""
        self._failures += 1
        self._read_at_s, self.refusal = again_at_s, why
        self.stage = Stage.UNREAD if self._failures < _FAILURES else Stage.ENDED

    def absent(self, why: str = "") -> None:
        """There is none, or none that may be used; empty: none."""
        self.stage, self.refusal = Stage.ENDED, why

    def begun(self, source: str) -> None:
        """The model holds the windows of this profile from now on, and is to be confirmed."""
        self.stage, self.source, self.refusal = Stage.DEFAULT, source, ""

    def window_seen(self, window: Window | None, result: FitResult) -> bool:
        """A replica did this; whether the stage has changed.

        Args:
            window: at default clocks, or of the canary; None: its clock changed within.
            result: of the stored windows.
        """
        if window is None or result.seen is None or not _within(window, result, result.seen):
            self._passed += 1
            if self._passed < _MOST_PASSED:
                return False
            return self.dropped(f"in {self._passed} windows there was no load that it has")
        self.windows.append(window)
        if len(self.windows) < self.needed(result):
            return False
        compared = compare(result, self.windows)
        if not compared.agrees and (worst := compared.worst) is not None:
            load = "prompts" if result.prompts else f"{worst.running:.0f} requests"
            at = f"{megahertz(worst.clock_mhz)} with {load}"
            return self.dropped(f"at {at} steps take {percent(abs(worst.off))} {_way(worst.off)} than it says")
        if compared.rows < self.needed(result):
            return len(self.windows) >= _MOST_COMPARED and self.dropped("no load lasted long enough to be compared")
        self.stage = Stage.CANARY if self.stage is Stage.DEFAULT else Stage.ENDED
        if self.confirming:
            self.windows, self._passed = [], 0
        return True

    def dropped(self, why: str) -> bool:
        """What the profile says is not so, or cannot be confirmed; always true."""
        self.stage, self.refusal = Stage.ENDED, f"PerseusProfile {self.source} is not used: {why}."
        self.source = ""
        return True

    # -------------------------------------------------------------------------------------------- what follows from it

    @property
    def confirming(self) -> bool:
        """Whether the model is that of a profile, and not confirmed."""
        return self.stage in (Stage.DEFAULT, Stage.CANARY)

    def read_due(self, now_s: float) -> bool:
        """Whether to look for a profile now."""
        return self.stage is Stage.UNREAD and now_s >= self._read_at_s

    @staticmethod
    def needed(result: FitResult) -> int:
        """How many windows are compared in each stage."""
        return windows_needed(result.residual)


def _within(window: Window, result: FitResult, seen: Seen) -> bool:
    """Whether a fit has seen such a load and clock, in steps of the kind that it judges."""
    if result.prompts:
        return window.clock_mhz >= seen.lowest_mhz and window.prompt_steps > 0
    return window.steps > 0 and (
        window.clock_mhz >= seen.lowest_mhz
        and window.running <= seen.most_running
        and window.kv_tokens <= seen.most_kv_tokens
    )


def _way(off: float) -> str:
    return "longer" if off > 0.0 else "shorter"
