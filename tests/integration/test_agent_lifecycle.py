"""Whoever dies, at whatever step, no GPU stays locked: real processes, kill -9, one walk over all of it.

The walk: a job is leased, its ranks join, a plan is pushed, selected, runs. At each of these steps the agent, the
trainers, the operator (which then renews no more), or agent and trainers together are gone. Afterwards every GPU is
at its default clocks within the lease's time, or once the agent has been started again, and GPUs that were never ours
were never written.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.doubles.recording_node import RecordingNode, gpu_uuid, plan_set_of, wait_for
from tests.waiting import PATIENCE_S

from perseus_agent.lifecycle import SILENT_S, STUCK
from perseus_proto.v1alpha1 import agent_pb2 as messages

STEPS = ("acquire", "join", "push", "select", "run")
CLOCKS = [[1200, 900, 1200, 900], [1005, 1005, 705, 705]]
TTL_MS = 700
BYSTANDER, FOREIGN = 2, 3
"""GPUs of the node that are not the job's: one of a pod that did not opt in, one that somebody else has locked."""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path, gpus=4) as node:
        (tmp_path / "gpu" / f"{gpu_uuid(FOREIGN)}.lock").write_text("705")
        yield node


class Job:
    """A job of two stages on the node, to be brought step by step to where it runs."""

    def __init__(self, node: RecordingNode, uid: str = "job") -> None:
        self.node = node
        self.uid = uid
        self.pods = [node.add_pod(number, [number]) for number in range(2)]
        self.plan_set = plan_set_of([[clocks] for clocks in CLOCKS])
        self.trainers: list[subprocess.Popen[bytes]] = []

    def advance(self, step: str, ttl_ms: int = 60_000) -> None:
        """As far as ``step``; the lease lasts ``ttl_ms`` from then on."""
        with self.node.stub() as stub:
            for reached in STEPS[: STEPS.index(step) + 1]:
                getattr(self, reached)(stub)
            stub.RenewLease(messages.RenewLeaseRequest(job_uid=self.uid, epoch=1, ttl_ms=ttl_ms))

    def end(self) -> None:
        """Its processes are gone."""
        for trainer in self.trainers:
            trainer.kill()
            trainer.wait()
        with self.node.stub() as stub:
            stub.ReleaseLease(messages.ReleaseLeaseRequest(job_uid=self.uid, epoch=1))

    def acquire(self, stub: Any) -> None:
        request = messages.AcquireLeaseRequest(job_uid=self.uid, job_name="a/b", epoch=1, ttl_ms=60_000, pods=self.pods)
        stub.AcquireLease(request)

    def join(self, stub: Any) -> None:
        self.trainers = self.trainers or [
            self.node.start_trainer(pod, stage=stage, instruction_s=0.002) for stage, pod in enumerate(self.pods)
        ]
        wait_for(lambda: self.ranks(stub) == 2, "both ranks have joined")

    def push(self, stub: Any) -> None:
        stub.PushPlanSet(messages.PushPlanSetRequest(job_uid=self.uid, epoch=1, plan_set=self.plan_set))

    def select(self, stub: Any) -> None:
        selections = [messages.Selection(data_parallel_rank=0, point=0)]
        plan_id = self.plan_set.plan_id
        stub.SelectPlan(messages.SelectPlanRequest(job_uid=self.uid, epoch=1, plan_id=plan_id, selections=selections))

    def run(self, stub: Any) -> None:
        wait_for(self.running, "both GPUs are locked")

    def running(self) -> bool:
        return all(self.node.locked()[gpu_uuid(gpu)] for gpu in range(2))

    def ranks(self, stub: Any) -> int:
        return sum(bool(rank.gpu_uuid) for rank in stub.DescribeNode(messages.DescribeNodeRequest()).ranks)


def keeper_watches(node: RecordingNode) -> bool:
    """What the agent's metrics say."""
    with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics", timeout=PATIENCE_S) as page:
        [value] = re.findall(r"^perseus_agent_keeper_watches\{.*\} (.*)$", page.read().decode(), re.MULTILINE)
    return bool(float(value))


def assert_all_given_back(node: RecordingNode) -> None:
    ours = [gpu_uuid(0), gpu_uuid(1)]
    wait_for(lambda: not any(node.locked()[uuid] for uuid in ours), "both GPUs are at their default clocks")
    wait_for(lambda: f'"{ours[0]}"' not in (node.folder / "journal.json").read_text(), "nothing is owed")
    assert node.locked()[gpu_uuid(FOREIGN)] == 705
    assert {call.gpu for call in node.calls()} <= set(ours)


