"""The local socket of a real agent process: who is served, who is refused, and why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import urllib.error
import urllib.request
from typing import Any

from tests.doubles.agent_calls import (
    acquire,
    describe,
    joined,
    push,
    select,
)
from tests.doubles.recording_node import RecordingNode, gpu_uuid, pod_uid, wait_for
from tests.doubles.recording_trainer import schedule_of
from tests.waiting import PATIENCE_S

from perseus_proto.hello import Hello, Reason, Refusal, Timing, Welcome, encode_hello, make_schedule, receive_answer
from perseus_proto.v1alpha1 import agent_pb2 as messages


class Peer:
    """A process of its own making: says hello by hand."""

    def __init__(self, node: RecordingNode, pod: messages.Pod | None, data: bytes) -> None:
        if pod is not None:
            node.kubelet.place([os.getpid()], pod.uid)
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(node.socket)
        with contextlib.suppress(BrokenPipeError):  # refused before it was heard; the answer is there
            self.socket.sendall(data)

    def answer(self) -> Welcome | Refusal:
        return receive_answer(self.socket, 60)


def hello(gpu: str = "", instructions: int = 4) -> bytes:
    return encode_hello(Hello(0, 0, 0, Timing.HOST, gpu, make_schedule(schedule_of(instructions))))


def reason_of(peer: Peer) -> Reason:
    answer = peer.answer()
    peer.socket.close()
    assert isinstance(answer, Refusal), answer
    return answer.reason


def test_only_a_pod_s_own_processes_drive_its_gpus(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])
    stranger = messages.Pod(uid="not-a-pod-at-all")
    assert reason_of(Peer(node, stranger, hello())) is Reason.NOT_A_POD
    assert reason_of(Peer(node, pod, hello(gpu_uuid(1)))) is Reason.GPU_NOT_OWNED
    first = Peer(node, pod, hello())
    assert isinstance(first.answer(), Welcome)
    wait_for(lambda: joined(stub) == {gpu_uuid(0)}, "the pod's process has joined")
    other = encode_hello(Hello(0, 1, 0, Timing.HOST, "", make_schedule(schedule_of(4))))
    assert reason_of(Peer(node, pod, other)) is Reason.GPU_TAKEN
    first.socket.close()
    wait_for(lambda: not joined(stub), "it has left")
    # A pod without a lease waits; nothing of it is driven.
    waiting = Peer(node, node.add_pod(1, [1]), hello())
    assert isinstance(waiting.answer(), Welcome)
    assert not joined(stub)
    waiting.socket.close()


def test_a_process_that_sends_garbage_is_refused_with_the_reason(node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    assert reason_of(Peer(node, pod, b"GET / HTTP/1.1\r\n\r\n")) is Reason.MALFORMED
    frame = bytearray(hello())
    frame[4] = 99
    assert reason_of(Peer(node, pod, bytes(frame))) is Reason.VERSION


def test_a_refused_process_is_counted(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])

    def counted() -> int:
        page = urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics").read().decode()
        return int(float(re.findall(r"^perseus_agent_refused_peers_total\S* (\S+)$", page, re.MULTILINE)[0]))

    nobody = messages.Pod(uid="not-a-pod-at-all")
    refusals = [
        (nobody, hello(), Reason.NOT_A_POD),
        (pod, b"GET / HTTP/1.1\r\n\r\n", Reason.MALFORMED),
        (pod, hello(gpu_uuid(1)), Reason.GPU_NOT_OWNED),
    ]
    before = counted()
    for number, (who, said, reason) in enumerate(refusals, start=1):
        assert reason_of(Peer(node, who, said)) is reason
        assert counted() == before + number


def test_a_connection_that_was_passed_on_is_refused(stub: Any, node: RecordingNode) -> None:
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])
    peer = Peer(node, pod, b"")
    child = os.fork()
    if child == 0:
        peer.socket.sendall(hello())
        os._exit(0)
    os.waitpid(child, 0)
    answer = peer.answer()
    assert isinstance(answer, Refusal)
    assert answer.reason is Reason.MALFORMED
    assert "must be the process that connected" in answer.message
    assert not joined(stub)
    peer.socket.close()


def test_a_kubelet_that_is_down_freezes_what_is_known_and_delays_what_is_not(stub: Any, node: RecordingNode) -> None:
    pods = [node.add_pod(number, [number]) for number in range(2)]
    lease = acquire(stub, pods)
    node.start_trainer(pods[0], instruction_s=0.003)
    wait_for(lambda: joined(stub) == {gpu_uuid(0)}, "the first has joined")
    push(stub, lease)
    select(stub, lease)
    wait_for(lambda: node.locked()[gpu_uuid(0)], "it is driven")
    node.kubelet.stop()
    try:
        new = node.add_pod(2, [2])
        acquire(stub, [*pods, new], epoch=lease.epoch)
        node.start_trainer(new, stage=0, dp=1)
        wait_for(lambda: len(describe(stub).ranks) == 2, "the third waits")
        time.sleep(0.3)
        assert len(describe(stub).ranks) == 2  # it was not sent away
        assert joined(stub) == {gpu_uuid(0)}  # neither dropped nor guessed
        assert node.locked()[gpu_uuid(0)]
    finally:
        node.kubelet.start()
    wait_for(lambda: joined(stub) == {gpu_uuid(0), gpu_uuid(2)}, "the third has joined")


def test_a_rank_gets_in_though_others_connect_without_a_pause(stub: Any, node: RecordingNode) -> None:
    """In two pods without a GPU, as fast as they can: they fill the queue of the socket at all times."""
    pod = node.add_pod(0, [0])
    acquire(stub, [pod])
    for number in (1, 2):
        node.start_crowd(node.add_pod(number, []))
    refused_before = refusals(node)
    wait_for(lambda: refusals(node) > refused_before + 100, "they are refused")
    node.start_trainer(pod)
    wait_for(lambda: joined(stub) == {gpu_uuid(0)}, "the rank has joined")


def refusals(node: RecordingNode) -> float:
    """Connections that the agent has refused."""
    with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics", timeout=PATIENCE_S) as answer:
        text = answer.read().decode()
    return float(re.search(r"^perseus_agent_refused_peers_total(?:{.*})? (\S+)$", text, re.MULTILINE)[1])


def test_every_line_of_the_log_is_json(node: RecordingNode) -> None:
    peer = Peer(node, node.add_pod(0, [0]), hello())
    assert isinstance(peer.answer(), Welcome)
    wait_for(lambda: "a process sent its hello" in node.log(), "the hello is logged")
    peer.socket.close()
    lines = [json.loads(line) for line in node.log().splitlines() if line.startswith("{")]
    assert lines
    assert all({"time", "level", "message"} <= line.keys() for line in lines)
    assert pod_uid(0) in {line.get("pod") for line in lines}
