"""Faults of real parts on real nodes: every clock is the plan's or the default, training goes on, the plan returns.

The random walk draws faults from a seed: PERSEUS_SEED repeats a walk, PERSEUS_FAULTS sets its length. The tests print
their figures.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from statistics import median
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
    set_certificates,
    set_clock_ahead,
    signal_role,
    start_all,
)
from installation import LEASE_TTL_S, PATIENCE_S, PROGRAMS, SYSTEM, AgentExit, Installation, Watch, find
from outside_gpu import GPUS
from replicas import Replicas
from training_job import TRAINING, Job

from local_cluster.machine import running
from perseus_core import keys
from perseus_sim.cluster.pki import Authority

pytestmark = pytest.mark.timeout(900)

LENGTH_IS_SET = "PERSEUS_FAULTS" in os.environ
FAULTS = int(os.environ.get("PERSEUS_FAULTS", "50"))
BUDGET_S = 600.0
"""The walk ends after this time on a busy machine, unless PERSEUS_FAULTS sets its length."""
AT_ONCE = 6
KILLS = int(os.environ.get("PERSEUS_KILLS", "8"))
RESTORED_S = 1.0
"""In this time every GPU of a node is at default clocks after its agent was killed."""
REPLICA_FAULTS = int(os.environ.get("PERSEUS_REPLICA_FAULTS", "8"))
Figures = dict[str, float]
SLACK_S = 60.0
"""How much longer than its limit something may take on a busy machine."""


@pytest.fixture(scope="module")
def figures() -> Iterator[Figures]:
    """The figures that are printed at the end."""
    found = {"faults survived": 0.0, "worst gap in planning after a repair, s": 0.0}
    yield found
    print("\n" + "\n".join(f"{name}: {value:.4g}" for name, value in found.items()))


@pytest.fixture
def watch(installation: Installation) -> Iterator[Watch]:
    """Record every clock that is neither the plan's nor the default; at the end check that the plan returns."""
    watch = Watch(installation.jobs, installation.plans)
    watch.start()
    yield watch
    for job in installation.jobs:  # left by a test that failed
        end_filter(job.node)
    if not installation.all_parts_run():
        repair_cluster(installation)
    installation.trains_on()
    installation.wait_for_plans()
    watch.stop()
    assert watch.wrong == []


@pytest.mark.timeout(900 + 60 * FAULTS)
def test_a_random_walk_of_faults(installation: Installation, watch: Watch, figures: Figures) -> None:
    seed = os.environ.get("PERSEUS_SEED", str(random.randrange(10**6)))
    dice = random.Random(seed)
    print(f"\nPERSEUS_SEED={seed} PERSEUS_FAULTS={FAULTS}")
    struck, started = 0, time.monotonic()
    while struck < FAULTS and (LENGTH_IS_SET or time.monotonic() < started + BUDGET_S):
        pods, ends, begun = installation.pods_by_role(), [], time.monotonic()
        for _ in range(min(AT_ONCE, FAULTS - struck)):
            what, end = any_fault(installation.cluster, pods, dice)
            struck += 1
            ends.append(end)
            print(f"{struck:4d}  {time.monotonic() - begun:5.1f} s  {what}", flush=True)
            time.sleep(dice.uniform(0, 1.5))
        for end in ends:
            end()
        repaired = time.monotonic()
        start_all(installation.cluster)
        installation.trains_on()
        installation.wait_for_plans()
        now = time.monotonic()
        print(
            f"      {now - begun:5.1f} s  every plan is in force, {now - repaired:.1f} s after the repair", flush=True
        )
        assert watch.wrong == []
        record_worst(figures, "worst gap in planning after a repair, s", now - repaired)
    print(f"{struck} of {FAULTS} faults in {time.monotonic() - started:.0f} s")
    figures["faults survived"] += struck


