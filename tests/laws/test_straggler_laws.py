"""Detection of stragglers on labelled runs: what `make bench` measures on many of them holds on a few."""

from __future__ import annotations

import pytest
from tests.bench.stragglers import ITERATIONS, STAGES, make_run, measure

from perseus_operator.families.training.features.stragglers.detector import StragglerDetector

RUNS = 8


@pytest.mark.parametrize("stages", [True, False], ids=["stages are told", "spans alone"])
def test_nearly_every_straggler_is_found_within_two_iterations_and_nearly_no_alarm_is_false(stages: bool) -> None:
    score = measure(RUNS, stages=stages)
    assert len(score.reactions) > 3 * RUNS, "there is something to find"
    assert score.precision >= 0.95
    assert score.recall >= 0.95
    assert score.reaction(0.95) <= 2
    assert max(score.reactions) <= 3


def test_a_detector_that_believes_every_iteration_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = StragglerDetector.observe

    def hasty(self: StragglerDetector, iteration: object, *further: object, **named: object) -> None:
        plain(self, iteration, *further, slowed_pipelines=range(64), **named)  # type: ignore[arg-type,call-arg]

    monkeypatch.setattr(StragglerDetector, "observe", hasty)
    assert measure(RUNS).precision < 0.9


def test_a_detector_that_is_deaf_would_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StragglerDetector, "observe", lambda *_, **__: None)
    score = measure(2)
    assert score.recall == 0
    assert score.missed > 0


def test_runs_are_what_their_seed_says_and_labels_what_happens() -> None:
    run = make_run(3)
    assert run == make_run(3)
    assert run.spans == make_run(3).spans
    assert len(run.spans) == len(run.paces) == ITERATIONS
    for episode in run.episodes:
        inside = [run.spans[i][episode.pipeline] for i in range(episode.first, episode.end)]
        others = [p for p in range(run.pipelines) if p not in {e.pipeline for e in run.episodes}]
        assert episode.end - episode.first >= 2
        if others:
            beside = [run.spans[i][others[0]] for i in range(episode.first, episode.end)]
            assert sum(inside) / sum(beside) > 1 + 0.5 * (episode.slowdown - 1) * (1 if episode.stage is None else 0.85)
    assert all(len(row[0]) == STAGES for row in run.paces)