@pytest.mark.parametrize("victim", ["agent", "agent and keeper", "trainers", "operator", "agent and trainers"])
def test_nothing_stays_locked_when_any_process_dies_at_any_step(node: RecordingNode, victim: str) -> None:
    node.start_agent()
    node.start_trainer(node.add_pod(BYSTANDER, [BYSTANDER]), instruction_s=0.002)
    for step in STEPS:
        job = Job(node, f"job-{step}")
        job.advance(step, TTL_MS if victim == "operator" else 60_000)
        if "trainers" in victim:
            for trainer in job.trainers:
                trainer.kill()
        if "agent" in victim:
            if victim == "agent and keeper":
                node.kill_agent_and_keeper()
                assert job.running() or step != "run"  # nobody was left to give anything back
                node.start_agent()
            else:
                node.kill_agent()
                assert_all_given_back(node)  # by the keeper, since no agent runs
                node.start_agent()
        assert_all_given_back(node)
        job.end()
        assert_all_given_back(node)


def test_sigterm_gives_everything_back_before_the_agent_leaves(node: RecordingNode) -> None:
    agent = node.start_agent()
    Job(node).advance("run")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0, node.log()
    assert_all_given_back(node)
    assert not Path(node.socket).exists()
    assert "Traceback" not in node.log()


