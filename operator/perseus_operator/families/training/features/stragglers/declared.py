"""Which declared stragglers are in force now, and with which slowdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perseus_operator.families.training.features.stragglers.annotation import Declaration


@dataclass(frozen=True)
class DeclaredStraggler:
    """A declaration and when it was first observed (monotonic): its delay counts from then."""

    declaration: Declaration
    observed_s: float

    @property
    def from_s(self) -> float:
        """When it takes effect (monotonic)."""
        return self.observed_s + self.declaration.delay_s


def declared_slowdowns(
    stragglers: Iterable[DeclaredStraggler], *, now_s: float, dp_of_gpu: Mapping[str, int], pipelines: int
) -> dict[int, float]:
    """The slowdowns in force now, by data-parallel rank.

    Of several declarations for one pipeline the largest slowdown counts. Unknown ids are ignored.

    Args:
        stragglers: declared for the job.
        now_s: monotonic.
        dp_of_gpu: data-parallel rank of each GPU UUID of the job.
        pipelines: how many the job has.
    """
    slowdowns: dict[int, float] = {}
    for straggler in stragglers:
        entry = straggler.declaration
        dp = int(entry.id) if entry.id.isdigit() else dp_of_gpu.get(entry.id, -1)
        if 0 <= dp < pipelines and entry.slowdown > 1.0 and now_s >= straggler.from_s:
            slowdowns[dp] = max(entry.slowdown, slowdowns.get(dp, 1.0))
    return slowdowns


def outside(stragglers: Iterable[DeclaredStraggler], pipelines: int) -> str:
    """Say which declared data-parallel rank a job with so many pipelines does not have; empty: it has all of them."""
    ids = (straggler.declaration.id for straggler in stragglers)
    absent = next((rank for rank in ids if rank.isdigit() and int(rank) >= pipelines), None)
    return "" if absent is None else f"the job has data-parallel ranks 0 to {pipelines - 1}, not {absent}"
