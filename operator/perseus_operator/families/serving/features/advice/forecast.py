"""The load until a start that is ordered now would be done, from the loads of the days before.

What an operator has counted outlives it: two weeks of epochs, each as two levels of 6 % apart, are a text of some
kilobytes in the pool's status. A later operator takes them in one after the other, so that it knows how wrong forecasts
were, too. Epochs that nobody counted are taken as they were expected, for up to a day; after more it begins anew.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import Final

from perseus_solver.serving.planner import Forecast, Forecaster

EPOCH_S: Final = 900.0
"""Of the forecast: as long as a start may take."""
MOST_EPOCHS: Final = 1_344
"""That are kept: two weeks."""
MOST_TEXT: Final = 4_096
_MOST_MISSING: Final = 96
"""Epochs in a row that nobody counted: a day."""
_DAY: Final = 96
_OF_AN_HOUR: Final = 4
"""Epochs."""
_LEAST_PER_S: Final = 1 / 600
_STEP: Final = 1.06
_HIGHEST: Final = 255

Epoch = tuple[float, float]
"""Requests a second: mean, and of the heaviest minute."""


class LoadForecast:
    """The forecast of one pool."""

    def __init__(self) -> None:
        self.text = ""
        """The epochs that were counted, to be stored; empty: none were."""
        self._restored: tuple[int, tuple[Epoch, ...]] | None = None
        self._begin()

    def _begin(self) -> None:
        self._forecaster = Forecaster(EPOCH_S)
        self._number: int | None = None
        self._sum = self._heaviest = 0.0
        self._count = 0
        self._ahead: tuple[Forecast, ...] = ()
        self._epochs = deque[Epoch](maxlen=MOST_EPOCHS)
        self.text = ""

    @property
    def until_s(self) -> float:
        """The end of the last epoch that was counted; only of use where there is one."""
        return EPOCH_S * (self._number or 0)

    @property
    def mean_of_day(self) -> float:
        """Requests a second, mean of the last day that was counted; 0: none was."""
        latest = [mean for mean, _ in islice(reversed(self._epochs), _DAY)]
        return math.fsum(latest) / max(1, len(latest))

    def restored(self, text: str, until_s: float) -> None:
        """An earlier operator has counted these epochs, until then. What cannot be read is as if there were none."""
        epochs = unpack(text)
        self._restored = (round(until_s / EPOCH_S), epochs) if epochs else None

    def most(self, per_s: float, wall_s: float, start_s: float, headroom: float) -> float:
        """Take what comes now, and return the most that is expected.

        Args:
            per_s: requests a second.
            wall_s: the time.
            start_s: until a replica serves that is started now.
            headroom: over what comes now, whatever is forecast.
        """
        number = math.floor(wall_s / EPOCH_S)
        if self._number is None and self._restored is not None:
            self._replay(number)
        if self._number is not None and not 0 <= number - self._number <= _MOST_MISSING:
            self._begin()  # what comes after is not what came before
        if self._number is None:
            self._number = number
        elif number > self._number:
            self._close(number)
        self._sum += per_s
        self._heaviest = max(self._heaviest, per_s)
        self._count += 1
        soon = (number + 1) * EPOCH_S - wall_s < start_s
        # Before there is a day to compare with, a forecast is the mean of the last hour: late both ways.
        ahead = [one.upper for one in self._ahead[: 2 if soon else 1] if one.basis != "hours"]
        return max(headroom * per_s, *ahead) if ahead else headroom * per_s

    def _close(self, number: int) -> None:
        """The epoch has passed, and those after it up to this one, of which nothing is known."""
        assert self._number is not None
        if self._count:
            self._count_epoch((min(self._heaviest, self._sum / self._count), self._heaviest))
            self._number += 1
        while self._number < number:
            expected = self._ahead[0].expected if self._ahead else 0.0
            self._count_epoch((expected, expected))
            self._number += 1
        self._sum, self._heaviest, self._count = 0.0, 0.0, 0
        self.text = pack(self._epochs)

    def _count_epoch(self, epoch: Epoch) -> None:
        self._forecaster.seen(*epoch)
        self._ahead = self._forecaster.forecast(2)
        self._epochs.append(epoch)

    def _replay(self, number: int) -> None:
        """Take in what an earlier operator has counted."""
        assert self._restored is not None
        until, epochs = self._restored
        self._restored = None
        if not 0 <= number - until <= _MOST_MISSING:
            return
        for epoch in epochs:
            self._count_epoch(epoch)
        self._number = until
        if number > until:
            self._close(number)
        self.text = pack(self._epochs)


def hours_ahead(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the forecast of a day by hours, from epochs as a text: requests a second that are expected, and that must
    be carried. Some hundredths of a second, so not for an event loop.
    """
    forecaster = Forecaster(EPOCH_S)
    for epoch in unpack(text):
        forecaster.seen(*epoch)
        forecaster.forecast(1)
    ahead = forecaster.forecast(_DAY)
    hours = [ahead[at : at + _OF_AN_HOUR] for at in range(0, _DAY, _OF_AN_HOUR)]
    expected = tuple(math.fsum(one.expected for one in hour) / len(hour) for hour in hours)
    return expected, tuple(max(one.upper for one in hour) for hour in hours)


def pack(epochs: Iterable[Epoch]) -> str:
    """Return epochs as a text, each load rounded to 6 %.

    >>> [f"{mean:.2f} {heaviest:.2f}" for mean, heaviest in unpack(pack([(0.0, 2.0)]))]
    ['0.00 1.98']
    """
    levels = bytes(_level(load) for epoch in epochs for load in epoch)
    return base64.b64encode(zlib.compress(levels, 9)).decode()


def unpack(text: str) -> tuple[Epoch, ...]:
    """Return the epochs of a text; none where it is not one."""
    if len(text) > MOST_TEXT:
        return ()
    unpacker = zlib.decompressobj()
    try:
        levels = unpacker.decompress(base64.b64decode(text, validate=True), 2 * MOST_EPOCHS + 1)
    except (binascii.Error, ValueError, zlib.error):
        return ()
    pairs = list(zip(levels[::2], levels[1::2], strict=False))
    if len(levels) % 2 or len(pairs) > MOST_EPOCHS or any(mean > heaviest for mean, heaviest in pairs):
        return ()
    return tuple((_load(mean), _load(heaviest)) for mean, heaviest in pairs)


def _level(per_s: float) -> int:
    if per_s < _LEAST_PER_S:
        return 0
    return min(_HIGHEST, 1 + round(math.log(per_s / _LEAST_PER_S) / math.log(_STEP)))


def _load(level: int) -> float:
    return _LEAST_PER_S * _STEP ** (level - 1) if level else 0.0