@pytest.mark.timeout(300 + 60 * KILLS)
def test_no_gpu_stays_locked_when_one_of_our_processes_is_killed(
    installation: Installation, watch: Watch, figures: Figures
) -> None:
    """Kill -9 of one process after the other.

    Without an operator the plan stays for as long as the lease. Without a keeper the agent drives on; it is killed
    next, so that the keeper that was started again gives back what it had locked.
    """
    seconds: dict[str, list[float]] = {role: [] for role in ("keeper", "agent", "trainer", "operator")}
    for number in range(KILLS):
        role, job = list(seconds)[number % len(seconds)], installation.jobs[number // len(seconds) % 2]
        [other] = [each for each in installation.jobs if each is not job]
        pods = installation.pods_by_role()
        name = role if role == "operator" else f"{role} of {job.node.name}"
        keeper, agent = (find(pods[f"agent of {job.node.name}"], PROGRAMS[each]) for each in ("keeper", "agent"))
        struck = time.monotonic()
        assert kill_role(pods, name)
        if role == "operator":
            installation.trains_on()
            assert all(gpu.default_after(struck) is None for gpu in job.gpus), "the lease outlasts the operator"
        elif role == "keeper":
            installation.eventually("another keeper runs", lambda: another_runs(pods[name], keeper), PATIENCE_S)  # noqa: B023
            installation.eventually("another keeper watches", installation.keepers_watch, PATIENCE_S)
            seconds[role].append(time.monotonic() - struck)
            assert find(pods[name], PROGRAMS["agent"]) == agent, "the agent lives"
            assert all(gpu.default_after(struck) is None for gpu in job.gpus), "and drives every GPU"
        else:
            seconds[role].append(installation.freed_after(job, struck))
        assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
        installation.trains_on()
        installation.wait_for_plans()
        assert watch.wrong == []
        figures["faults survived"] += 1
    for role, found in seconds.items():
        if found:
            print(f"{len(found)} kills of the {role}: median {median(found):.3f} s, at most {max(found):.3f} s")
            until = "another keeper watches" if role == "keeper" else "default clocks"
            record_worst(figures, f"longest to {until} after kill -9 of the {role}, s", max(found))
    assert max(seconds["agent"]) < RESTORED_S


def another_runs(pod: Any, old: list[int]) -> bool:
    """Return whether a pod has a keeper, and not the old one."""
    return find(pod, PROGRAMS["keeper"]) not in ([], old)


def test_an_agent_that_hangs_loses_its_gpus(installation: Installation, watch: Watch, figures: Figures) -> None:
    """The keeper ends it: a hung agent does not react when a lease ends."""
    job, other = installation.jobs
    pods, struck = installation.pods_by_role(), time.monotonic()
    assert signal_role(pods, f"agent of {job.node.name}", signal.SIGSTOP)
    record_worst(figures, "longest to default clocks of an agent that hangs, s", installation.freed_after(job, struck))
    assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    figures["faults survived"] += 1


def test_replicas_of_the_operator_follow_each_other(installation: Installation, watch: Watch, figures: Figures) -> None:
    """One becomes three and three become one, and meanwhile replicas are killed, cut off, deleted and frozen: no GPU
    leaves its plan at any time.
    """
    seed = os.environ.get("PERSEUS_SEED", str(random.randrange(10**6)))
    dice, replicas, begun = random.Random(seed), Replicas(installation), time.monotonic()
    print(f"\nPERSEUS_SEED={seed}")
    try:
        installation.scale(3)
        installation.eventually("each holds its part", replicas.even, PATIENCE_S)
        for number in range(REPLICA_FAULTS):
            struck = time.monotonic()
            what, pod, end = replicas.fault(number, dice)
            taken_s = replicas.taken_after(pod, struck)
            print(f"{what}: its shards are held by others after {taken_s:.1f} s", flush=True)
            record_worst(figures, "longest until others hold a replica's shards, s", taken_s)
            stays_in_force(installation, struck, 3)
            end()
            installation.eventually("each holds its part again", replicas.even, PATIENCE_S)
            figures["faults survived"] += 1
    finally:
        installation.scale(1)
    installation.eventually("one holds everything", replicas.even, PATIENCE_S)
    stays_in_force(installation, begun, 3)


def test_a_node_that_is_cut_off_frees_its_gpus_when_the_lease_ends(
    installation: Installation, watch: Watch, figures: Figures
) -> None:
    other, job = installation.operator_first()  # cutting off the operator's own node would also cut off the operator
    struck = time.monotonic()
    mend = cut_off(job.node, installation.pods_by_role()["operator"].status.pod_ip)
    try:
        freed = installation.freed_after(job, struck)
        assert freed < LEASE_TTL_S + SLACK_S
        installation.trains_on()
        assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    finally:
        mend()
    record_worst(figures, f"longest to default clocks of a node cut off (lease {LEASE_TTL_S:g} s), s", freed)
    figures["faults survived"] += 1


def test_an_evicted_agent_resets_its_clocks_and_is_replaced(
    installation: Installation, watch: Watch, figures: Figures
) -> None:
    job, struck = installation.jobs[0], time.monotonic()
    pod = installation.pod("agent", job.node)
    agent_exit = AgentExit(pod, job.node.root / GPUS)
    agent_exit.start()
    eviction = {"metadata": {"name": pod.metadata.name, "namespace": SYSTEM}}
    installation.core.create_namespaced_pod_eviction(pod.metadata.name, SYSTEM, eviction)
    record_worst(figures, "longest to default clocks after an eviction, s", installation.freed_after(job, struck))
    assert agent_exit.left_locked() == [], "reset by the evicted agent, not by the next one"
    installation.eventually(
        "another agent runs", lambda: installation.pod("agent", job.node).metadata.uid != pod.metadata.uid
    )
    figures["faults survived"] += 1


def test_an_agent_killed_for_memory_is_started_again(
    installation: Installation, watch: Watch, figures: Figures
) -> None:
    job, pods, struck = installation.jobs[0], installation.pods_by_role(), time.monotonic()
    role = f"agent of {job.node.name}"
    before = installation.restarts(pods[role])
    exhaust_memory(pods, role)
    installation.eventually("the agent was killed", lambda: installation.restarts(pods[role]) > before)
    container = installation.core.read_namespaced_pod(pods[role].metadata.name, SYSTEM).status.container_statuses[0]
    assert container.last_state.terminated.reason == "OOMKilled"
    record_worst(figures, "longest to default clocks after a kill for memory, s", installation.freed_after(job, struck))
    figures["faults survived"] += 1


def test_certificates_that_expire_and_are_renewed(installation: Installation, watch: Watch, figures: Figures) -> None:
    """Certificates that are renewed in time change nothing. Expired ones stop all commands until they are renewed."""
    began = {role: pod.metadata.uid for role, pod in installation.pods_by_role().items()}
    renewed, authority = time.monotonic(), Authority("renewed")
    set_certificates(installation.core, SYSTEM, authority)
    there = lambda: all("renewed" in each.issuer.rfc4514_string() for each in certificates(installation))  # noqa: E731
    installation.eventually("operator and agents have them", there, PATIENCE_S)
    stays_in_force(installation, renewed, LEASE_TTL_S + 5)

    set_certificates(installation.core, SYSTEM, authority, lifetime=timedelta(minutes=-1))
    over = lambda: all(each.not_valid_after_utc < datetime.now(UTC) for each in certificates(installation))  # noqa: E731
    installation.eventually("operator and agents have them", over, PATIENCE_S)
    assert kill_role(installation.pods_by_role(), "operator")  # otherwise its open connections would last for an hour
    struck = time.monotonic()
    for job in installation.jobs:
        assert installation.freed_after(job, struck) < LEASE_TTL_S + SLACK_S
    installation.trains_on()
    installation.eventually(
        "the status reports it", lambda: not any(job.in_force() for job in installation.jobs), PATIENCE_S
    )
    set_certificates(installation.core, SYSTEM, authority)
    record_worst(
        figures, "worst gap in planning after expired certificates were renewed, s", installation.wait_for_plans()
    )
    assert {role: pod.metadata.uid for role, pod in installation.pods_by_role().items()} == began, "no pod was replaced"
    figures["faults survived"] += 2


def certificates(installation: Installation) -> list[x509.Certificate]:
    """Return the certificates of the operator and every agent, as their containers see them."""
    found = []
    for role, pod in installation.pods_by_role().items():
        if not role.startswith("trainer"):
            command = ["-n", SYSTEM, pod.metadata.name, "--", "cat"]
            text = installation.cluster.kubectl("exec", *command, "/etc/perseus/tls/tls.crt")
            found.append(x509.load_pem_x509_certificate(text.encode()))
    return found


def test_a_minute_without_api_server_on_a_bad_network_changes_no_clock(
    installation: Installation, watch: Watch, figures: Figures
) -> None:
    """Three faults at the same time: latency on one node, lost packets on the other, and no API server.

    It comes after the tests that need Kubernetes' controllers, which take half a minute to work after such an outage.
    """
    slow, lossy = installation.operator_first()
    pods, struck = installation.pods_by_role(), time.monotonic()
    source, target = (pods[role].status.pod_ip for role in ("operator", f"agent of {slow.node.name}"))
    ends = [delay(slow.node, source, target, keys.DEFAULT_GRPC_PORT, 200)]
    try:
        ends.append(lose(lossy.node, 10))
        installation.wait_for_plans()
        for component in ("kube-apiserver", "etcd"):
            assert kill_part(installation.cluster, CONTROL_PLANE, component)
        stays_in_force(installation, struck, 60)
    finally:
        for end in ends:
            end()
        start_all(installation.cluster)
    figures["faults survived"] += 3


def test_a_node_whose_wall_clock_is_an_hour_fast(installation: Installation, watch: Watch, figures: Figures) -> None:
    """The clocks of agent and trainer are an hour ahead of the operator's.

    Those of kubelet and containerd cannot be changed in this way, because Go reads the clock without the C library.
    """
    job = installation.jobs[0]
    end = set_clock_ahead(job.node)
    try:
        restart_processes(installation, job)
        began, pods = time.monotonic(), installation.pods_by_role()
        for role, hours in {
            f"agent of {job.node.name}": 1,
            f"trainer of {job.node.name}": 1,
            f"agent of {installation.jobs[1].node.name}": 0,
        }.items():
            pod = pods[role].metadata
            command = ["python", "-c", "import time; print(time.time())"]
            pod_time_s = float(installation.cluster.kubectl("exec", "-n", pod.namespace, pod.name, "--", *command))
            assert abs(pod_time_s - time.time() - 3600 * hours) < SLACK_S
        stays_in_force(installation, began, LEASE_TTL_S + 5)
    finally:
        end()
        restart_processes(installation, job)
    figures["faults survived"] += 1


def restart_processes(installation: Installation, job: Job) -> None:
    """Kill agent, keeper and trainer of a job, and wait until the plan is in force with the new processes."""
    pods = installation.pods_by_role()
    old = {role: find(pods[role], PROGRAMS[role.partition(" ")[0]]) for role in pods if role.endswith(job.node.name)}
    assert all(old.values()), old
    for pid in (pid for pids in old.values() for pid in pids):
        with contextlib.suppress(ProcessLookupError):  # it has ended since
            os.kill(pid, signal.SIGKILL)
    gone = lambda: not any(running(pid) for pids in old.values() for pid in pids)  # noqa: E731
    installation.eventually("they are gone", gone)
    installation.trains_on([job])
    installation.wait_for_plans()


def test_a_node_that_is_gone_for_good(installation: Installation, watch: Watch, figures: Figures) -> None:
    other, job = installation.operator_first()
    pid, struck = job.node.pid, time.monotonic()
    assert pid is not None
    job.gpus, job.spare = [], []  # they are gone too
    os.kill(pid, signal.SIGKILL)
    installation.eventually("the status reports it", lambda: not job.in_force(), PATIENCE_S)
    installation.core.delete_node(job.node.name)
    installation.trains_on([other])
    assert other.in_force()
    assert all(gpu.default_after(struck) is None for gpu in other.gpus), "the other node's plan is untouched"
    replaced = time.monotonic()
    installation.eventually("a new node is ready", lambda: repair_cluster(installation), PATIENCE_S)
    installation.replace_pod(job)

    def gpus() -> bool:
        """A new kubelet refuses pods until the device plugin has announced the GPUs; a controller replaces them."""
        if installation.core.read_namespaced_pod(job.name, TRAINING).status.phase == "Failed":
            installation.replace_pod(job)
        return job.open_gpus()

    installation.eventually("the GPUs are there", gpus, PATIENCE_S)
    installation.wait_for_plans()
    record_worst(figures, "longest from a new node to the plan in force on it, s", time.monotonic() - replaced)
    figures["faults survived"] += 1


def repair_cluster(installation: Installation) -> bool:
    """Start every missing part of the cluster; return true, as a condition to wait for."""
    installation.cluster.up(len(installation.jobs), ipv6=installation.cluster.ipv6, say=lambda text: None)
    return True


def stays_in_force(installation: Installation, since: float, at_least_s: float) -> None:
    """Check that all jobs train for ``at_least_s``, and that no GPU was reset to default clocks since a time."""
    until = time.monotonic() + at_least_s
    while time.monotonic() < until:
        installation.trains_on()
        time.sleep(1)
    freed = {gpu.uuid: gpu.default_after(since) for job in installation.jobs for gpu in job.gpus}
    assert set(freed.values()) == {None}, "every lease was renewed in time"


def record_worst(figures: Figures, name: str, value: float) -> None:
    """Store the largest value of a figure."""
    figures[name] = max(figures.get(name, 0.0), value)
