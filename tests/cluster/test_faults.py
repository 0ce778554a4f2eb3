"""Real parts fail on real nodes: every clock stays the plan's or the default, training goes on, the plan returns.

The walk draws faults from a seed: PERSEUS_SEED repeats one, PERSEUS_FAULTS makes it longer. Figures are printed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from faults import (
    CONTROL_PLANE,
    any_fault,
    cut_off,
    delay,
    end_filter,
    exhaust_memory,
    kill_part,
    kill_role,
    lose,
    start_all,
)
from kubernetes import client
from stage import LEASE_TTL_S, PATIENCE_S, PROGRAMS, SYSTEM, TRAINING, Job, Stage, Watch, find

from perseus_proto import keys
from perseus_sim.pki import Authority

pytestmark = pytest.mark.timeout(900)

FAULTS = int(os.environ.get("PERSEUS_FAULTS", "50"))
AT_ONCE = 5
Figures = dict[str, float]
SLACK_S = 60.0
"""How much longer than its bound something may take on a machine that is busy."""


@pytest.fixture(scope="module")
def stage(cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[Stage]:
    stage = Stage(cluster, api, helm, eventually)
    try:
        stage.set()
        yield stage
    finally:
        stage.strike()


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    """What is printed in the end."""
    found = {"faults survived": 0.0, "worst gap in planning after a repair, s": 0.0}
    yield found
    print("\n" + "\n".join(f"{name}: {value:.4g}" for name, value in found.items()))


@pytest.fixture
def watch(stage: Stage) -> Iterator[Watch]:
    """From here on nobody may set a clock that is not the plan's; in the end the plan has returned."""
    watch = Watch(stage.jobs, stage.allowed_mhz())
    watch.start()
    yield watch
    stage.cluster.up(len(stage.jobs), say=lambda words: None)  # whatever a test that failed has left
    for job in stage.jobs:
        end_filter(job.node)
    stage.trains_on()
    stage.returned()
    watch.stop()
    assert watch.wrong == []


@pytest.mark.timeout(900 + 60 * FAULTS)
def test_a_random_walk_of_faults(stage: Stage, watch: Watch, figures: Figures) -> None:
    seed = os.environ.get("PERSEUS_SEED", str(random.randrange(10**6)))
    dice = random.Random(seed)
    print(f"\nPERSEUS_SEED={seed} PERSEUS_FAULTS={FAULTS}")
    struck = 0
    while struck < FAULTS:
        cast, ends, begun = stage.cast(), [], time.monotonic()
        for _ in range(min(AT_ONCE, FAULTS - struck)):
            what, end = any_fault(stage.cluster, cast, dice)
            struck += 1
            ends.append(end)
            print(f"{struck:4d}  {time.monotonic() - begun:5.1f} s  {what}", flush=True)
            time.sleep(dice.uniform(0, 2))
        for end in ends:
            end()
        repaired = time.monotonic()
        start_all(stage.cluster)
        stage.trains_on()
        stage.returned()
        now = time.monotonic()
        print(
            f"      {now - begun:5.1f} s  every plan is in force, {now - repaired:.1f} s after the repair", flush=True
        )
        assert watch.wrong == []
        note(figures, "worst gap in planning after a repair, s", now - repaired)
    figures["faults survived"] += struck


@pytest.mark.parametrize("role", ["agent", "trainer"])
def test_gpus_return_to_default_clocks_after_a_kill(stage: Stage, watch: Watch, figures: Figures, role: str) -> None:
    job, other = stage.jobs
    cast, struck = stage.cast(), time.monotonic()
    assert kill_role(cast, f"{role} of {job.node.name}")
    freed = freed_after(stage, job, struck)
    note(figures, f"longest to default clocks after kill -9 of the {role}, s", freed)
    assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    figures["faults survived"] += 1


def test_nothing_changes_while_the_api_server_is_away_for_a_minute(
    stage: Stage, watch: Watch, figures: Figures
) -> None:
    struck = time.monotonic()
    for component in ("kube-apiserver", "etcd"):
        assert kill_part(stage.cluster, CONTROL_PLANE, component)
    while time.monotonic() < struck + 60:
        stage.trains_on()
        time.sleep(1)
    assert all(gpu.default_after(struck) is None for job in stage.jobs for gpu in job.gpus), "plans stayed in force"
    start_all(stage.cluster)
    figures["faults survived"] += 1


def test_a_node_that_is_cut_off_frees_its_gpus_when_the_lease_ends(
    stage: Stage, watch: Watch, figures: Figures
) -> None:
    other, job = operator_first(stage)  # cutting off the operator's own node would cut off the operator
    struck = time.monotonic()
    mend = cut_off(job.node, stage.cast()["operator"].status.pod_ip)
    try:
        freed = freed_after(stage, job, struck)
        assert freed < LEASE_TTL_S + SLACK_S
        stage.trains_on()
        assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    finally:
        mend()
    note(figures, "longest to default clocks of a node cut off (lease 30 s), s", freed)
    figures["faults survived"] += 1


