"""An API server that is slow: ``kubectl perseus`` ends in time, with one sentence."""

from __future__ import annotations

import io
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from perseus_operator.plugin import cli, kube_client

_HEAD: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 40\r\n\r\n"
ADVICE: Final = "it or the network is overloaded; try again, and see whether kubectl get --raw /readyz is as slow"


class SlowServer:
    """An API server that has empty lists of some resources, and no end of an answer to anything else."""

    def __init__(self, knows: set[str]) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.knows, self.ended = knows, threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            while asked := connection.recv(65_536):
                path = asked.split(b" ")[1].decode().partition("?")[0]
                connection.sendall(_HEAD)
                if path.rpartition("/")[2] in self.knows:
                    connection.sendall(json.dumps({"items": [], "metadata": {}}).encode().ljust(40))
                    continue
                for _ in range(39):  # no read of the socket waits long
                    if self.ended.wait(0.1):
                        return
                    connection.sendall(b" ")
                self.ended.wait()

    def close(self) -> None:
        self.ended.set()
        self.listener.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Start a server that knows some resources; the kubeconfig of it."""
    servers = []

    def start(*knows: str) -> Path:
        servers.append(SlowServer(set(knows)))
        port = servers[-1].listener.getsockname()[1]
        file = tmp_path / "kubeconfig"
        config = {
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
            "current-context": "x",
        }
        file.write_text(json.dumps(config))
        return file

    yield start
    for server in servers:
        server.close()


def said(kubeconfig: Path, *arguments: str) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    code = cli.run([*arguments, "--kubeconfig", str(kubeconfig)], out, err)
    assert out.getvalue() == ""
    [line] = err.getvalue().splitlines()
    return code, line.removeprefix("kubectl perseus: the API server ")


@pytest.mark.parametrize(
    ("arguments", "knows", "asked"),
    [
        (["list", "-A"], [], "perseusjobs in any namespace"),
        (["list", "-A"], ["perseusjobs"], "servingpools in any namespace"),
        (["list", "-A"], ["perseusjobs", "servingpools"], "namespaces"),
        (["list"], ["perseusjobs", "servingpools"], "namespaces/team"),
        (["doctor", "gpt3"], [], "perseusjobs/gpt3 in namespace team"),
        (["serving"], [], "servingpools in namespace team"),
        (["straggler", "clear", "gpt3"], [], "perseusjobs/gpt3 in namespace team"),
    ],
)
def test_a_request_that_takes_too_long_ends_the_command_and_is_named(
    arguments: list[str], knows: list[str], asked: str, serve: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "REQUEST_S", 0.5)
    answer = f"did not answer within 0.5 s when asked for {asked}: {ADVICE}"
    assert said(serve(*knows), *arguments) == (cli.UNREACHABLE, answer)


def test_a_command_waits_no_longer_for_many_answers(
    serve: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_client, "COMMAND_S", 0.5)
    limit = "the 0.5 s that a command may wait in all"
    answer = f"did not answer within {limit} when asked for perseusjobs in any namespace: {ADVICE}"
    assert said(serve(), "list", "-A") == (cli.UNREACHABLE, answer)
