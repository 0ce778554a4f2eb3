"""How well the operator's detector distinguishes stragglers from noise, on synthetic runs with known stragglers.

`make bench` computes the score; tests/laws/test_straggler_laws.py checks the same bounds on a few of the runs. Every
run has pipelines with noise, a drift that all share, slow random walks of each pipeline, and single slow iterations
that are no stragglers. Its stragglers come and go: in one stage or in all, beginning within an iteration, sometimes two
at a time.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from perseus_operator.api.job import Straggler
from perseus_operator.api.schema import parse
from perseus_operator.families.training.features.stragglers.detector import StragglerDetector
from perseus_operator.nodes.iterations import JobIteration

PLANNED_US = 1_000_000
STAGES = 4
ITERATIONS = 300
RUNS = 200
Result = dict[str, Any]


@dataclass(frozen=True)
class Episode:
    """A straggler: slow from iteration ``first`` to the one before ``end``, and in half of the iterations around."""

    pipeline: int
    first: int
    end: int
    slowdown: float
    stage: int | None
    """The slow stage; None for all stages."""


@dataclass(frozen=True)
class Run:
    """One run with known stragglers: slowdown of every stage (``paces[i][p][s]``) and pipeline (``spans[i][p]``)."""

    pipelines: int
    episodes: tuple[Episode, ...]
    spans: list[list[float]] = field(repr=False)
    paces: list[list[list[float]]] = field(repr=False)


def make_run(seed: int) -> Run:
    """Make a run from a seed."""
    chance = random.Random(seed)
    pipelines = chance.choice((2, 3, 4, 8, 16))
    noise = chance.choice((0.001, 0.003, 0.006))
    episodes = _episodes(chance, pipelines)
    walks = [0.0] * pipelines
    phase, swing = chance.random(), chance.choice((0.0, 0.02, 0.05))
    glitch = chance.choice((0.0, 0.002, 0.005))
    spans, paces = [], []
    for i in range(ITERATIONS):
        common = 1.02 + swing * math.sin(2 * math.pi * (phase + i / 150))
        row, stages = [], []
        for p in range(pipelines):
            walks[p] = max(-0.004, min(0.004, walks[p] + chance.gauss(0, 0.0003)))
            own = common * (1 + walks[p])
            slowdowns = [1.0] * STAGES
            for one in episodes:
                if one.pipeline == p:
                    share = _slow_share(one, i)
                    for s in range(STAGES) if one.stage is None else (one.stage,):
                        slowdowns[s] = max(slowdowns[s], 1 + share * (one.slowdown - 1))
            spike = 1 + chance.uniform(0.05, 0.8) if chance.random() < glitch else 1.0
            pace = [own * slowdown * spike * (1 + chance.gauss(0, noise)) for slowdown in slowdowns]
            stages.append(pace)
            # A slow stage slows its pipeline down by most of its own slowdown.
            whole = max(sum(slowdowns) / STAGES, 1 + 0.85 * (max(slowdowns) - 1))
            row.append(own * whole * spike * (1 + chance.gauss(0, noise)))
        spans.append(row)
        paces.append(stages)
    return Run(pipelines, episodes, spans, paces)


def _episodes(chance: random.Random, pipelines: int) -> tuple[Episode, ...]:
    """Draw stragglers: of fewer than four pipelines one at a time, of more pipelines two may overlap."""
    found: list[Episode] = []
    lanes = 1 if pipelines < 4 else 2
    for lane in range(lanes):
        at = chance.randint(20, 60)
        while at < ITERATIONS - 40:
            length = chance.randint(8, 60)
            slowdown = chance.choice((1.08, 1.1, 1.15, 1.2, 1.3, 1.5, 2.0))
            stage = chance.choice((None, *range(STAGES)))
            taken = {one.pipeline for one in found if one.first <= at + length + 8 and one.end >= at - 8}
            free = [p for p in range(pipelines) if p not in taken]
            if lane < lanes and free:
                found.append(Episode(chance.choice(free), at, min(at + length, ITERATIONS - 5), slowdown, stage))
            at += length + chance.randint(15, 60)
    return tuple(found)


def _slow_share(one: Episode, iteration: int) -> float:
    """Return the share of an iteration that is slow."""
    if one.first <= iteration < one.end:
        return 1.0
    if iteration in (one.first - 1, one.end):
        return 0.5
    return 0.0


class _Paces:
    """The slowdowns of single stages, in the form that the detector reads."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def paces(self, iteration: JobIteration) -> Mapping[int, Sequence[float]]:
        return dict(enumerate(self._run.paces[iteration.iteration]))

    def slowdown(self, slowdowns: Mapping[int, float]) -> float:
        return 1 + 0.85 * (max(slowdowns.values()) - 1)


