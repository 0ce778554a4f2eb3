"""Some seeds of the simulation, in processes whose machine is the simulated one: see docs/simulation.md."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.simulation.__main__ import PAGE, Workers, kept_seeds
from tests.simulation.mutant import Mutant
from tests.simulation.mutants import MUTANTS

SEED = 3
STOPPED = {"at_s": 14.0, "kind": "agent stopped", "place": 0, "lasts_s": 8.0, "value": 0.5}


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """One process: to begin takes it as long as some seeds."""
    with Workers(1) as started:
        yield started


def run(workers: Workers, *requests: dict[str, Any]) -> list[dict[str, Any]]:
    return list(workers.run(requests))


def test_no_promise_is_broken_in_some_seeds_and_in_those_in_which_one_was_once(workers: Workers) -> None:
    """``make simulate`` runs more of them."""
    outcomes = run(workers, *kept_seeds(), {"seed": 0}, {"seed": 1})
    assert [outcome["failure"] for outcome in outcomes if outcome["failure"]] == []


def test_a_seed_is_one_order_of_events_however_often_it_runs(workers: Workers) -> None:
    """In two processes, one of which has run other seeds before: nothing is left of those."""
    (first,) = run(workers, {"seed": SEED, "tracing": True})
    with Workers(1) as others:
        (second,) = run(others, {"seed": SEED, "tracing": True})
    assert first["trace"] == second["trace"]
    assert first["digest"] == second["digest"]
    assert len(first["trace"]) > 30


@pytest.mark.slow
def test_a_keeper_that_waits_is_found(workers: Workers) -> None:
    """The agent is stopped, and nobody gives its GPUs back for ten seconds."""
    (outcome,) = run(workers, {"seed": 1, "faults": [STOPPED]})
    assert outcome["failure"] == ""
    with Workers(1, "keeper-waits-10-s") as broken:
        (outcome,) = run(broken, {"seed": 1, "faults": [STOPPED]})
    assert "promise 2" in outcome["failure"]


def test_each_seed_that_is_kept_says_what_was_wrong() -> None:
    """In one line."""
    for kept in kept_seeds():
        assert kept.keys() == {"seed", "why", "faults"}
        assert len(kept["why"]) > 20, kept


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=lambda mutant: mutant.name)
def test_each_mutant_breaks_code_that_is_there_and_has_a_row_in_the_table(mutant: Mutant) -> None:
    """Its row says which seed finds it: ``make simulate MUTANTS=60`` writes it."""
    module = importlib.util.find_spec(mutant.module)
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    assert [source.count(was) for was, _ in mutant.changes] == [1] * len(mutant.changes)
    assert f"\n| `{mutant.name}` | {mutant.origin} | " in PAGE.read_text(encoding="utf-8")
