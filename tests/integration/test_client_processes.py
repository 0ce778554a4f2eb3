"""The client's descriptors and processes: nothing leaks, a forked child is a stranger, a rank's end is seen."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

from tests.descriptors import channel_memory
from tests.integration.client_agent import SCHEDULE, Agent, iterate
from tests.waiting import PATIENCE_S, eventually

import perseus_client
from perseus_client.session import Session
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader
from perseus_proto.hello import Hello

ROOT = Path(__file__).resolve().parents[2]


def welcome_and_hang_up(connection: socket.socket, hello: Hello) -> None:
    """What an agent does that goes at once; also where the rank has gone before."""
    with contextlib.closing(ChannelReader.create(len(hello.schedule))) as reader, connection:
        wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)


def come_and_go(path: str) -> None:
    """The test below, in a process whose descriptors are nobody else's."""
    before = os.listdir("/proc/self/fd")
    agent = Agent(Path(path), welcome_and_hang_up)
    session = perseus_client.connect(1, 2, schedule=SCHEDULE, socket_path=path)
    for _ in range(6):
        seen = len(agent.hellos)
        eventually(lambda seen=seen: len(agent.hellos) > seen)  # type: ignore[misc]
        iterate(session)
    agent.die()
    eventually(lambda: not session.connected)
    iterate(session)  # lets go of the last memory
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= len(before), str(os.listdir("/proc/self/fd")))
    session.close()


def test_agents_that_come_and_go_leak_no_descriptors_and_success_is_said_once(agent_socket: Path) -> None:
    script = "import sys; from tests.integration.test_client_processes import come_and_go; come_and_go(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(agent_socket)],
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_S,
        stderr=subprocess.PIPE,
    )
    # Logging is not set up there: what is no warning would be dropped.
    said = done.stderr.decode().splitlines()
    assert said.count("perseus_client: connected to the agent as dp 1, stage 2, tp 0") == 1, said


def test_a_rank_that_goes_before_the_welcome_leaves_nothing_behind(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    """The order that a race brings seldom: hello, the rank goes, welcome."""
    heard, go = threading.Event(), threading.Event()
    failures: list[type[BaseException]] = []

    def late(connection: socket.socket, hello: Hello) -> None:
        heard.set()
        go.wait(PATIENCE_S)
        memory = channel_memory()
        try:
            welcome_and_hang_up(connection, hello)
        except OSError as error:
            failures.append(type(error))
        assert channel_memory() == memory
        assert connection.fileno() == -1
        done.set()

    done = threading.Event()
    agents(late)
    session = connect()
    assert heard.wait(PATIENCE_S)
    session.close()
    eventually(lambda: not any(thread.name == "perseus-client" for thread in threading.enumerate()))
    go.set()
    assert done.wait(PATIENCE_S)
    assert failures == [BrokenPipeError]


def test_a_forked_child_is_a_stranger_and_does_not_keep_the_connection_open(
    agents: Callable[..., Agent], connect: Callable[..., Session]
) -> None:
    """A data loader's worker outlives its parent's session: the agent must see the end at once."""
    agent = agents()
    session = connect()
    assert session.wait_connected(PATIENCE_S)
    session.step_begin()
    where = agent.readers[0].position()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: this process has threads; so has training
        child = os.fork()
    if child == 0:
        os.close(write_end)
        code = 1
        with contextlib.suppress(BaseException):
            session.instruction_begin("forward", 0)
            session.step_end()
            iterate(session)
            code = 0 if not session.connected else 2
            os.read(read_end, 1)  # until the parent lets go
        os._exit(code)
    os.close(read_end)
    try:
        assert agent.readers[0].position() == where
        assert session.connected
        session.close()
        agent.connections[0].settimeout(PATIENCE_S)
        assert agent.connections[0].recv(1) == b""
    finally:
        os.close(write_end)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


PARENT_OF_A_WORKER = """
import os, sys, time, perseus_client
session = perseus_client.connect(0, 0, schedule=[("forward", 0, 0)], socket_path=sys.argv[1])
assert session.wait_connected(180)
child = os.fork()
if child == 0:
    time.sleep(600)
print(child, flush=True)
os._exit(1)  # killed, as it were: nothing is closed in order
"""


def test_a_rank_that_dies_is_gone_though_its_child_lives(agents: Callable[..., Agent], agent_socket: Path) -> None:
    agent = agents()
    script = [sys.executable, "-c", PARENT_OF_A_WORKER, str(agent_socket)]
    with subprocess.Popen(script, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
    try:
        agent.connections[0].settimeout(PATIENCE_S)
        assert agent.connections[0].recv(1) == b""
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_agent_never_preempts_the_thread_that_wakes_it() -> None:
    """The scheduler's policy, in a process of its own since it cannot be taken back without privilege."""
    script = (
        "import os, threading; from perseus_agent.process import use_batch_scheduling; use_batch_scheduling(); "
        "policies = [];"
        "thread = threading.Thread(target=lambda: policies.append(os.sched_getscheduler(0))); thread.start();"
        "thread.join(); assert policies == [os.SCHED_BATCH] == [os.sched_getscheduler(0)], policies"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)
