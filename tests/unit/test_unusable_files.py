"""Files that a user names, of every program that reads any: whatever is in them, the answer is one line and code 2.

Source: ansible-collections/community.kubernetes issue 119 and kubernetes-client/python issue 2219, where a kubeconfig
was a traceback; robusta-dev/krr issue 170, where a message held a secret.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from perseus_operator import __main__ as operator
from perseus_operator.plugin import cli as plugin
from perseus_reader import __main__ as reader
from perseus_sim.profiles import profile_csv
from perseus_solver.cli.main import main as perseus

SECRET = "s3cret-t0ken"
KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: x
contexts: [{name: x, context: {cluster: c, user: u}}]
clusters: [{name: c, cluster: {server: "http://127.0.0.1:9"}}]
users: [{name: u, user: {}}]
"""
HARDWARE = '{"model": "H100", "switch_latency_s": {"p50": 0.02, "p99": 0.1}, "call_s": 0.002, "marks": "gpu"}'
SHAPE = ["--schedule", "1F1B", "--stages", "2", "--microbatches", "2"]
PLAN = ["plan", *SHAPE, "--blocking-power", "80"]
SERVE = ["serve", "rehearse", "--gpu", "h100", "--model", "llama-3.1-8b", "--gpus-per-replica", "1", "--replicas", "1"]
REPORT = ["report", "--prometheus", "https://prometheus.invalid", "--kubeconfig", "KUBECONFIG"]
Run = Callable[[list[str], pytest.MonkeyPatch], int]


def _perseus(arguments: list[str], _: pytest.MonkeyPatch) -> int:
    return perseus(arguments)


def _plugin(arguments: list[str], _: pytest.MonkeyPatch) -> int:
    return plugin.run(arguments, io.StringIO(), sys.stderr)


def _operator(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    patch.setenv("KUBECONFIG", arguments[-1])
    patch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    patch.setattr(sys, "argv", ["perseus-operator", "--insecure"])
    with pytest.raises(SystemExit) as end:
        operator.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def _reader(arguments: list[str], patch: pytest.MonkeyPatch) -> int:
    patch.setattr(sys, "argv", ["perseus-reader", *arguments])
    patch.setattr(reader.signal, "signal", lambda *_: None)
    return reader.main()


READERS: dict[str, tuple[Run, list[str]]] = {
    "perseus plan --profile": (_perseus, [*PLAN, "--profile"]),
    "perseus plan --order": (_perseus, ["plan", "--profile", "PROFILE", "--blocking-power", "80", "--order"]),
    "perseus plan --calibration": (_perseus, [*PLAN, "--profile", "PROFILE", "--calibration"]),
    "perseus plan --hardware": (_perseus, [*PLAN, "--profile", "PROFILE", "--hardware"]),
    "perseus rehearse --plan": (
        _perseus,
        ["rehearse", *SHAPE, "--blocking-power", "80", "--profile", "PROFILE", "--hardware", "HARDWARE", "--plan"],
    ),
    "perseus calibrate --instructions": (
        _perseus,
        ["calibrate", "--schedule", "1F1B", "--output", "OUT", "--iterations", "PROFILE", "--instructions"],
    ),
    "perseus demo --profile": (_perseus, ["demo", "--output", "OUT", "--profile"]),
    "perseus serve rehearse --trace": (_perseus, [*SERVE, "--trace"]),
    "kubectl perseus --kubeconfig": (_plugin, ["list", "--kubeconfig"]),
    "kubectl perseus --prometheus-ca": (_plugin, [*REPORT, "--prometheus-ca"]),
    "kubectl perseus report --from": (_plugin, [*REPORT, "--from"]),
    "perseus report --from": (_perseus, ["report", "--from"]),
    "perseus-operator KUBECONFIG": (_operator, []),
}


def _write(folder: Path) -> dict[str, Path]:
    """One file of each kind."""
    kinds = {
        kind: folder / kind for kind in ("missing", "folder", "empty", "binary", "no-yaml", "list", "text", "deep")
    }
    kinds["folder"].mkdir()
    kinds["empty"].touch()
    kinds["binary"].write_bytes(b"\xff\xfe\x81" * 50)
    kinds["no-yaml"].write_text(f"a: [1,\n b: {{{SECRET}")
    kinds["list"].write_text("[1, 2]")
    kinds["text"].write_text("hello")
    kinds["deep"].write_text("[" * 20_000)
    kinds["endless"] = Path("/dev/zero")
    kinds["below a file"] = kinds["text"] / "x"
    return kinds


@pytest.mark.parametrize("name", READERS)
def test_a_file_that_cannot_be_used_is_one_line_and_code_2(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, arguments = READERS[name]
    (tmp_path / "profile.csv").write_text(profile_csv(2))
    (tmp_path / "kubeconfig").write_text(KUBECONFIG)
    (tmp_path / "hardware.json").write_text(HARDWARE)
    places = {"PROFILE": "profile.csv", "KUBECONFIG": "kubeconfig", "HARDWARE": "hardware.json", "OUT": "out"}
    given = [str(tmp_path / places[word]) if word in places else word for word in arguments]
    for kind, path in _write(tmp_path).items():
        if kind == "endless" and "kube" in name.lower():
            continue  # whoever may name that file may as well stop the program
        code = run([*given, str(path)], monkeypatch)
        said = capsys.readouterr().err
        assert code == 2, (kind, said)
        assert len(said.splitlines()) == 1, (kind, said)
        assert "Traceback" not in said
        assert SECRET not in said, kind


def test_a_socket_that_cannot_be_had_is_one_line_and_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path, tmp_path / "missing" / "socket", tmp_path / ("x" * 200)):
        assert _reader(["--socket", str(path)], monkeypatch) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "--socket: cannot wait on" in line
