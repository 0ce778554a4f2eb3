"""Real parts fail on real nodes: every clock stays the plan's or the default, training goes on, the plan returns.

The walk draws faults from a seed: PERSEUS_SEED repeats one, PERSEUS_FAULTS makes it longer. Figures are printed.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
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
    mislead,
    set_certificates,
    start_all,
)
from kubernetes import client
from stage import LEASE_TTL_S, PATIENCE_S, SYSTEM, Job, Stage, Watch

from perseus_proto import keys
from perseus_sim.pki import Authority

pytestmark = pytest.mark.timeout(900)

ASKED = "PERSEUS_FAULTS" in os.environ
FAULTS = int(os.environ.get("PERSEUS_FAULTS", "50"))
BUDGET_S = 600.0
"""The walk ends earlier on a machine that is too busy, unless somebody asked for a number of faults."""
AT_ONCE = 5
Figures = dict[str, float]
SLACK_S = 60.0
"""How much longer than its bound something may take on a machine that is busy."""


@pytest.fixture(scope="module")
def stage(cluster: Any, api: Any, helm: Any, images: set[str], eventually: Any) -> Iterator[Stage]:
    with Stage(cluster, api, helm, eventually).standing() as stage:
        yield stage


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
    struck, started = 0, time.monotonic()
    while struck < FAULTS and (ASKED or time.monotonic() < started + BUDGET_S):
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
    print(f"{struck} of {FAULTS} faults in {time.monotonic() - started:.0f} s")
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
        told = [pod.status.container_statuses or [] for pod in pods()]  # none of a pod that has just been made
        return len(told) == 2 and all(statuses and all(each.ready for each in statuses) for statuses in told)

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


def test_certificates_that_expire_and_are_renewed(stage: Stage, watch: Watch, figures: Figures) -> None:
    """Renewed in time, nobody notices. Expired, nobody commands; renewed then, all goes on without a restart."""
    gpus = [gpu for job in stage.jobs for gpu in job.gpus]
    began = {role: pod.metadata.uid for role, pod in stage.cast().items()}
    renewed, authority = time.monotonic(), Authority("renewed")
    set_certificates(stage.core, SYSTEM, authority)
    while time.monotonic() < renewed + 2 * LEASE_TTL_S:
        stage.trains_on()
        time.sleep(1)
    assert all(gpu.default_after(renewed) is None for gpu in gpus), "leases were renewed all the time"

    set_certificates(stage.core, SYSTEM, authority, lifetime=timedelta(minutes=-1))
    stage.eventually("the operator has them", lambda: expired(stage), PATIENCE_S)
    assert kill_role(stage.cast(), "operator")  # connections that stand would stand for an hour
    struck = time.monotonic()
    for job in stage.jobs:
        assert freed_after(stage, job, struck) < LEASE_TTL_S + SLACK_S
    stage.trains_on()
    stage.eventually("it is said", lambda: not any(job.in_force() for job in stage.jobs), PATIENCE_S)
    set_certificates(stage.core, SYSTEM, authority)
    note(figures, "worst gap in planning after expired certificates were renewed, s", stage.returned())
    assert {role: pod.metadata.uid for role, pod in stage.cast().items()} == began, "nobody was replaced"
    figures["faults survived"] += 2


def expired(stage: Stage) -> bool:
    """Whether the operator's and every agent's certificate, as they see it, is over."""
    there = []
    for role, pod in stage.cast().items():
        if not role.startswith("trainer"):
            place = ["-n", SYSTEM, pod.metadata.name, "--", "cat"]
            text = stage.cluster.kubectl("exec", *place, "/etc/perseus/tls/tls.crt")
            there.append(x509.load_pem_x509_certificate(text.encode()).not_valid_after_utc < datetime.now(UTC))
    return all(there)


def test_a_node_whose_wall_clock_is_an_hour_fast(stage: Stage, watch: Watch, figures: Figures) -> None:
    """Agent and trainer live in another hour than the operator. (kubelet and containerd cannot: Go asks the kernel.)"""
    job = stage.jobs[0]
    environment = mislead(job.node)
    agents = ["-n", SYSTEM, "daemonset/perseus-agent"]
    job.environment = environment
    stage.cluster.kubectl("set", "env", *agents, *(f"{name}={value}" for name, value in environment.items()))
    try:
        stage.cluster.kubectl("rollout", "status", *agents, "--timeout=240s")
        stage.begin_anew(job)
        stage.returned()
        began = time.monotonic()
        cast = stage.cast()
        for role, hours in {
            f"agent of {job.node.name}": 1,
            f"trainer of {job.node.name}": 1,
            f"agent of {stage.jobs[1].node.name}": 0,
        }.items():
            pod = cast[role].metadata
            command = ["python", "-c", "import time; print(time.time())"]
            theirs = float(stage.cluster.kubectl("exec", "-n", pod.namespace, pod.name, "--", *command))
            assert abs(theirs - time.time() - 3600 * hours) < SLACK_S
        while time.monotonic() < began + LEASE_TTL_S + 5:  # longer than a lease that nobody renews
            stage.trains_on()
            time.sleep(1)
        assert all(gpu.default_after(began) is None for gpu in job.gpus), "the lease was renewed all the time"
    finally:
        job.environment = {}
        stage.cluster.kubectl("set", "env", *agents, *(f"{name}-" for name in environment))
        stage.cluster.kubectl("rollout", "status", *agents, "--timeout=240s")
        stage.begin_anew(job)
    figures["faults survived"] += 1


def test_a_node_that_is_gone_for_good(stage: Stage, watch: Watch, figures: Figures) -> None:
    other, job = operator_first(stage)
    pid, struck = job.node.pid, time.monotonic()
    assert pid is not None
    job.gpus = []  # they are gone, too
    os.kill(pid, signal.SIGKILL)
    stage.eventually("it is said", lambda: not job.in_force(), PATIENCE_S)
    stage.core.delete_node(job.node.name)
    stage.trains_on([other])
    assert other.in_force()
    assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    replaced = time.monotonic()
    new = lambda: stage.cluster.up(len(stage.jobs), say=lambda words: None) or True  # noqa: E731
    stage.eventually("a new node is ready", new, PATIENCE_S)
    stage.begin_anew(job)
    stage.eventually("the GPUs are there", job.open_gpus, PATIENCE_S)
    stage.returned()
    note(figures, "longest from a new node to the plan in force on it, s", time.monotonic() - replaced)
    figures["faults survived"] += 1


def operator_first(stage: Stage) -> list[Job]:
    """The jobs, that of the operator's node first."""
    node = stage.pod("operator").spec.node_name
    return sorted(stage.jobs, key=lambda job: job.node.name != node)


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