def test_a_burst_of_signals_stops_the_agent_like_one(tmp_path: Path) -> None:
    # A killed parent sends one signal for each of its threads. In a process of its own: the moment in which a second
    # signal, handled by the thread that sets the event, would wait for itself.
    script = """
import os, signal, sys, threading
from perseus_agent.process import stop_on_signals
class Slow(threading.Condition):
    def notify_all(self):
        for _ in range(50):
            os.kill(os.getpid(), signal.SIGTERM)
        super().notify_all()
stop = threading.Event()
stop._cond = Slow(threading.Lock())
stop_on_signals(stop)
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(0 if stop.wait(150) else 3)
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=PATIENCE_S, cwd=tmp_path, check=False).returncode == 0


def test_a_drain_that_cannot_finish_ends_in_time_and_the_next_agent_gives_back_what_is_owed(
    node: RecordingNode,
) -> None:
    agent = node.start_agent("--drain-timeout-s=4")
    Job(node).advance("run")
    fault = node.folder / "gpu" / f"{gpu_uuid(0)}.fault"
    fault.write_text("hang 600")
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 1, node.log()
    assert node.locked()[gpu_uuid(1)] is None
    fault.unlink()
    node.start_agent()
    assert_all_given_back(node)


def test_a_trainer_that_outlives_the_agent_is_followed_by_the_next_one(node: RecordingNode) -> None:
    node.start_agent()
    job = Job(node)
    job.advance("run")
    node.kill_agent()
    node.start_agent()
    assert_all_given_back(node)
    job.advance("run")  # with the same processes
    assert all(trainer.poll() is None for trainer in job.trainers)


KILLS = 12


def test_each_of_many_kills_in_a_row_gives_back_what_was_locked(node: RecordingNode) -> None:
    job = Job(node)
    for kill in range(KILLS):
        node.start_agent()
        job.uid = f"job-{kill}"
        job.advance("run")
        node.kill_agent()
        assert_all_given_back(node)


def test_an_agent_that_is_silent_is_ended_and_its_gpus_are_given_back(node: RecordingNode) -> None:
    agent = node.start_agent()
    Job(node).advance("run")
    os.kill(node.agent_pid, signal.SIGSTOP)  # as a process that gets no processor, or hangs
    assert agent.wait(PATIENCE_S) == -signal.SIGKILL
    assert_all_given_back(node)


def test_a_silent_agent_that_owes_nothing_is_left_alone(node: RecordingNode) -> None:
    agent = node.start_agent()
    wait_for(lambda: keeper_watches(node), "its keeper watches")
    os.kill(node.agent_pid, signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        agent.wait(2 * SILENT_S)
    os.kill(node.agent_pid, signal.SIGCONT)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0


def test_a_keeper_that_was_stopped_and_goes_on_leaves_its_agent_alone(node: RecordingNode) -> None:
    agent = node.start_agent()
    job = Job(node)
    job.advance("run")
    assert node.keeper
    for _ in range(3):
        node.keeper.send_signal(signal.SIGSTOP)
        wait_for(lambda: not keeper_watches(node), "the agent notices it")
        node.keeper.send_signal(signal.SIGCONT)
        wait_for(lambda: keeper_watches(node), "it watches again")
    assert agent.poll() is None
    assert job.running()
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(PATIENCE_S) == 0


def test_an_agent_whose_keeper_was_killed_goes_on_and_the_next_keeper_protects_it(node: RecordingNode) -> None:
    node.start_agent()
    job = Job(node)
    job.advance("run")
    for _ in range(2):
        calls = len(node.calls())
        node.kill_keeper()
        wait_for(lambda: not keeper_watches(node), "the agent notices it")
        assert_goes_on(job)
        assert job.running()
        assert None not in {call.mhz for call in node.calls()[calls:]}, "no GPU was given back"
        node.start_keeper()
        wait_for(lambda: keeper_watches(node), "the next keeper watches")
    node.kill_agent()
    assert_all_given_back(node)


def test_without_a_keeper_an_agent_measures_and_locks_nothing(node: RecordingNode) -> None:
    node.start_agent(kept=False)
    job = Job(node)
    job.advance("select")
    assert_goes_on(job)
    assert node.calls() == []
    node.start_keeper()
    wait_for(job.running, "the plan is followed with a keeper")


def assert_goes_on(job: Job) -> None:
    """Its ranks train, and the agent follows them."""
    with job.node.stub() as stub:

        def least() -> int:
            return min(rank.iteration for rank in stub.DescribeNode(messages.DescribeNodeRequest()).ranks)

        begun = least()
        wait_for(lambda: least() > begun + 5, "training goes on")


def test_a_keeper_that_is_to_stop_ends_after_its_agent(node: RecordingNode) -> None:
    agent = node.start_agent()
    Job(node).advance("run")
    assert node.keeper
    node.keeper.send_signal(signal.SIGTERM)
    node.kill_agent()
    assert node.keeper.wait(PATIENCE_S) == 0
    assert_all_given_back(node)
    assert agent.poll() is not None


def test_a_successor_waits_until_the_keeper_has_given_back(node: RecordingNode) -> None:
    node.start_agent()
    job = Job(node)
    job.advance("run")
    fault = node.folder / "gpu" / f"{gpu_uuid(0)}.fault"
    fault.write_text("DeviceBusy")
    node.kill_agent()
    node.start_agent(wait=False)
    wait_for(lambda: "or its keeper, holds" in node.log(), "it waits")
    assert job.node.locked()[gpu_uuid(0)]
    fault.unlink()
    assert_all_given_back(node)


def test_a_full_disk_keeps_no_gpu_locked_and_no_agent_from_starting(node: RecordingNode) -> None:
    node.start_agent()
    job = Job(node)
    job.advance("run")
    block = node.folder / "journal.json.new"
    block.mkdir()  # every write of the journal fails from now on
    node.kill_agent_and_keeper()
    node.start_agent()
    wait_for(node_is_free(node), "the GPUs are given back although nothing can be written")
    block.rmdir()
    job.uid = "after"
    job.advance("run")  # and locked again once there is room
    node.kill_agent()
    assert_all_given_back(node)


def node_is_free(node: RecordingNode) -> Callable[[], bool]:
    return lambda: not any(node.locked()[gpu_uuid(gpu)] for gpu in range(2))


def test_a_damaged_journal_gives_back_every_gpu_that_may_be_driven(node: RecordingNode) -> None:
    node.start_agent()
    Job(node).advance("run")
    node.kill_agent_and_keeper()
    journal = node.folder / "journal.json"
    journal.write_bytes(journal.read_bytes()[:-9])
    node.start_agent()
    wait_for(node.all_default, "every GPU is at its default clocks")
    assert "resetting all that may be driven" in node.log()


def test_only_one_agent_runs_on_a_node(node: RecordingNode) -> None:
    node.start_agent()
    second = node.start_agent(wait=False)
    wait_for(lambda: "another agent, or its keeper, holds" in node.log(), "the second one waits")
    second.send_signal(signal.SIGTERM)
    assert second.wait(PATIENCE_S) == 0


def test_a_driver_replaced_under_the_agent_ends_it_with_a_code_of_its_own(node: RecordingNode) -> None:
    agent = node.start_agent()
    (node.folder / "gpu" / f"{gpu_uuid(0)}.fault").write_text("DriverMismatch")
    assert agent.wait(PATIENCE_S) == 3, node.log()
    assert "driver replaced" in node.log()


def test_an_agent_whose_own_thread_computes_without_an_end_gives_the_gpu_back_and_says_whose_fault_it_is(
    node: RecordingNode,
) -> None:
    agent = node.start_agent()
    Job(node).advance("run")
    (node.folder / "gpu" / f"{gpu_uuid(0)}.fault").write_text(f"compute {agent.pid}")
    said: list[str] = []
    while agent.poll() is None:
        with contextlib.suppress(OSError, http.client.HTTPException):  # it has ended, perhaps while it was answering
            try:
                urllib.request.urlopen(f"http://{node.addresses['metrics']}/healthz", timeout=60).close()
            except urllib.error.HTTPError as error:
                said.append(error.read().decode())
        time.sleep(0.005)
    assert agent.wait(60) == STUCK, node.log()
    assert_all_given_back(node)
    assert f"{gpu_uuid(0)}: its thread has computed" in node.log()
    assert "a driver call lasts" not in node.log()
    assert all(gpu_uuid(0) in text for text in said), "it ends so soon that it may not be asked meanwhile"
