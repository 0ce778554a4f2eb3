"""Declared stragglers: the paper's ``set_straggler(id, delay, degree)``, stored as an annotation of the PerseusJob.

A user may write the annotation, ``kubectl perseus straggler`` and the RPC ``SetStraggler`` rewrite it with
``declare``. So a declaration outlives the operator, every reader of the object sees it, and it takes effect in one way
only. The paper's *degree* is called slowdown here. This module reads and writes the text; ``declared`` says which
declarations are in force.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from perseus_core import keys
from perseus_core.units import s_from_us
from perseus_operator.errors import InvalidSpec

_ENTRY = re.compile(
    r"(?P<id>\d{1,5}|GPU-[0-9a-zA-Z-]{1,60}):(?P<delay>\d{1,7}(?:\.\d{1,6})?):(?P<slowdown>\d{1,3}(?:\.\d{1,6})?)"
)
_MAX_ENTRIES: Final = 256
"""All annotations of an object together must stay below 256 KiB."""


@dataclass(frozen=True)
class Declaration:
    """One entry of the annotation.

    Attributes:
        id: the pipeline's data-parallel rank in decimals, or the UUID of one of its GPUs.
        delay_s: seconds from now until it takes effect.
        slowdown: how many times longer an iteration takes; 1: back to normal.
    """

    id: str
    delay_s: float
    slowdown: float

    def __str__(self) -> str:
        return f"{self.id}:{_decimal(self.delay_s)}:{_decimal(self.slowdown)}"


def parse_annotation(text: str) -> tuple[Declaration, ...]:
    """Parse ``"<id>:<delay seconds>:<slowdown>"``, several entries separated by commas.

    Args:
        text: the annotation's value; empty: no declarations.

    Returns:
        The declarations in the order of the text.

    Raises:
        InvalidSpec: the text breaks a rule; one line that names the annotation and the rule.
    """
    declarations = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _ENTRY.fullmatch(part)
        if match is None:
            raise _invalid(
                "must be <data-parallel rank or GPU UUID>:<delay seconds>:<slowdown>, such as 1:0:1.2,"
                f" not {part[:60]!r}"
            )
        entry = Declaration(match["id"], float(match["delay"]), float(match["slowdown"]))
        if not 1.0 <= entry.slowdown <= 100.0:
            raise _invalid(f"slowdown must be from 1 (back to normal) to 100, not {match['slowdown']}")
        declarations.append(entry)
    if len(declarations) > _MAX_ENTRIES:
        raise _invalid(f"must have at most {_MAX_ENTRIES} entries, not {len(declarations)}")
    return tuple(declarations)


def declare(text: str, entry: Declaration) -> str:
    """Add a declaration to the annotation: it replaces the one with the same id; slowdown 1 only removes that one.

    Args:
        text: the annotation's present value.
        entry: the new declaration.

    Returns:
        The annotation's new value; empty: no declaration is left.

    Raises:
        InvalidSpec: the entry or the present value breaks a rule; one line that names it.
    """
    try:
        (checked,) = parse_annotation(str(entry))
    except ValueError:
        raise _invalid(f"must be one entry, not {str(entry)[:60]!r}") from None
    others = tuple(declaration for declaration in parse_annotation(text) if declaration.id != checked.id)
    wanted = others if checked.slowdown == 1.0 else (*others, checked)
    written = ",".join(map(str, wanted))
    parse_annotation(written)
    return written


def duration_of_iterations_s(iterations: float, status: Mapping[str, Any]) -> float | None:
    """How many seconds some iterations take, by the figures of a PerseusJob's status; None: it has none yet."""
    for name in ("measured", "predicted", "baseline"):
        if status.get(name):
            return round(iterations * s_from_us(int(status[name]["iterationTimeMicroseconds"])), 3)
    return None


def _decimal(value: float) -> str:
    text = f"{value:.6f}"
    return text.rstrip("0").rstrip(".")


def _invalid(rule: str) -> InvalidSpec:
    return InvalidSpec(f"annotation {keys.ANNOTATION_STRAGGLER}: {rule}")
