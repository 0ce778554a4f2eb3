"""Which replicas are about to miss a limit although their clock is the highest: more of it does not help.

A request that has missed is counted when it gets its token; one that waits is not counted at all until then. So what
waits is asked instead: with so many requests before it, and as many first tokens a second as lately, the last one
waits for longer than the limit. Where steps themselves take longer than a token may, no request keeps its limit. A
moment of either is a burst, which the boost is for; some seconds of it are an overload. Nothing is dropped for it:
what is done is up to the router and to who scales.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from perseus_core.serving import DEFAULT_CLOCKS, ServingLimits
from perseus_core.units import s_from_us
from perseus_operator.nodes.engines import EngineWindow

IN_A_ROW: Final = 3
"""Windows of about a second: a boost is in force for most of the first."""
ENDS_AFTER: Final = 10
"""Windows after which a replica that keeps its limits again is no longer overloaded: the condition does not flap."""
_RATE: Final = 5
"""Windows over which first tokens are counted."""
_LONGEST_S: Final = 2.0
"""Of a window, as far as it counts: in a longer one the engine had nothing to do, which says nothing of its rate."""


@dataclass(frozen=True)
class ReplicaOverload:
    """What a replica does while it cannot keep a limit.

    Attributes:
        waiting: requests.
        wait_s: that the last of them will have waited, if as many get their first token a second as lately.
        step_s: that a step takes, mean.
        first_token: of which limit it is; False: of that of a token.
    """

    waiting: int
    wait_s: float
    step_s: float
    first_token: bool


@dataclass
class _Replica:
    latest: deque[tuple[int, float]]
    """First tokens and seconds of the latest windows."""
    late: int = 0
    """Windows in a row in which it could not keep a limit."""
    kept: int = ENDS_AFTER
    """Windows in a row in which it could."""
    evidence: ReplicaOverload | None = None

    @property
    def overloaded(self) -> bool:
        return self.evidence is not None and self.kept < ENDS_AFTER


class Overload:
    """That of one pool."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}

    def window_seen(self, window: EngineWindow, limits: ServingLimits | None, highest_mhz: int) -> None:
        """A replica did this.

        Args:
            window: of it.
            limits: of its requests; None: there are none.
            highest_mhz: above which prompts get no faster; `DEFAULT_CLOCKS`: they do, up to the default clocks.
        """
        one = self._replicas.setdefault(window.pod_uid, _Replica(deque(maxlen=_RATE)))
        one.latest.append((sum(window.first_tokens.values()), min(_LONGEST_S, s_from_us(window.time_us))))
        evidence = None if limits is None else _evidence(window, limits, one.latest, highest_mhz)
        if evidence is None:
            one.late, one.kept = 0, one.kept + 1
            return
        one.late += 1
        if one.late >= IN_A_ROW or one.overloaded:
            one.kept, one.evidence = 0, evidence

    def pods_observed(self, uids: Collection[str]) -> None:
        """These pods there are now."""
        self._replicas = {uid: one for uid, one in self._replicas.items() if uid in uids}

    @property
    def replicas(self) -> dict[str, ReplicaOverload]:
        """Those that are overloaded, by the UID of their pod."""
        return {uid: one.evidence for uid, one in self._replicas.items() if one.overloaded and one.evidence is not None}


def _evidence(
    window: EngineWindow, limits: ServingLimits, latest: Collection[tuple[int, float]], highest_mhz: int
) -> ReplicaOverload | None:
    """Why a limit will be missed that no clock helps to keep; None: it will not, or one may help."""
    steps = window.steps + window.prompt_steps
    step_s = s_from_us(window.steps_us + window.prompt_steps_us) / steps if steps else 0.0
    first_tokens, seconds = (sum(values) for values in zip(*latest, strict=True))
    wait_s = window.waiting * seconds / max(1, first_tokens)
    default = window.default_us >= window.time_us
    highest = default or (not window.changed and DEFAULT_CLOCKS < highest_mhz <= window.clock_mhz)
    if limits.first_token_s is not None and wait_s > limits.first_token_s and highest:
        return ReplicaOverload(window.waiting, wait_s, step_s, first_token=True)
    if limits.per_token_s is not None and window.running > 0.0 and step_s > limits.per_token_s and default:
        return ReplicaOverload(window.waiting, wait_s, step_s, first_token=False)
    return None
