"""The best split by length: never worse than one pool, and better only where classes want what one pool cannot give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from perseus_core.lengths import UNKNOWN, length_of, length_place
from perseus_solver.errors import InvalidProblem, SolverError
from perseus_solver.serving.planner import LatencyLimits, OperatingPoint
from perseus_solver.serving.planner import split as module
from perseus_solver.serving.planner.split import EngineVariant, SplitRequest, best_split, cells_of, request_class

LIMITS = LatencyLimits(1.0, 0.0, 0.05)
SHORT, LONG = (length_of(100), length_of(50)), (length_of(5_000), length_of(900))


@dataclass(frozen=True)
class Bench:
    """A replica that carries one load of short requests and another of those with any long one, at one clock."""

    gpus: int
    short: float
    mixed: float
    highest_mhz: int = 1_980
    steps: Any = None

    def points(self, requests: Any, limits: Any, floors: Any, boosts: Any = ()) -> tuple[OperatingPoint, ...]:
        most = self.short if max(requests.prompts) < 1_000 else self.mixed
        return (OperatingPoint(1_980, (0.0, most), (100.0 * self.gpus, 700.0 * self.gpus)),) if most else ()


class Resting:
    def resting_w(self, clock_mhz: float) -> float:
        return 100.0


def asked(*benches: Bench, load: float = 100.0, short: int = 90, long: int = 10) -> SplitRequest:
    cells, _ = cells_of({length_place(*SHORT): short, length_place(*LONG): long})
    variants = tuple(
        EngineVariant(Bench(one.gpus, one.short, one.mixed, steps=Resting()), (1_980,), 1.0, 60.0)  # type: ignore[arg-type]
        for one in benches
    )
    return SplitRequest(cells, 1.0, 1.0, variants, LIMITS, (load,) * 24, (load,) * 24)


def test_pools_pay_where_short_requests_are_carried_by_fewer_gpus() -> None:
    done = best_split(asked(Bench(1, 10.0, 0.0), Bench(8, 12.0, 10.0)))
    assert {pool.name: round(pool.share, 6) for pool in done.pools} in (
        {"prompt-s": 0.9, "prompt-ml": 0.1},
        {"prompt-sm": 0.9, "prompt-l": 0.1},
        {"answer-s": 0.9, "answer-ml": 0.1},
        {"answer-sm": 0.9, "answer-l": 0.1},
    )
    gpus = {pool.name[-1]: pool.plan.choices["pool"][0].gpus for pool in done.pools}
    assert sorted(gpus.values()) == [1, 8]
    assert done.joules < 0.5 * done.one_pool_joules
    assert done.joules == done.best_other_joules


def test_one_pool_is_best_where_all_are_alike_and_idle_replicas_cost() -> None:
    done = best_split(asked(Bench(4, 10.0, 10.0), load=5.0))
    assert [pool.name for pool in done.pools] == [""]
    assert done.joules == done.one_pool_joules < done.best_other_joules
    assert done.best_other_pools == 2
    assert done.gap == pytest.approx(0.0, abs=1e-6)


def test_a_split_whose_pool_keeps_no_limit_is_not_one_and_without_any_there_is_an_error() -> None:
    done = best_split(asked(Bench(4, 10.0, 8.0), long=0))
    assert (len(done.pools), done.best_other_pools) == (1, 0), "all requests are of one class"
    with pytest.raises(SolverError, match="no replica keeps the limits for all requests in one pool"):
        best_split(asked(Bench(4, 10.0, 0.0)))


def test_each_rectangle_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    original = module._planned
    monkeypatch.setattr(
        module, "_planned", lambda request, rectangle: (planned.append(rectangle), original(request, rectangle))[1]
    )
    best_split(asked(Bench(4, 10.0, 10.0)))
    assert len(planned) == len(set(planned)) == 36


def test_lengths_that_are_not_known_together_are_independent() -> None:
    counts = {length_place(SHORT[0], UNKNOWN): 3, length_place(LONG[0], UNKNOWN): 1, length_place(UNKNOWN, SHORT[1]): 9}
    cells, together = cells_of(counts)
    assert not together
    assert [cell.share for cell in cells] == [0.75, 0.25]
    with pytest.raises(InvalidProblem, match="at least one request"):
        cells_of({length_place(3, UNKNOWN): 5})


def test_requests_of_a_class_have_the_means_of_what_was_seen() -> None:
    request = asked(Bench(4, 1.0, 1.0), short=50, long=50)
    kind = request_class(request.cells, request, kv_per_token=2.0)
    assert kind.prompt_tokens == pytest.approx(np.mean([71, 3_162]), rel=0.01)
    assert kind.prompt_scv > 0.5
    assert kind.kv_tokens > 2.0 * 3_000, "long answers stay longest"
    assert len(kind.prompts) == len(kind.outputs) == 8
