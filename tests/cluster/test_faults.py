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
from stage import GPUS, LEASE_TTL_S, PATIENCE_S, PROGRAMS, SYSTEM, TRAINING, Job, Parting, Stage, Watch, find

from local_cluster.machine import running
from perseus_proto import keys
from perseus_sim.cluster.pki import Authority

pytestmark = pytest.mark.timeout(900)

ASKED = "PERSEUS_FAULTS" in os.environ
FAULTS = int(os.environ.get("PERSEUS_FAULTS", "50"))
BUDGET_S = 600.0
"""The walk ends earlier on a machine that is too busy, unless somebody asked for a number of faults."""
AT_ONCE = 6
Figures = dict[str, float]
SLACK_S = 60.0
"""How much longer than its bound something may take on a machine that is busy."""


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
    for job in stage.jobs:  # whatever a test that failed has left
        end_filter(job.node)
    if not stage.whole():
        stage.cluster.up(len(stage.jobs), ipv6=stage.cluster.ipv6, say=lambda words: None)
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
            time.sleep(dice.uniform(0, 1.5))
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
    note(figures, f"longest to default clocks of a node cut off (lease {LEASE_TTL_S:g} s), s", freed)
    figures["faults survived"] += 1


def test_an_evicted_agent_gives_back_what_it_has_and_is_replaced(stage: Stage, watch: Watch, figures: Figures) -> None:
    job, struck = stage.jobs[0], time.monotonic()
    pod = stage.pod("agent", job.node)
    parting = Parting(pod, job.node.root / GPUS)
    parting.start()
    eviction = {"metadata": {"name": pod.metadata.name, "namespace": SYSTEM}}
    stage.core.create_namespaced_pod_eviction(pod.metadata.name, SYSTEM, eviction)
    note(figures, "longest to default clocks after an eviction, s", freed_after(stage, job, struck))
    assert parting.kept() == [], "given back by the agent that goes, not by the one that comes"
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
    began = {role: pod.metadata.uid for role, pod in stage.cast().items()}
    renewed, authority = time.monotonic(), Authority("renewed")
    set_certificates(stage.core, SYSTEM, authority)
    there = lambda: all("renewed" in each.issuer.rfc4514_string() for each in certificates(stage))  # noqa: E731
    stage.eventually("operator and agents have them", there, PATIENCE_S)
    stays_in_force(stage, renewed, LEASE_TTL_S + 5)

    set_certificates(stage.core, SYSTEM, authority, lifetime=timedelta(minutes=-1))
    over = lambda: all(each.not_valid_after_utc < datetime.now(UTC) for each in certificates(stage))  # noqa: E731
    stage.eventually("operator and agents have them", over, PATIENCE_S)
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


def certificates(stage: Stage) -> list[x509.Certificate]:
    """The operator's and every agent's, as they see it."""
    found = []
    for role, pod in stage.cast().items():
        if not role.startswith("trainer"):
            place = ["-n", SYSTEM, pod.metadata.name, "--", "cat"]
            text = stage.cluster.kubectl("exec", *place, "/etc/perseus/tls/tls.crt")
            found.append(x509.load_pem_x509_certificate(text.encode()))
    return found


def test_a_minute_without_api_server_on_a_bad_network_changes_no_clock(
    stage: Stage, watch: Watch, figures: Figures
) -> None:
    """Three faults side by side, as each is a wait: latency on one node, loss on the other, and nobody to ask.

    Behind the tests that need Kubernetes' controllers: those come back to it only half a minute after such an outage.
    """
    slow, lossy = operator_first(stage)
    cast, struck = stage.cast(), time.monotonic()
    source, target = (cast[role].status.pod_ip for role in ("operator", f"agent of {slow.node.name}"))
    ends = [delay(slow.node, source, target, keys.DEFAULT_GRPC_PORT, 200)]
    try:
        ends.append(lose(lossy.node, 10))
        stage.returned()
        for component in ("kube-apiserver", "etcd"):
            assert kill_part(stage.cluster, CONTROL_PLANE, component)
        stays_in_force(stage, struck, 60)
    finally:
        for end in ends:
            end()
        start_all(stage.cluster)
    figures["faults survived"] += 3


def test_a_node_whose_wall_clock_is_an_hour_fast(stage: Stage, watch: Watch, figures: Figures) -> None:
    """Agent and trainer live in another hour than the operator. (kubelet and containerd cannot: Go asks the kernel.)"""
    job = stage.jobs[0]
    right = mislead(job.node)
    try:
        start_anew(stage, job)
        began, cast = time.monotonic(), stage.cast()
        for role, hours in {
            f"agent of {job.node.name}": 1,
            f"trainer of {job.node.name}": 1,
            f"agent of {stage.jobs[1].node.name}": 0,
        }.items():
            pod = cast[role].metadata
            command = ["python", "-c", "import time; print(time.time())"]
            theirs = float(stage.cluster.kubectl("exec", "-n", pod.namespace, pod.name, "--", *command))
            assert abs(theirs - time.time() - 3600 * hours) < SLACK_S
        stays_in_force(stage, began, LEASE_TTL_S + 5)
    finally:
        right()
        start_anew(stage, job)
    figures["faults survived"] += 1


def start_anew(stage: Stage, job: Job) -> None:
    """Kill agent and trainer of a job, and wait until others in their place have the plan in force."""
    cast = stage.cast()
    there = {role: find(cast[role], PROGRAMS[role.partition(" ")[0]]) for role in cast if role.endswith(job.node.name)}
    for role in there:
        assert kill_role(cast, role)
    gone = lambda: not any(running(pid) for pids in there.values() for pid in pids)  # noqa: E731
    stage.eventually("they are gone", gone)
    stage.trains_on([job])
    stage.returned()


def test_a_node_that_is_gone_for_good(stage: Stage, watch: Watch, figures: Figures) -> None:
    other, job = operator_first(stage)
    pid, struck = job.node.pid, time.monotonic()
    assert pid is not None
    job.gpus, job.spare = [], []  # they are gone, too
    os.kill(pid, signal.SIGKILL)
    stage.eventually("it is said", lambda: not job.in_force(), PATIENCE_S)
    stage.core.delete_node(job.node.name)
    stage.trains_on([other])
    assert other.in_force()
    assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    replaced = time.monotonic()
    new = lambda: stage.cluster.up(len(stage.jobs), ipv6=stage.cluster.ipv6, say=lambda words: None) or True  # noqa: E731
    stage.eventually("a new node is ready", new, PATIENCE_S)
    stage.begin_anew(job)

    def gpus() -> bool:
        """A kubelet that has just begun may refuse a pod whose GPUs its device plugin has not announced yet: that is
        for the pod's controller to mend."""
        if stage.core.read_namespaced_pod(job.name, TRAINING).status.phase == "Failed":
            stage.begin_anew(job)
        return job.open_gpus()

    stage.eventually("the GPUs are there", gpus, PATIENCE_S)
    stage.returned()
    note(figures, "longest from a new node to the plan in force on it, s", time.monotonic() - replaced)
    figures["faults survived"] += 1


def stays_in_force(stage: Stage, since: float, at_least_s: float) -> None:
    """For so long from now all train on; and since a time before no GPU of theirs was given its default clocks."""
    until = time.monotonic() + at_least_s
    while time.monotonic() < until:
        stage.trains_on()
        time.sleep(1)
    freed = {gpu.uuid: gpu.default_after(since) for job in stage.jobs for gpu in job.gpus}
    assert set(freed.values()) == {None}, "leases were renewed all the time"


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
