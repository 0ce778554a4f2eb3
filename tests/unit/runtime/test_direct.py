"""Loopback and what is inside the cluster are reached without the environment's proxy."""

from __future__ import annotations

import os
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import grpc.aio
import pytest

from perseus_agent.pods import pod_resources
from perseus_operator.clients import peers, solvers
from perseus_operator.clients.agents import channels
from perseus_operator.plugin import cli as plugin
from perseus_runtime.direct import bypass_proxies
from perseus_solver.cli import main as cli

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment with a proxy that does not answer, and no exceptions."""
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, NOWHERE)
        monkeypatch.setenv(name.upper(), NOWHERE)
    for name in ("no_proxy", "NO_PROXY", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)


@pytest.fixture
def server() -> Iterator[str]:
    """A gRPC server without methods."""
    served = grpc.server(ThreadPoolExecutor(1))
    port = served.add_insecure_port("127.0.0.1:0")
    served.start()
    yield f"127.0.0.1:{port}"
    served.stop(None)


@pytest.mark.usefixtures("behind_a_proxy")
@pytest.mark.parametrize("options", [o._OPTIONS for o in (channels, solvers, peers, pod_resources)])
async def test_calls_inside_the_cluster_ignore_the_proxy(server: str, options: tuple[tuple[str, int], ...]) -> None:
    """Source: grpc/grpc issues 11751, 15942 and 22681; determined-ai/determined issue 2620."""
    async with grpc.aio.insecure_channel(server, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await channel.unary_unary("/no/method")(b"", timeout=30)
    assert refusal.value.code() is grpc.StatusCode.UNIMPLEMENTED, "it was reached"


@pytest.mark.usefixtures("behind_a_proxy")
def test_loopback_ignores_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: grpc/grpc issues 29718 and 11896: localhost through a company's proxy."""
    monkeypatch.setenv("NO_PROXY", "intern.example, 10.0.0.0/8")
    for host in ("localhost:1", "127.0.0.1", "[::1]:9090"):
        assert not urllib.request.proxy_bypass_environment(host)  # type: ignore[attr-defined]
    bypass_proxies()
    for host in ("localhost:1", "127.0.0.1", "[::1]:9090", "::1", "intern.example"):
        assert urllib.request.proxy_bypass_environment(host)  # type: ignore[attr-defined]
    assert not urllib.request.proxy_bypass_environment("pypi.example")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "localhost,127.0.0.1,::1,[::1]"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1,[::1]"),
        ({"NO_PROXY": "localhost"}, "localhost,127.0.0.1,::1,[::1]"),
        (
            {"KUBERNETES_SERVICE_HOST": "10.96.0.1"},
            "localhost,127.0.0.1,::1,[::1],10.96.0.1,[10.96.0.1],.svc,.cluster.local",
        ),
    ],
)
def test_exceptions_are_added_to_those_there_are(before: dict[str, str], after: str) -> None:
    environment = dict(before)
    bypass_proxies(environment)
    assert environment["no_proxy"] == environment["NO_PROXY"] == after
    bypass_proxies(environment)
    assert environment["no_proxy"] == after


@pytest.mark.usefixtures("behind_a_proxy")
def test_programs_that_use_loopback_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Source: grpc/grpc issues 29718 and 11896: ``perseus demo``, and ``kubectl perseus`` through a port-forward."""

    def demo(_: object) -> None:
        raise OSError("not here")

    monkeypatch.setattr("perseus_sim.demo.scenario.Demo", demo)
    assert cli.main(["demo"]) == 2
    assert "127.0.0.1" in os.environ["no_proxy"]
    monkeypatch.delenv("no_proxy")
    monkeypatch.setattr(sys, "argv", ["kubectl-perseus", "--help"])
    with pytest.raises(SystemExit):
        plugin.main()
    assert "127.0.0.1" in os.environ["no_proxy"]


def test_who_excepts_everything_is_left_alone() -> None:
    environment = {"no_proxy": "*"}
    bypass_proxies(environment)
    assert environment == {"no_proxy": "*"}
