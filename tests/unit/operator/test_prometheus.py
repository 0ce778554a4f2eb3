"""Asking a Prometheus: whatever it is, and whatever was typed, is one line, and no secret is in it."""

from __future__ import annotations

import base64
import http.server
import io
import json
import re
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from perseus_operator.errors import CannotAnswer, UnusableArgument
from perseus_operator.plugin import cli
from perseus_operator.report.prometheus import Access, Prometheus
from perseus_sim.cluster.pki import Authority, write_pairs

MATRIX = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}).encode()
NOTHING = Access()
SECRET = "s3cret-t0ken"


@dataclass
class Answers:
    """What a web server answers, and what it has been asked with."""

    url: str = ""
    body: bytes = MATRIX
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wants_token: bool = False
    tokens: list[str | None] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Answers]:
    """A web server on loopback."""
    answers = Answers()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            answers.tokens.append(self.headers["Authorization"])
            refused = answers.wants_token and self.headers["Authorization"] != f"Bearer {SECRET}"
            self.send_response(401 if refused else answers.status)
            for name, value in answers.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answers.body)

        def log_message(self, *_: Any) -> None:
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    answers.url = f"http://127.0.0.1:{web.server_port}"
    yield answers
    web.shutdown()
    thread.join()
    web.server_close()


def ask(url: str, access: Access = NOTHING, **environment: str) -> Any:
    return Prometheus(url, access, environment)("up", 0, 0, 60)


@pytest.mark.parametrize(
    "body",
    [
        b"<html>",
        b"[]",
        b"{}",
        b"[" * 100_000,
        json.dumps({"status": "error", "error": "x"}).encode(),
        json.dumps({"status": "success", "data": {"resultType": "vector", "result": []}}).encode(),
        json.dumps({"status": "success", "data": {"resultType": "matrix", "result": [{"metric": {}}]}}).encode(),
    ],
    ids=["page", "list", "empty", "deep", "error", "vector", "no-value"],
)
def test_what_is_no_prometheus_is_named(server: Answers, body: bytes) -> None:
    server.body = body
    with pytest.raises(CannotAnswer, match=f"--prometheus: {server.url} does not answer as a Prometheus: "):
        ask(server.url)


def test_nobody_there_is_an_error_of_one_line() -> None:
    with pytest.raises(CannotAnswer, match=r"does not answer as a Prometheus: .*refused"):
        ask("http://127.0.0.1:9")


def test_one_that_wants_a_token_gets_it(server: Answers, tmp_path: Path) -> None:
    """Source: robusta-dev/krr issue 170, fluxcd/flagger issue 1064: Thanos of OpenShift wants a bearer token."""
    server.wants_token = True
    with pytest.raises(CannotAnswer, match="answers 401: it wants a token; see --prometheus-token-file and PERSEUS_PR"):
        ask(server.url)
    file = tmp_path / "token"
    file.write_text(f"{SECRET}\n")
    assert ask(server.url, Access(token_file=file)) == []
    assert ask(f"{server.url}/", PERSEUS_PROMETHEUS_TOKEN=SECRET) == []
    with pytest.raises(CannotAnswer, match="answers 401: it does not accept the token"):
        ask(server.url, PERSEUS_PROMETHEUS_TOKEN="another")


def test_one_behind_basic_authentication_gets_a_user_and_its_password(server: Answers, tmp_path: Path) -> None:
    """Source: fluxcd/flagger issue 1064, robusta-dev/krr issue 170: a Prometheus behind basic authentication."""
    server.status, server.headers = 401, {"WWW-Authenticate": 'Basic realm="prometheus"'}
    with pytest.raises(CannotAnswer, match="answers 401: it wants a user and a password; see --prometheus-user and PE"):
        ask(server.url)
    server.status, server.headers = 200, {}
    file = tmp_path / "password"
    file.write_text("pä ss:wörd\n", encoding="utf-8")
    assert ask(server.url, Access(user="jo", token_file=file)) == []
    assert ask(server.url, Access(user="jo"), PERSEUS_PROMETHEUS_TOKEN="pä ss:wörd") == []
    sent = base64.b64encode("jo:pä ss:wörd".encode()).decode()
    assert server.tokens[1:] == [f"Basic {sent}"] * 2
    with pytest.raises(UnusableArgument, match="--prometheus: must be https://"):
        ask("http://prometheus.example", Access(user="jo"), PERSEUS_PROMETHEUS_TOKEN=SECRET)


