"""``connect``: mistakes are logged, never raised, and without an agent's socket nothing at all is done."""

from __future__ import annotations

import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

import perseus_client
from perseus_client import entry
from perseus_client.session import LiveSession, Session
from perseus_core.keys import ENV_SOCKET
from perseus_proto.hello import Timing

SCHEDULE: list[tuple[str | int, int, int]] = [("forward", 0, 0), ("backward", 0, 0)]


def exercise(session: Session) -> None:
    """Everything that training code may call, in and out of order."""
    session.step_end()
    session.instruction_begin("forward", 0)
    with session.step(), session.instruction("forward", 0):
        session.instruction_begin("backward", 0, 0)
        session.instruction_end()
        session.instruction_end("nonsense", -1, 10**9)
    session.wait_connected(0)
    session.close()
    with session.step(), session.instruction("forward", 0):
        pass


def test_without_the_variable_nothing_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ENV_SOCKET, raising=False)
    before = set(threading.enumerate())
    session = perseus_client.connect(0, 0, schedule=SCHEDULE)
    assert type(session) is Session
    assert [thread for thread in set(threading.enumerate()) - before if thread.name == "perseus-client"] == []
    assert not session.connected
    exercise(session)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": []}, "schedule: must have 1 to 65536 instructions"),
        ({"schedule": [("sideways", 0, 0)]}, "kind: 'sideways' is not one of"),
        ({"schedule": [*SCHEDULE, *SCHEDULE]}, "occurs twice"),
        ({"schedule": [("forward", 0)]}, "schedule[0]: must be (kind, microbatch, chunk)"),
        ({"schedule": None}, "NoneType"),
        ({"stage": -1}, "stage: must be an integer between"),
        ({"dp": "zero"}, "dp: must be an integer"),
        ({"timing": "sundial"}, "timing: must be auto, cuda, events, synchronised or host, is 'sundial'"),
        ({"timing": "cuda", "clock_us": lambda: 0}, "timing: cuda cannot be combined"),
        ({"gpu_uuid": "GPU-\x00"}, "gpu_hint: must be at most"),
    ],
)
def test_a_mistake_is_logged_by_name_and_training_goes_on(
    arguments: dict[str, Any], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    given: dict[str, Any] = {"dp": 0, "stage": 0, "schedule": SCHEDULE, "socket_path": "/nowhere"} | arguments
    session = perseus_client.connect(**given)
    assert type(session) is Session
    assert message in caplog.text
    exercise(session)


def test_an_agent_that_is_not_there_costs_nothing_but_a_thread(tmp_path: Path) -> None:
    session = perseus_client.connect(0, 0, schedule=SCHEDULE, socket_path=str(tmp_path / "agent.sock"))
    assert isinstance(session, LiveSession)
    assert not session.connected
    exercise(session)


class FakeCuda:
    """As much of torch.cuda as the choice of timing looks at."""

    def __init__(self, initialised: bool) -> None:
        self.initialised = initialised

    def is_initialized(self) -> bool:
        return self.initialised

    def is_available(self) -> bool:
        return self.initialised

    def current_device(self) -> int:
        return 3

    def get_device_properties(self, index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(uuid=f"{index}0000000-0000-4000-8000-000000000000")


@pytest.mark.parametrize("initialised", [True, False])
def test_cuda_is_used_if_the_process_uses_it_already(monkeypatch: pytest.MonkeyPatch, initialised: bool) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=FakeCuda(initialised)))  # type: ignore[arg-type]
    assert entry._choose_timing("auto", None) is (Timing.GPU if initialised else Timing.HOST)
    assert entry._current_gpu() == ("GPU-30000000-0000-4000-8000-000000000000" if initialised else "")


def test_cuda_that_is_requested_and_missing_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=FakeCuda(False)))  # type: ignore[arg-type]
    session = perseus_client.connect(0, 0, schedule=SCHEDULE, socket_path="/nowhere", timing="cuda")
    assert type(session) is Session
    assert "torch sees no CUDA device" in caplog.text


def test_the_client_loads_nothing_beyond_the_standard_library() -> None:
    script = (
        "import sys; before = set(sys.modules); import perseus_client;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=90)
    assert result.stdout.split() == ["perseus_client", "perseus_core", "perseus_proto"]
