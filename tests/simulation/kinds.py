"""What a fault is, and how a kind of fault begins and ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulation.world import World


@dataclass(frozen=True)
class Fault:
    """One of them. It ends by itself after ``lasts_s``, if it has an end."""

    at_s: float
    kind: str
    place: int
    """Which node, replica or job: modulo how many there are."""
    lasts_s: float = 0.0
    value: float = 0.0

    def __str__(self) -> str:
        ends = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:.1f} s {self.kind} #{self.place}{ends}"


@dataclass(frozen=True)
class Kind:
    """How a kind of fault begins and ends."""

    begin: Callable[[World, Fault], None]
    end: Callable[[World, Fault], None] | None = None
    lasts_s: tuple[float, float] = (0.0, 0.0)
    weight: int = 2
    may_stay: bool = False
    """It is what a user wants, and need not end."""


def node_of(world: World, fault: Fault) -> Any:
    """The node that a fault is about."""
    return list(world.nodes.values())[fault.place % len(world.nodes)]


def setting(of: Callable[[World, Fault], Any], field: str, on: Any, off: Any) -> dict[str, Any]:
    """A field of something is of another value while it lasts."""

    def begin(world: World, fault: Fault) -> None:
        setattr(of(world, fault), field, on(fault) if callable(on) else on)

    def end(world: World, fault: Fault) -> None:
        setattr(of(world, fault), field, off)

    return {"begin": begin, "end": end}
