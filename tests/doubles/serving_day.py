"""A day of load, compressed into minutes, and a router that sends its requests to the replicas that there are.

Nothing here knows clocks or advice: requests come, each goes to the next replica that takes it. As a program it routes
in a network of its own: ``python -m tests.doubles.serving_day ADDRESSES REPORT`` reads the addresses, one a line, again
before each sending, and reports now and then what was sent.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Self

from perseus_sim.gpus.model import MODELS
from perseus_sim.serving.controllers import Fixed
from perseus_sim.serving.fleet import Setting, run
from perseus_sim.serving.load import Chat
from perseus_sim.serving.machine import Machine
from perseus_sim.serving.requests import Request

GPU, MODEL = "h100", "llama-3.1-8b"
FIRST_TOKEN_S, PER_TOKEN_S = 0.4, 0.025
LEAST_KEPT: Final = 0.98
LEAST_SAVED: Final = 0.2
"""Against as many replicas as the peak has, all day, at default clocks."""
SEED: Final = 1
TICK_S: Final = 0.05
"""Requests that come within it are sent together."""
_PATIENCE_S: Final = 5.0


@dataclass(frozen=True)
class Day:
    """From valley to peak and back, as a cosine.

    Attributes:
        seconds: that it takes.
        valley: requests a second at its begin and at its end.
        peak: at its middle.
        lengths: of its requests.
    """

    seconds: float
    valley: float
    peak: float
    lengths: Chat

    def per_s(self, at_s: float) -> float:
        """Requests a second; afterwards the valley's."""
        turn = min(1.0, max(0.0, at_s / self.seconds))
        return self.valley + 0.5 * (self.peak - self.valley) * (1.0 - math.cos(2.0 * math.pi * turn))

    def requests(self, until_s: float, seed: int) -> list[Request]:
        """All requests, in the order of arrival: those of the peak, of which each is kept with the load's share."""
        draw = random.Random(seed)
        every = replace(self.lengths, per_second=self.peak).requests(until_s, seed)
        return [one for one in every if draw.random() < self.per_s(one.arrival_s) / self.peak]


USUAL_S: Final = "900"
"""Where PERSEUS_DAY sets no other seconds. A faster day grows by more within the minute that advice looks at."""
DAY: Final = Day(
    seconds=float(os.environ.get("PERSEUS_DAY", USUAL_S)),
    valley=5.0,
    peak=28.0,
    lengths=Chat(1.0, prompt_tokens=1_000, output_tokens=150),
)
"""One replica must be able to carry the valley: alone it is advised for less than each of several."""
NIGHT_S: Final = 900.0
"""That the valley lasts afterwards, at most: replicas that are not needed are kept for five minutes at least."""


@dataclass
class Watched:
    """What was seen of a day.

    Attributes:
        replicas: that were asked for, one after the other.
        lowered: whether some clock was lower than the default ones.
    """

    replicas: list[int]
    lowered: bool = False

    def look(self, replicas: int, *, lowered: bool) -> bool:
        """Take in what there is now; whether replicas changed."""
        self.lowered = self.lowered or lowered
        if changed := self.replicas[-1:] != [replicas]:
            self.replicas.append(replicas)
        return changed

    def over(self, now_s: float) -> bool:
        """Whether the day has ended, and its replicas with it."""
        back = max(self.replicas) > 1 and self.replicas[-1] == 1
        return now_s > DAY.seconds + NIGHT_S or (now_s > DAY.seconds and back)

    def check(self, joules: float, kept: int, ended: int, lasted_s: float) -> str:
        """Assert what the product promises, and return it in words."""
        top = self.replicas.index(max(self.replicas))
        up, down = self.replicas[: top + 1], self.replicas[top:]
        provisioned = at_default_clocks(max(self.replicas), lasted_s)
        said = (
            f"{lasted_s:.0f} s, replicas {self.replicas}, {ended:,} requests, {kept / ended:.2%} within the limits,"
            f" {joules:,.0f} J, {1.0 - joules / provisioned:.1%} less than the peak's replicas at default clocks"
        )
        assert self.lowered, f"no clock was lowered: {said}"
        assert up[-1] > 1, f"the peak has no more replicas than the valley: {said}"
        assert down[-1] == 1, f"the night has more replicas than it needs: {said}"
        assert up == sorted(up), f"replicas swing on the way up: {said}"
        assert down == sorted(down, reverse=True), f"replicas swing on the way down: {said}"
        assert kept >= LEAST_KEPT * ended, said
        assert joules <= (1.0 - LEAST_SAVED) * provisioned, said
        return said


def requests_of_the_day() -> list[Request]:
    """All of them, and those of the night."""
    return DAY.requests(DAY.seconds + NIGHT_S, SEED)


def at_default_clocks(replicas: int, until_s: float) -> float:
    """Joules that so many replicas would take for the requests until then, by the same simulated engine."""
    requests = [one for one in requests_of_the_day() if one.arrival_s < until_s]
    setting = Setting(Machine(GPU, MODEL, 1), MODELS[GPU].driver, replicas)
    return run(setting, requests, lambda _: Fixed(), tail_s=0.0).joules


class LoadRouter:
    """Sends requests when they are due; as a context it does so on a thread of its own.

    Args:
        requests: in the order of arrival, from now on.
        replicas: addresses (host:port) of those that take requests now; asked before each sending.
    """

    def __init__(self, requests: Sequence[Request], replicas: Callable[[], Sequence[str]]) -> None:
        self._requests, self._replicas = requests, replicas
        self.sent: list[Request] = []
        self.refused = 0
        """Requests that no replica took."""
        self._turn = 0
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load-router", daemon=True)

    def __enter__(self) -> Self:
        self._begun_s = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def now_s(self) -> float:
        """Since it began."""
        return time.monotonic() - self._begun_s

    def _run(self) -> None:
        place = 0
        while place < len(self._requests) and not self._stop.wait(TICK_S):
            due, now_s = list[Request](), self.now_s
            while place < len(self._requests) and self._requests[place].arrival_s <= now_s:
                due.append(self._requests[place])
                place += 1
            self._send(due)

    def _send(self, due: Sequence[Request]) -> None:
        """Send each to the next replica; what one does not take goes to another."""
        replicas = list(self._replicas())
        shares: list[list[Request]] = [[] for _ in replicas]
        for request in due if replicas else ():
            self._turn += 1
            shares[self._turn % len(replicas)].append(request)
        refused = [] if replicas else list(due)
        for place, share in enumerate(shares):
            others = (replicas[(place + more) % len(replicas)] for more in range(len(replicas)))
            if share and not any(self._taken(address, share) for address in others):
                refused += share
            elif share:
                self.sent += share
        self.refused += len(refused)

    def _taken(self, address: str, requests: Sequence[Request]) -> bool:
        body = json.dumps([[one.prompt_tokens, one.output_tokens] for one in requests]).encode()
        try:
            with self._direct.open(urllib.request.Request(f"http://{address}/requests", body), timeout=_PATIENCE_S):
                return True
        except (OSError, urllib.error.URLError):
            return False


def main() -> None:
    """Route the day until SIGTERM."""
    addresses, report = map(Path, sys.argv[1:])
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with LoadRouter(requests_of_the_day(), lambda: addresses.read_text(encoding="utf-8").split()) as router:
        while not stop.wait(0.5):
            said = {"now_s": router.now_s, "sent": len(router.sent), "refused": router.refused}
            partial = report.with_suffix(".partial")
            partial.write_text(json.dumps(said), encoding="utf-8")
            partial.replace(report)


if __name__ == "__main__":
    main()
