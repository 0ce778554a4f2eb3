"""An unmodified Job of eight ranks in a namespace that opted in by one label: no object of ours is written by a user.

The chapters depend on one another; with ``-s`` they print the journey.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import monitoring
import pytest
import yaml
from installation import CHART, PATIENCE_S, SYSTEM
from journey import AGENTS, Journey
from kubernetes import client
from training import PHYSICS, TRAINING, Training

from local_cluster.errors import ClusterError
from perseus_core import keys
from perseus_core.units import ratio_from_share
from perseus_operator.report.statement import Period
from perseus_operator.report.usage import Query, read_usage
from perseus_sim.profiles import profile_csv

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

JOB = Training("unmodified", stages=4, pipelines=2, microbatches=4)


def flags(mode: str) -> tuple[str, ...]:
    """Flags of a release whose class has this mode."""
    spec = {
        "objective": {"type": "MaxSlowdown", "maxSlowdown": "5%"},
        "mode": mode,
        "ttlSecondsAfterFinished": 5,
        "profiling": {"maxClocks": 6, "iterationsPerClock": 2},
        "comparison": {"everyIterations": 40, "iterations": 3},
    }
    return (
        *("--set", f"agent.namespaceOverride={AGENTS}"),
        *("--set", "simulatedGpus.enabled=true,webhook.enabled=true,agent.settings.gpuMetrics=true"),
        *("--set-json", f"energyClass.spec={json.dumps(spec)}"),
    )


@pytest.fixture(scope="module")
def journey(cleared_journey: Journey) -> Journey:
    cleared_journey.install(*flags("Observe"))
    return cleared_journey


def jobs(journey: Journey) -> list[Any]:
    return list(journey.read("-n", TRAINING, "get", keys.PLURAL)["items"])


@contextlib.contextmanager
def prometheus(journey: Journey, folder: Path) -> Iterator[Query]:
    """A Prometheus that scrapes the release as its PodMonitor says, with its rules; asks it a query."""
    release = ("--namespace", SYSTEM, *flags("Canary"), "--set", "metrics.podMonitor.enabled=true")
    rendered = yaml.safe_load_all(journey.helm("template", "perseus", str(CHART), *release))
    [monitor] = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    with monitoring.serve(journey.cluster, monitor, folder) as server:

        def query(text: str, first_s: int, last_s: int, step_s: int, /) -> list[Any]:
            span = {"start": f"{first_s}", "end": f"{last_s}", "step": f"{step_s}"}
            [answer] = server.get(("/api/v1/query_range", {"query": text, **span}))
            return list(answer["result"])

        yield query


def test_one_label_lets_a_job_be_observed(journey: Journey) -> None:
    journey.say(f"$ kubectl label namespace {TRAINING} {keys.LABEL_CLASS}=default")
    journey.kubectl("label", "namespace", TRAINING, f"{keys.LABEL_CLASS}=default")
    physics = profile_csv(JOB.stages, imbalance=1.25, forward_s=0.02)
    config = {"metadata": {"name": PHYSICS}, "data": {f"{JOB.name}.csv": physics}}
    journey.core.create_namespaced_config_map(TRAINING, config)
    journey.apply(*JOB.unmodified_job())
    journey.eventually("its PerseusJob is made", lambda: jobs(journey), PATIENCE_S)

    def predicted() -> Any:
        assert journey.locked() == [], "no clock is written"
        return journey.status(JOB).get("advised", {}).get("energySaved")

    journey.eventually("it is said what would be saved", predicted, PATIENCE_S)
    advised = journey.status(JOB)["advised"]
    journey.say(f"advised: {advised}")
    assert advised["restsOn"] == "Model"
    assert journey.condition(JOB, "PlanApplied")[:2] == ("False", "ObserveOnly")
    journey.plugin("list")
    journey.kubectl("-n", TRAINING, "delete", "job", JOB.name)
    journey.eventually("its PerseusJob goes with it", lambda: not jobs(journey), PATIENCE_S)
    journey.eventually("its pods have gone", lambda: not journey.training_pods(JOB), PATIENCE_S)


def test_the_next_run_has_a_plan(journey: Journey) -> None:
    journey.helm("upgrade", "perseus", str(CHART), "--namespace", SYSTEM, *flags("Canary"))
    journey.apply(JOB.unmodified_job()[1])
    [made] = journey.eventually("its PerseusJob is made", lambda: jobs(journey), PATIENCE_S)
    assert made["metadata"]["name"] == JOB.name
    assert made["metadata"]["labels"][keys.LABEL_CLASS] == "default"
    [owner] = made["metadata"]["ownerReferences"]
    assert (owner["kind"], owner["name"]) == ("Job", JOB.name)
    journey.follow(JOB, "PlanApplied")
    shape = journey.status(JOB)["shape"]
    assert (shape["stages"], shape["dataParallel"]) == (JOB.stages, JOB.pipelines)
    journey.show(f"kubectl -n {TRAINING} get pj", journey.kubectl("-n", TRAINING, "get", keys.PLURAL))
    journey.show("kubectl get energyclass", journey.kubectl("get", keys.CLASS_PLURAL))
    assert journey.read("get", keys.CLASS_PLURAL, "default")["status"]["jobs"] == 1


def test_the_plan_was_tried_on_one_pipeline_first(journey: Journey) -> None:
    canary = journey.status(JOB)["canary"]
    journey.say(f"canary: {canary}")
    assert canary["phase"] == "Passed"
    assert ratio_from_share(canary["saved"]) > 0


def test_it_saves_and_says_how_sure_that_is(journey: Journey) -> None:
    def compared() -> bool:
        return len(journey.status(JOB).get("comparison", {}).get("pairs", ())) >= 2

    journey.eventually("savings are measured again while it runs", compared, PATIENCE_S)
    journey.plugin("explain", JOB.name)
    journey.plugin("doctor", JOB.name)
    found = journey.status(JOB)["savings"]
    assert found["against"] == "Comparisons"
    savings = {what: float(found[what].rstrip("%")) for what in ("energy", "slowdown")}
    journey.say(f"savings: {savings}")
    assert savings["energy"] > 3
    assert savings["slowdown"] < 6


def test_other_pods_of_the_namespace_are_left_alone(journey: Journey) -> None:
    for name, labels in (("server", {}), ("declines", {keys.LABEL_CLASS: keys.NO_CLASS})):
        body = JOB.plain_pods()[1]
        body["metadata"] = {"name": name, "namespace": TRAINING, "labels": {"app": name, **labels}}
        body["spec"]["containers"][0]["command"] = ["sleep", "inf"]
        made = journey.core.create_namespaced_pod(TRAINING, body)
        assert keys.LABEL_JOB not in made.metadata.labels
        journey.kubectl("-n", TRAINING, "delete", "pod", name, "--grace-period=0", "--force")


def test_the_report_knows_it(journey: Journey, tmp_path: Path) -> None:
    with prometheus(journey, tmp_path) as query:

        def reported() -> Any:
            now_s = int(time.time())
            period = Period(begin_s=now_s - 60, end_s=now_s)
            members = read_usage(query, period, TRAINING, {}).members
            return [one for one in members if "energyJoules" in one.hours and "baselineJoules" in one.hours]

        [member] = journey.eventually("the report has its energy", reported, PATIENCE_S)
    journey.show("kubectl perseus report --since 1m --by class --format json", json.dumps(dict(member.hours)))
    assert member.energy_class == "default"


def test_a_finished_job_leaves_nothing(journey: Journey, tmp_path: Path) -> None:
    end = "import os, signal; os.kill(1, signal.SIGTERM)"
    for pod in journey.training_pods(JOB):
        with contextlib.suppress(ClusterError):  # it has ended with the one before
            journey.kubectl("-n", TRAINING, "exec", pod.metadata.name, "--", "python", "-c", end)
    journey.eventually(
        "the Job is complete",
        lambda: client.BatchV1Api(journey.core.api_client).read_namespaced_job(JOB.name, TRAINING).status.succeeded,
        PATIENCE_S,
    )
    journey.eventually("its PerseusJob is deleted after its TTL", lambda: not jobs(journey), PATIENCE_S)
    for plural in (keys.PROFILE_PLURAL, keys.FRONTIER_PLURAL):
        journey.eventually(
            f"no {plural} are left",
            lambda plural=plural: not journey.read("-n", TRAINING, "get", plural)["items"],
            PATIENCE_S,
        )
    assert journey.locked() == []
    with prometheus(journey, tmp_path) as query:

        def now(text: str) -> list[Any]:
            now_s = int(time.time())
            return query(text, now_s, now_s, 1)

        journey.eventually("the operator is scraped", lambda: now("perseus_operator_build_info"), PATIENCE_S)
        assert now("perseus_job_ready") == []
        assert now('ALERTS{job_name!=""}') == [], "none fires, and none is about to"
    journey.eventually(
        "the class counts no job", lambda: journey.read("get", keys.CLASS_PLURAL, "default")["status"]["jobs"] == 0
    )


def test_a_workload_that_is_deleted_takes_its_job_along(journey: Journey) -> None:
    journey.kubectl("-n", TRAINING, "delete", "job", JOB.name)
    journey.apply(JOB.unmodified_job()[1])
    journey.eventually("its PerseusJob is made", lambda: jobs(journey), PATIENCE_S)
    journey.kubectl("-n", TRAINING, "delete", "job", JOB.name)
    journey.eventually("it is gone", lambda: not jobs(journey), PATIENCE_S)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
