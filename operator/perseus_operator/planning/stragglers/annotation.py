"""Stragglers that somebody tells: the paper's ``set_straggler(id, delay, degree)``, kept as an annotation.

Three ways lead here: the annotation itself, the command ``kubectl perseus straggler``, and the RPC. The latter two only
rewrite the annotation, by ``tell``; so a notice outlives the operator, and everybody sees it. Read by the planner.
Pure: what is detected is in ``stragglers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_operator.errors import InvalidSpec
from perseus_proto import keys

_ENTRY = re.compile(
    r"(?P<id>\d{1,5}|GPU-[0-9a-zA-Z-]{1,60}):(?P<delay>\d{1,7}(?:\.\d{1,6})?):(?P<degree>\d{1,3}(?:\.\d{1,6})?)"
)
_MOST: Final = 256
"""Entries of one annotation: all of an object's annotations together must stay below 256 KiB."""


@dataclass(frozen=True)
class Told:
    """One entry of the annotation. ``id``: a data-parallel rank or a GPU's UUID."""

    id: str
    delay_s: float
    degree: float

    def __str__(self) -> str:
        return f"{self.id}:{_decimal(self.delay_s)}:{_decimal(self.degree)}"


@dataclass(frozen=True)
class Notice:
    """An entry and when it was first seen (monotonic): from then on its delay counts."""

    told: Told
    seen_s: float

    @property
    def from_s(self) -> float:
        """When it takes effect."""
        return self.seen_s + self.told.delay_s


def parse_annotation(text: str) -> tuple[Told, ...]:
    """``"<id>:<delay seconds>:<degree>"``, several separated by commas; id is a data-parallel rank or a GPU's UUID.

    Raises:
        InvalidSpec: one line naming the annotation and the rule.
    """
    told = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise _wrong(
                f"must be <data-parallel rank or GPU UUID>:<delay seconds>:<degree>, such as 1:0:1.2, not {part[:60]!r}"
            )
        entry = Told(match["id"], float(match["delay"]), float(match["degree"]))
        if not 1.0 <= entry.degree <= 100.0:
            raise _wrong(f"degree must be from 1 (back to normal) to 100, not {match['degree']}")
        told.append(entry)
    if len(told) > _MOST:
        raise _wrong(f"must have at most {_MOST} entries, not {len(told)}")
    return tuple(told)


def tell(text: str, entry: Told) -> str:
    """The annotation after one more ``set_straggler``: replaces what was said of the same id; degree 1 removes it.

    Raises:
        InvalidSpec: the entry or what stands there already breaks a rule; one line that names it.
    """
    try:
        (checked,) = parse_annotation(str(entry))
    except ValueError:
        raise _wrong(f"must be one entry, not {str(entry)[:60]!r}") from None
    others = tuple(told for told in parse_annotation(text) if told.id != checked.id)
    wanted = others if checked.degree == 1.0 else (*others, checked)
    written = ",".join(map(str, wanted))
    parse_annotation(written)
    return written


def seconds_of(iterations: float, status: Mapping[str, Any]) -> float | None:
    """How long some iterations take, by the figures in a PerseusJob's status; None: none is known yet."""
    for name in ("measured", "predicted", "baseline"):
        if status.get(name):
            return float(round(iterations * int(status[name]["iterationTimeMicroseconds"]) / 1e6, 3))
    return None


def noticed(before: Iterable[Notice], told: Iterable[Told], now_s: float) -> tuple[Notice, ...]:
    """The entries with the time each was first seen: editing one does not begin the others' delay anew."""
    known = {notice.told: notice for notice in before}
    return tuple(known.get(entry, Notice(entry, now_s)) for entry in told)


def told_slowdowns(
    notices: Iterable[Notice], *, now_s: float, pipeline_of_gpu: Mapping[str, int], pipelines: int
) -> dict[int, float]:
    """Degrees in force now. Of several entries for one pipeline the largest counts; unknown ids count for nothing."""
    slowdowns: dict[int, float] = {}
    for notice in notices:
        entry = notice.told
        pipeline = int(entry.id) if entry.id.isdigit() else pipeline_of_gpu.get(entry.id, -1)
        if 0 <= pipeline < pipelines and entry.degree > 1.0 and now_s >= notice.from_s:
            slowdowns[pipeline] = max(entry.degree, slowdowns.get(pipeline, 1.0))
    return slowdowns


def _decimal(value: float) -> str:
    text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".")


def _wrong(rule: str) -> InvalidSpec:
    return InvalidSpec(f"annotation {keys.ANNOTATION_STRAGGLER}: {rule}")