@dataclass
class Score:
    """Counts of right, wrong and missing alarms, and reaction times."""

    right: int = 0
    wrong: int = 0
    missed: int = 0
    reactions: list[int] = field(default_factory=list)
    """Iterations from the first slow one to the alarm, both counted."""

    @property
    def precision(self) -> float:
        """Share of the alarms that were right."""
        return self.right / max(1, self.right + self.wrong)

    @property
    def recall(self) -> float:
        """Share of the stragglers that were found."""
        return (len(self.reactions)) / max(1, len(self.reactions) + self.missed)

    def reaction(self, share: float) -> int:
        """Return a quantile of the reactions in iterations."""
        return sorted(self.reactions)[math.ceil(share * len(self.reactions)) - 1]


def judge(run: Run, score: Score, *, stages: bool = True) -> None:
    """Replay a run to the detector with its default thresholds, and add its alarms to the score."""
    spec = parse(Straggler, {}, "straggler")
    detector, planned_times = StragglerDetector(), _Paces(run) if stages else None
    alarmed: dict[int, int] = {}
    alarms: list[tuple[int, int, int]] = []
    for i, row in enumerate(run.spans):
        spans_us = {p: round(PLANNED_US * ratio) for p, ratio in enumerate(row)}
        iteration = JobIteration(i, spans_us, max(spans_us.values()), None, dict.fromkeys(spans_us, 0), False)
        detector.observe(iteration, dict.fromkeys(spans_us, PLANNED_US), spec, planned_times=planned_times)
        for p in set(alarmed) - set(detector.slowdowns):
            alarms.append((p, alarmed.pop(p), i))
        for p in detector.slowdowns:
            alarmed.setdefault(p, i)
    alarms += [(p, since, ITERATIONS) for p, since in alarmed.items()]
    for p, since, _ in alarms:
        true = any(e.pipeline == p and e.first - 1 <= since <= e.end for e in run.episodes)
        score.right, score.wrong = score.right + true, score.wrong + (not true)
    for e in run.episodes:
        seen = [since for p, since, until in alarms if p == e.pipeline and since < e.end and until > e.first]
        if seen:
            score.reactions.append(max(1, min(seen) - e.first + 1))
        else:
            score.missed += 1


def measure(runs: int, *, stages: bool = True) -> Score:
    """Return the score of several runs."""
    score = Score()
    for seed in range(runs):
        judge(make_run(seed), score, stages=stages)
    return score


def stragglers() -> Result:
    """Measure precision, recall and reaction, with the slowdowns of single stages and without."""
    found: Result = {}
    for stages, name in ((True, "straggler"), (False, "straggler_by_span")):
        score = measure(RUNS, stages=stages)
        for figure, value, unit in (
            ("precision", score.precision, "share"),
            ("recall", score.recall, "share"),
            ("reaction_iterations", score.reaction(0.99), "99th %"),
        ):
            found[f"{name}_{figure}"] = {"value": value, "unit": unit}
    return found


FIGURES = {"straggler": stragglers}