@pytest.mark.parametrize("fault", ["200 ms of latency", "10 % loss"])
def test_a_bad_network_changes_no_clock(stage: Stage, watch: Watch, figures: Figures, fault: str) -> None:
    job, cast = stage.jobs[0], stage.cast()
    struck = time.monotonic()
    if fault == "10 % loss":
        mend = lose(job.node, 10)
    else:
        source, target = (cast[role].status.pod_ip for role in ("operator", f"agent of {job.node.name}"))
        mend = delay(job.node, source, target, keys.DEFAULT_GRPC_PORT, 200)
    try:
        stage.returned()
        while time.monotonic() < struck + LEASE_TTL_S + 5:  # longer than a lease that nobody renews
            stage.trains_on()
            time.sleep(1)
        assert all(gpu.default_after(struck) is None for gpu in job.gpus), "the lease was renewed all the time"
    finally:
        mend()
    figures["faults survived"] += 1


def test_two_operators_at_once(stage: Stage, watch: Watch, figures: Figures) -> None:
    apps, older = client.AppsV1Api(stage.api), stage.pod("operator")
    apps.patch_namespaced_deployment("perseus-operator", SYSTEM, {"spec": {"replicas": 2}})
    selector = "app.kubernetes.io/component=perseus-operator"

    def pods() -> list[Any]:
        return list(stage.core.list_namespaced_pod(SYSTEM, label_selector=selector).items)

    def both_ready() -> bool:
        return [all(c.ready for c in pod.status.container_statuses or [None]) for pod in pods()] == [True, True]

    stage.eventually("two operators are ready", both_ready, PATIENCE_S)
    stage.trains_on()
    # The older goes: the newer has the higher epoch and is obeyed.
    stage.core.patch_namespaced_pod(
        older.metadata.name,
        SYSTEM,
        {"metadata": {"annotations": {"controller.kubernetes.io/pod-deletion-cost": "-100"}}},
    )
    apps.patch_namespaced_deployment("perseus-operator", SYSTEM, {"spec": {"replicas": 1}})
    stage.eventually("one operator is left", lambda: len(pods()) == 1, PATIENCE_S)
    assert pods()[0].metadata.uid != older.metadata.uid
    figures["faults survived"] += 1


def test_an_evicted_agent_is_replaced(stage: Stage, watch: Watch, figures: Figures) -> None:
    job, struck = stage.jobs[0], time.monotonic()
    pod = stage.pod("agent", job.node)
    eviction = {"metadata": {"name": pod.metadata.name, "namespace": SYSTEM}}
    stage.core.create_namespaced_pod_eviction(pod.metadata.name, SYSTEM, eviction)
    note(figures, "longest to default clocks after an eviction, s", freed_after(stage, job, struck))
    stage.eventually("another agent is there", lambda: stage.pod("agent", job.node).metadata.uid != pod.metadata.uid)
    figures["faults survived"] += 1


def test_an_agent_killed_for_memory_is_started_again(stage: Stage, watch: Watch, figures: Figures) -> None:
    job, cast, struck = stage.jobs[0], stage.cast(), time.monotonic()
    role = f"agent of {job.node.name}"
    before = restarts(stage, cast[role])
    exhaust_memory(cast, role)
    stage.eventually("the agent was killed", lambda: restarts(stage, cast[role]) > before)
    said = stage.core.read_namespaced_pod(cast[role].metadata.name, SYSTEM).status.container_statuses[0].last_state
    assert said.terminated.reason == "OOMKilled"
    note(figures, "longest to default clocks after a kill for memory, s", freed_after(stage, job, struck))
    figures["faults survived"] += 1


def test_a_node_that_is_gone_harms_no_other(stage: Stage, watch: Watch, figures: Figures) -> None:
    here, gone = operator_first(stage)
    struck = time.monotonic()
    pid = gone.node.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    stage.core.delete_node(gone.node.name)
    stage.eventually("the status says so", lambda: not gone.in_force(), PATIENCE_S)
    stage.trains_on([here])
    assert here.in_force()
    assert all(gpu.default_after(struck) is None for gpu in here.gpus)
    # Another machine of the same name: its disk is there, its pods are not.
    stage.cluster.up(len(stage.cluster.nodes), say=lambda words: None)
    stage.eventually("the lost pod is forgotten", lambda: forgotten(stage, gone), PATIENCE_S)
    stage.eventually("the new machine has GPUs", gone.open_gpus, PATIENCE_S)
    stage.core.create_namespaced_pod(TRAINING, gone.pod())
    figures["faults survived"] += 1


