"""Some seeds of the simulation, in processes whose machine is the simulated one: see docs/simulation.md."""

from __future__ import annotations

from tests.simulation.__main__ import KEPT, Workers, kept_seeds

SEEDS = (3, 17)


def test_a_seed_is_one_order_of_events_however_often_it_runs() -> None:
    """In two processes, one of which ran another seed before: nothing is left of that."""
    runs = []
    for before in ((), (SEEDS[1],)):
        with Workers(1) as workers:
            outcomes = list(workers.run({"seed": seed, "tracing": True} for seed in (*before, SEEDS[0])))
        runs.append(outcomes[-1])
    first, second = runs
    assert first["trace"] == second["trace"]
    assert first["digest"] == second["digest"]
    assert len(first["trace"]) > 30


def test_no_promise_is_broken_in_some_seeds_and_in_those_in_which_one_was_once() -> None:
    """``make simulate`` runs more of them."""
    kept = kept_seeds()
    with Workers(1) as workers:
        outcomes = list(workers.run({"seed": seed} for seed in (*kept, *range(6))))
    assert [outcome["failure"] for outcome in outcomes if outcome["failure"]] == []


def test_a_keeper_that_waits_is_found() -> None:
    """The agent is stopped, and nobody gives its GPUs back for ten seconds."""
    stopped = {"at_s": 5.0, "kind": "agent stopped", "place": 0, "lasts_s": 8.0, "value": 0.5}
    with Workers(1, "keeper-waits-10-s") as workers:
        (outcome,) = workers.run([{"seed": 1, "faults": [stopped]}])
    assert "promise 2" in outcome["failure"]
    with Workers(1) as workers:
        (outcome,) = workers.run([{"seed": 1, "faults": [stopped]}])
    assert outcome["failure"] == ""


def test_each_seed_that_is_kept_says_what_was_wrong() -> None:
    """In one line."""
    lines = [line for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]
    for line in lines:
        number, _, why = line.partition(" ")
        assert number.isdigit(), line
        assert len(why.strip()) > 20, line
