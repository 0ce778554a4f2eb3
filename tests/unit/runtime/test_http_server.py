"""Addresses to listen on, and a server on them that IPv4 and IPv6 reach."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from tests.waiting import eventually

from perseus_runtime import http_server
from perseus_runtime.addresses import parse_address
from perseus_runtime.http_server import MAX_CONNECTIONS, CachedPage, Certificate, HttpServer
from perseus_sim.cluster.pki import Authority


@pytest.mark.parametrize(
    ("address", "expected"),
    [("0.0.0.0:80", ("0.0.0.0", 80)), ("[::1]:0", ("::1", 0)), ("localhost:65535", ("localhost", 65535))],
)
def test_an_address_is_a_host_and_a_port(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


@pytest.mark.parametrize(
    "address", ["", "here", ":80", "here:", "here:http", "here:65536", "here:-1", "::1:80", "[h]:x"]
)
def test_what_is_no_address_is_refused_with_the_rule(address: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port, an IPv6 host in brackets, not '"):
        parse_address(address)


class _Hello(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(address: str) -> Iterator[HttpServer]:
    server = HttpServer(address, _Hello, "hello")
    try:
        yield server
    finally:
        server.close()


def answers(host: str, port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://{host}:{port}/", timeout=60) as answer:
            return bool(answer.status == 204)
    except OSError:
        return False


@pytest.mark.parametrize(
    ("address", "hosts"),
    [
        ("127.0.0.1:0", {"127.0.0.1"}),
        ("[::1]:0", {"[::1]"}),
        ("0.0.0.0:0", {"127.0.0.1", "[::1]"}),
        ("[::]:0", {"127.0.0.1", "[::1]"}),
    ],
)
def test_who_reaches_it(address: str, hosts: set[str], ipv6: None) -> None:
    with serving(address) as server:
        assert {host for host in ("127.0.0.1", "[::1]") if answers(host, server.port)} == hosts
        assert parse_address(server.address)[1] == server.port > 0
        with pytest.raises(OSError, match="in use"):
            HttpServer(f"{server.address.rpartition(':')[0]}:{server.port}", _Hello, "second")


def test_without_ipv6_everywhere_is_every_ipv4_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: False)
    with serving("[::]:0") as server:
        assert server.address == f"0.0.0.0:{server.port}"
        assert answers("127.0.0.1", server.port)


def silent_connections(server: HttpServer, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(count)]


def test_silent_connections_keep_nobody_else_out_and_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_S", 3600.0)
    before = threading.active_count()
    with serving("127.0.0.1:0") as server, contextlib.ExitStack() as opened:
        for connection in silent_connections(server, 3 * MAX_CONNECTIONS):
            opened.enter_context(connection)
        assert answers("127.0.0.1", server.port)
        # One that is ended has a thread until that has noticed.
        eventually(lambda: threading.active_count() - before <= MAX_CONNECTIONS + 1, "a thread each, and the server's")


def test_silent_connections_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTION_S", 0.5)
    with serving("127.0.0.1:0") as server:
        for connection in silent_connections(server, MAX_CONNECTIONS):
            with connection:
                assert connection.recv(1) == b"", "ended by the server"


def test_no_client_has_to_knock_twice_while_the_server_is_busy() -> None:
    """A client whose connection finds no room to wait tries again after a second, and then after three more."""
    with serving("127.0.0.1:0") as server, server._server._open_lock:  # it takes one and then waits for the lock
        waiting = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(MAX_CONNECTIONS)]
        for connection in waiting:
            connection.close()


def test_the_host_with_most_connections_loses_one_to_the_others() -> None:
    with serving("0.0.0.0:0") as server:
        greedy = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)]
        other = socket.create_connection(("127.0.0.1", server.port), source_address=("127.0.0.2", 0))
        other.sendall(b"GET / HTTP/1.0\r\n\r\n")
        other.settimeout(60)
        assert b" 204 " in other.recv(100)
        greedy[0].settimeout(60)
        assert greedy[0].recv(1) == b""
        for connection in (*greedy, other):
            connection.close()


def test_a_page_is_drawn_so_many_times_a_second_at_most() -> None:
    drawn: list[int] = []

    def draw() -> bytes:
        drawn.append(len(drawn))
        return str(len(drawn)).encode()

    page = CachedPage(draw, per_s=1e-6, burst=3)
    assert [page() for _ in range(100)] == [b"1", b"2", *[b"3"] * 98]


@pytest.fixture
def tls_files(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "tls.crt", tmp_path / "tls.key"


def renew(files: tuple[Path, Path], common_name: str) -> Authority:
    authority = Authority(f"authority of {common_name}")
    pair = authority.issue(common_name, hosts=("127.0.0.1",))
    for file, content in zip(files, (pair.certificate, pair.key), strict=True):
        file.write_bytes(content)
    return authority


def verified_by(authority: Authority, port: int) -> bool:
    context = ssl.create_default_context(cadata=authority.certificate.decode())
    try:
        with urllib.request.urlopen(f"https://127.0.0.1:{port}/", timeout=60, context=context) as answer:
            return bool(answer.status == 204)
    except OSError:
        return False


def test_a_renewed_certificate_is_shown_from_the_next_connection_on(tls_files: tuple[Path, Path]) -> None:
    first = renew(tls_files, "first")
    server = HttpServer("127.0.0.1:0", _Hello, "hello", Certificate(*map(str, tls_files)))
    try:
        assert verified_by(first, server.port)
        assert not answers("127.0.0.1", server.port), "without TLS there is no answer"
        key = tls_files[1].read_bytes()
        second = renew(tls_files, "second")
        fits = tls_files[1].read_bytes()
        tls_files[1].write_bytes(key)
        os.utime(tls_files[1], (1, 1))
        assert verified_by(first, server.port), "half renewed: the certificate so far"
        tls_files[1].write_bytes(fits)
        assert verified_by(second, server.port)
        assert not verified_by(first, server.port)
        tls_files[0].unlink()
        assert verified_by(second, server.port)
    finally:
        server.close()


def test_a_client_that_begins_no_handshake_delays_no_other(tls_files: tuple[Path, Path]) -> None:
    authority = renew(tls_files, "hello")
    server = HttpServer("127.0.0.1:0", _Hello, "hello", Certificate(*map(str, tls_files)))
    try:
        silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
        assert verified_by(authority, server.port)
        for connection in silent:
            connection.close()
    finally:
        server.close()


def test_a_server_does_not_start_with_a_certificate_that_it_cannot_show(tls_files: tuple[Path, Path]) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        HttpServer("127.0.0.1:0", _Hello, "hello", Certificate(*map(str, tls_files)))
