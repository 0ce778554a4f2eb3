"""Run somebody else's test file with the client attached to every pipeline schedule that it steps.

``python attach_everywhere.py RESULT.json FILE [ARGUMENT …]``. Each schedule attaches itself at its first ``step``, and
talks to an agent's end in a thread of this process, which counts iterations that were followed to the last
instruction; so do schedules in processes that the file starts. For PyTorch's own pipelining tests, and for
``pipelining_suite.py``. Where there is no GPU, tests that ask for several run over gloo on CPUs.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import socket
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.distributed.pipelining import schedules

import perseus_client.torch_pipelining as perseus
from perseus_proto import hello as wire
from perseus_proto.channel import ChannelReader

COUNTS = {"attached": 0, "complete": 0, "incomplete": 0}
_LOCK = threading.Lock()


def serve(path: str) -> None:
    """An agent's end: takes every rank and drains what it records."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(64)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=follow, args=(connection,), daemon=True).start()


def follow(connection: socket.socket) -> None:
    hello = wire.receive_hello(connection, 10)
    reader = ChannelReader.create(len(hello.schedule))
    wire.send_welcome(connection, reader.instructions, reader.memory_fd, reader.event_fd)
    with _LOCK:
        COUNTS["attached"] += 1
    gone = False
    while not gone:
        connection.settimeout(0.002)
        with contextlib.suppress(TimeoutError):
            gone = not connection.recv(1)
        while (record := reader.drain_iteration()) is not None:
            with _LOCK:
                COUNTS["complete" if record.complete else "incomplete"] += 1


def attach_all(cls: Any) -> None:
    """Make every schedule of a class attach itself when it first steps."""
    original = cls.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if perseus._attached(self) is None and self._has_backward:
            attachment = perseus.attach(self)
            if attachment.active:
                attachment.session.wait_connected(10)
                return self.step(*args, **kwargs)
        return original(self, *args, **kwargs)

    cls.step = step


def prepare() -> None:
    """Make this process ready for somebody's test file."""
    for cls in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
        attach_all(cls)
    if not torch.accelerator.is_available():
        with contextlib.suppress(ModuleNotFoundError):  # these need expecttest, which only PyTorch's own tests ask for
            run_on_cpu()


def run_on_cpu() -> None:
    """Let PyTorch's tests for several GPUs believe that a CPU is two of them; gloo takes NCCL's place."""
    from torch.testing._internal import common_distributed, common_utils

    def at_once(*_: Any, **__: Any) -> Any:
        return lambda test: test

    common_utils.TEST_MULTIACCELERATOR = True
    common_distributed.requires_accelerator_dist_backend = at_once
    common_distributed.skip_if_lt_x_gpu = at_once
    torch.accelerator.current_accelerator = lambda check_available=False: None
    torch.cpu.device_count = lambda: 2


def main() -> None:
    folder = tempfile.mkdtemp(prefix="perseus-")
    os.environ["PERSEUS_SOCKET"] = f"{folder}/agent.sock"
    threading.Thread(target=serve, args=(os.environ["PERSEUS_SOCKET"],), daemon=True).start()
    # Python imports this module when a process begins, so those that the file starts are ready as well.
    Path(folder, "sitecustomize.py").write_text("import attach_everywhere\n\nattach_everywhere.prepare()\n")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [folder, str(Path(__file__).resolve().parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    prepare()
    result = Path(sys.argv[1])

    def report() -> None:
        time.sleep(0.1)  # the last iterations are drained
        result.write_text(json.dumps(COUNTS))

    atexit.register(report)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