@pytest.mark.parametrize(
    ("user", "password", "message"),
    [
        ("jo", "", "--prometheus-user: needs a password"),
        ("jo", f"{SECRET}\nHost: x", "--prometheus-user: needs a password, one line"),
        ("j:o", SECRET, "--prometheus-user: must be a name"),
        ("", SECRET, "--prometheus-user: must be a name"),
        ("j\no", SECRET, "--prometheus-user: must be a name"),
    ],
)
def test_what_is_no_user_or_password_is_refused_and_not_shown(user: str, password: str, message: str) -> None:
    with pytest.raises(UnusableArgument, match=message) as refusal:
        ask("https://prometheus.example", Access(user=user), PERSEUS_PROMETHEUS_TOKEN=password)
    assert SECRET not in str(refusal.value)


@pytest.mark.parametrize("token", [f"{SECRET}\r\nHost: x", f"{SECRET} two", f"{SECRET}\x7f", f"{SECRET}é"])
def test_what_is_no_token_is_refused_and_not_shown(token: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    for access, environment in ((Access(token_file=file), {}), (Access(), {"PERSEUS_PROMETHEUS_TOKEN": token})):
        with pytest.raises(UnusableArgument, match="must hold one token") as refusal:
            ask("https://prometheus.example", access, **environment)
        assert SECRET not in str(refusal.value)


def test_a_token_goes_to_its_address_alone(server: Answers) -> None:
    with pytest.raises(UnusableArgument, match="--prometheus: must be https:// where a token is sent, or on loopback"):
        ask("http://prometheus.example", PERSEUS_PROMETHEUS_TOKEN=SECRET)
    server.status, server.headers = 302, {"Location": f"{server.url}/elsewhere"}
    with pytest.raises(CannotAnswer, match="answers 302: it is elsewhere"):
        ask(server.url, PERSEUS_PROMETHEUS_TOKEN=SECRET)
    assert server.tokens == [f"Bearer {SECRET}"], "it was not taken along"


def test_one_that_wants_a_certificate_gets_it(tmp_path: Path) -> None:
    """Source: robusta-dev/krr issue 170: a Prometheus of a company's own authority, behind mutual TLS."""
    pki = tmp_path / "pki"
    write_pairs(pki, Authority("company"), ["localhost", "me"])
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(pki / "ca.crt"))
    tls.load_cert_chain(pki / "localhost.crt", pki / "localhost.key")
    tls.verify_mode = ssl.CERT_REQUIRED

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(MATRIX)

        def log_message(self, *_: Any) -> None:
            pass

    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.socket = tls.wrap_socket(web.socket, server_side=True)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    url = f"https://localhost:{web.server_port}"
    try:
        assert ask(url, Access(ca=pki / "ca.crt", cert=pki / "me.crt", key=pki / "me.key")) == []
        with pytest.raises(CannotAnswer, match="CERTIFICATE_VERIFY_FAILED"):
            ask(url)
        with pytest.raises(CannotAnswer, match=re.escape(f"{url} does not answer as a Prometheus: ")):
            ask(url, Access(ca=pki / "ca.crt"))
    finally:
        web.shutdown()
        thread.join()
        web.server_close()


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.write_text("<html>")
    (tmp_path / "empty").write_text("\n")
    for access, message in (
        (Access(token_file=tmp_path / "none"), "--prometheus-token-file: .*none cannot be read: No such file"),
        (Access(token_file=tmp_path), "--prometheus-token-file: .* cannot be read: Is a directory"),
        (Access(token_file=tmp_path / "empty"), "--prometheus-token-file: .*empty holds no token"),
        (Access(ca=tmp_path / "none"), "--prometheus-ca: .*none holds no certificates: No such file"),
        (Access(ca=page), "--prometheus-ca: .*page holds no certificates"),
        (Access(cert=page), "--prometheus-cert, --prometheus-key: one needs the other"),
        (Access(cert=page, key=page), "--prometheus-cert, --prometheus-key: must be PEM files"),
    ):
        with pytest.raises(UnusableArgument, match=message):
            ask("https://prometheus.example", access)


@pytest.mark.parametrize(
    "url",
    [
        "http://user:s3cret-t0ken@127.0.0.1",
        "https://prometheus.example/?token=s3cret-t0ken",
        "http://[::1:9090",
        "http://[1.2.3.4]:9090",
        "http://localhost:99999",
        "http://localhost:0",
        "http://prom example/",
        "http://",
        "localhost:9090",
        "ftp://prometheus.example",
    ],
)
def test_what_is_no_address_ends_with_code_2_and_is_not_shown(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Source: robusta-dev/krr issue 170; addresses as they are mistyped, and one with a password."""
    with pytest.raises(SystemExit) as end:
        cli.run(["report", "--prometheus", url], io.StringIO(), io.StringIO())
    assert end.value.code == 2
    message = capsys.readouterr().err
    assert "--prometheus: must be http:// or https:// and a host" in message
    assert len(message.splitlines()) == 1
    assert "s3cret" not in message
