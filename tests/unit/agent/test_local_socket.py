"""The agent's socket: where descriptors or memory are short, and how it is labelled for SELinux."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.doubles.recording_node import wait_for

from perseus_agent.errors import SettingsError
from perseus_agent.servers.local_socket import ACCEPT_PAUSE_S, LocalServer
from perseus_proto.hello import Reason, Refusal, receive_answer


class ShortOfDescriptors:
    """A listening socket whose accept fails, though connections wait."""

    def __init__(self, listener: socket.socket, code: int) -> None:
        self._listener = listener
        self.error: OSError | None = OSError(code, os.strerror(code))
        self.attempts = 0

    def accept(self) -> Any:
        self.attempts += 1
        if self.error is not None:
            raise self.error
        return self._listener.accept()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._listener, name)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM])
def test_an_accept_that_fails_is_tried_again_after_a_pause(
    tmp_path: Path, code: int, caplog: pytest.LogCaptureFixture
) -> None:
    node = SimpleNamespace(is_leased=lambda _: False, count_refusal=lambda: None)
    server = LocalServer(str(tmp_path / "agent.sock"), cast(Any, node), tmp_path)
    listener = server._listener = cast(Any, ShortOfDescriptors(server._listener, code))
    server.start()
    began_s = time.monotonic()
    try:
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(str(tmp_path / "agent.sock"))
            wait_for(lambda: listener.attempts >= 4, "some attempts")
            assert listener.attempts <= 1 + (time.monotonic() - began_s) / ACCEPT_PAUSE_S
            assert len(caplog.records) <= listener.attempts
            listener.error = None
            answer = receive_answer(waiting, 60.0)
            assert isinstance(answer, Refusal), "served: of no pod, so refused by name"
            assert answer.reason is not Reason.DRAINING
    finally:
        server.stop()


LABEL = "system_u:object_r:container_file_t:s0"
NODE = cast(Any, SimpleNamespace(is_leased=lambda _: False, count_refusal=lambda: None))


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel lets only root label files")
def test_socket_and_directory_get_the_label_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "perseus" / "agent.sock"
    server = LocalServer(str(path), NODE, tmp_path, selinux_label=LABEL)
    server.start()
    labels = [os.getxattr(each, "security.selinux") for each in (path.parent, path)]
    server.stop()
    assert labels == [f"{LABEL}\0".encode()] * 2, "as chcon writes it"


def test_a_label_that_is_refused_is_an_error_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, *_: object) -> None:
        raise OSError(errno.EINVAL, "Invalid argument", str(path))

    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(SettingsError, match=rf"--socket-selinux-label: cannot label {tmp_path} as {LABEL}: .*Invalid"):
        LocalServer(str(tmp_path / "agent.sock"), NODE, tmp_path, selinux_label=LABEL)
