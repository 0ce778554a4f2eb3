"""A line or two of the code broken on purpose, and which seeds may show it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Faults = Sequence[Mapping[str, Any]]
"""What a seed has drawn."""
Needs = tuple[str, ...] | Callable[[Faults], bool]


@dataclass(frozen=True)
class Mutant:
    """Lines of one module, as they are and as they become. ``origin``: of the issue's lists, or of a promise."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]
    origin: str
    needs: Needs = ()
    """Kinds of faults without which nothing can show, or what must be true of them: other seeds are not tried."""

    def may_show(self, faults: Faults) -> bool:
        """Whether a seed with these faults is worth a try."""
        if callable(self.needs):
            return self.needs(faults)
        return {fault["kind"] for fault in faults}.issuperset(self.needs)


def within(first: str, second: str, after_s: float) -> Callable[[Faults], bool]:
    """Faults of the second kind that begin so long after one of the first has begun, and before it ends."""

    def meet(faults: Faults) -> bool:
        return any(
            one["kind"] == first
            and two["kind"] == second
            and two["at_s"] > one["at_s"] + after_s
            and not 0 < one["lasts_s"] < two["at_s"] - one["at_s"]
            for one in faults
            for two in faults
        )

    return meet


def overlap(firsts: Collection[str], second: str) -> Callable[[Faults], bool]:
    """A fault of one of these kinds is there while one of another kind is."""

    def meet(faults: Faults) -> bool:
        return any(
            one["kind"] in firsts
            and two["kind"] == second
            and one["at_s"] < two["at_s"] + two["lasts_s"]
            and two["at_s"] < one["at_s"] + one["lasts_s"]
            for one in faults
            for two in faults
        )

    return meet


def mutant(name: str, module: str, origin: str, *changes: tuple[str, str], needs: Needs = ()) -> Mutant:
    return Mutant(name, module, changes, origin, needs)


SURVIVED: Final = "survived all suites"
HOLE: Final = "hole of an attack"