def test_certificates_that_expired_free_the_gpus_and_new_ones_bring_the_plan_back(
    stage: Stage, watch: Watch, figures: Figures
) -> None:
    old, new = Authority("expired"), Authority("rotated")
    give_certificates(stage, old, timedelta(minutes=-1))
    stage.eventually("the expired certificates have arrived", lambda: arrived(stage, old), PATIENCE_S)
    struck = time.monotonic()
    assert kill_role(stage.cast(), "operator")  # connections that are there live on: have them made anew
    for job in stage.jobs:
        freed_after(stage, job, struck)
    stage.trains_on()
    before = {name: restarts(stage, pod) for name, pod in stage.cast().items() if name.startswith("agent")}
    give_certificates(stage, new, timedelta(days=1))
    stage.eventually("the new certificates have arrived", lambda: arrived(stage, new), PATIENCE_S)
    stage.returned()
    after = {name: restarts(stage, pod) for name, pod in stage.cast().items() if name.startswith("agent")}
    assert after == before, "taken up without a restart"
    figures["faults survived"] += 1


FAKETIME = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


def test_agents_whose_wall_clock_is_an_hour_off_keep_the_plan(stage: Stage, watch: Watch, figures: Figures) -> None:
    if not FAKETIME.exists():
        pytest.skip(f"no {FAKETIME} on this machine (Debian: libfaketime)")
    faked: dict[str, list[Any]] = {
        "extraEnv": [
            {"name": "LD_PRELOAD", "value": "/faketime/libfaketime.so.1"},
            {"name": "FAKETIME", "value": "+1h"},
            {"name": "FAKETIME_DONT_FAKE_MONOTONIC", "value": "1"},
        ],
        "extraVolumes": [{"name": "faketime", "hostPath": {"path": str(FAKETIME.parent)}}],
        "extraVolumeMounts": [{"name": "faketime", "mountPath": "/faketime", "readOnly": True}],
    }
    try:
        stage.upgrade({f"agent.{key}": value for key, value in faked.items()})
        script = "import time; print(time.time())"
        for job in stage.jobs:
            name = stage.pod("agent", job.node).metadata.name
            said = stage.cluster.kubectl("-n", SYSTEM, "exec", name, "-c", "agent", "--", "python", "-c", script)
            assert 3000 < float(said) - time.time() < 4200
        stage.returned()
    finally:
        stage.upgrade({f"agent.{key}": [] for key in faked})
    figures["faults survived"] += 1


def give_certificates(stage: Stage, authority: Authority, lifetime: timedelta) -> None:
    """Give operator and agents certificates of an authority, as a user or cert-manager would."""
    for who in ("operator", "agent"):
        pair = authority.issue(f"perseus-{who}", hosts=(f"perseus-{who}",), client=True, lifetime=lifetime)
        content = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": authority.certificate}
        data = {key: b64encode(value).decode() for key, value in content.items()}
        stage.core.patch_namespaced_secret(f"perseus-{who}-tls", SYSTEM, {"data": data})


def arrived(stage: Stage, authority: Authority) -> bool:
    """Whether every pod of ours has been given what an authority signed."""
    pods = [(role.split()[0], pod) for role, pod in stage.cast().items() if not role.startswith("trainer")]
    return all(
        Path(f"/proc/{pid}/root/etc/perseus/tls/ca.crt").read_bytes() == authority.certificate
        for role, pod in pods
        for pid in find(pod, PROGRAMS[role])
    )


def operator_first(stage: Stage) -> list[Job]:
    """The jobs, that of the operator's node first."""
    node = stage.pod("operator").spec.node_name
    return sorted(stage.jobs, key=lambda job: job.node.name != node)


def forgotten(stage: Stage, job: Job) -> bool:
    """Remove the pod of a lost node as an administrator would; whether it is gone."""
    with contextlib.suppress(client.exceptions.NotFoundException):
        stage.core.delete_namespaced_pod(job.name, TRAINING, grace_period_seconds=0)
    return job.name not in {pod.metadata.name for pod in stage.core.list_namespaced_pod(TRAINING).items}


def restarts(stage: Stage, pod: Any) -> int:
    found = stage.core.read_namespaced_pod(pod.metadata.name, SYSTEM)
    return int(found.status.container_statuses[0].restart_count)


def freed_after(stage: Stage, job: Job, since: float) -> float:
    """Wait until every GPU of a job has been given its default clocks; returns how long the last one took."""

    def freed() -> list[float] | None:
        times = [gpu.default_after(since) for gpu in job.gpus]
        return [time for time in times if time is not None] if None not in times else None

    return max(stage.eventually("every GPU is given its default clocks", freed, PATIENCE_S))


def note(figures: Figures, name: str, value: float) -> None:
    """Keep the worst."""
    figures[name] = max(figures.get(name, 0.0), value)
