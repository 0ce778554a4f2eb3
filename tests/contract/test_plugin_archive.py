"""``kubectl perseus`` as krew installs it: the manifest, the archive, and that what it needs is in it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
# By krew's documentation of plugin manifests and the rules that its validation applies.
KREW: dict[str, Any] = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "krew.googlecontainertools.github.com/v1alpha2"},
        "kind": {"const": "Plugin"},
        "metadata": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name"],
            "properties": {"name": {"pattern": r"^[\w-]+$"}},
        },
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["version", "shortDescription", "platforms"],
            "properties": {
                "version": {"pattern": r"^v(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?$"},
                "homepage": {"pattern": "^https://"},
                "shortDescription": {"type": "string", "minLength": 1, "maxLength": 50, "pattern": r"^[^\n]+$"},
                "description": {"type": "string"},
                "caveats": {"type": "string"},
                "platforms": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "additionalProperties": False,
                        "required": ["selector", "uri", "sha256", "bin"],
                        "properties": {
                            "uri": {"pattern": r"^https://.+\.tar\.gz$"},
                            "sha256": {"pattern": "^[0-9a-f]{64}$"},
                            "bin": {"pattern": r"^kubectl-[\w-]+$"},
                            "selector": {
                                "type": "object",
                                "additionalProperties": False,
                                "required": ["matchLabels"],
                                "properties": {
                                    "matchLabels": {
                                        "type": "object",
                                        "additionalProperties": False,
                                        "required": ["os", "arch"],
                                        "properties": {
                                            "os": {"enum": ["linux", "darwin", "windows"]},
                                            "arch": {"enum": ["amd64", "arm64"]},
                                        },
                                    }
                                },
                            },
                        },
                    },
                },
            },
        },
    },
}


def tool(name: str, path: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plugin = tool("release_plugin", "deploy/release/plugin.py")


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive without packages: those of this Python are used."""
    (tmp_path / "lib" / HERE).mkdir(parents=True)
    packed = tmp_path / "out" / "plugin.tar.gz"
    plugin.pack(packed, {HERE: tmp_path / "lib" / HERE})
    return packed


def test_the_manifest_is_one_that_krew_takes_and_names_what_was_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(plugin, "install", lambda folder, *_: folder.mkdir(parents=True))
    plugin.main(["--uri", "https://example.org/v/", "--output", str(tmp_path)])
    written = yaml.safe_load((tmp_path / "perseus.yaml").read_text())
    jsonschema.validate(written, KREW)
    platforms = written["spec"]["platforms"]
    assert {tuple(one["selector"]["matchLabels"].values()) for one in platforms} == set(plugin.PLATFORMS)
    for one in platforms:
        name = one["uri"].removeprefix("https://example.org/v/")
        assert one["sha256"] == hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        with tarfile.open(tmp_path / name) as tar:
            assert tar.getmember(one["bin"]).mode == 0o755
            assert "LICENSE" in tar.getnames()
    assert str(tmp_path / "perseus.yaml") in capsys.readouterr().out
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**written, "spec": {**written["spec"], "version": plugin.version()}}, KREW)


def test_the_same_input_is_packed_to_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tar.gz"
    digest = plugin.pack(again, {HERE: tmp_path / "lib" / HERE})
    assert archive.read_bytes() == again.read_bytes()
    assert digest == hashlib.sha256(again.read_bytes()).hexdigest()


def run(binary: Path, *arguments: str, path: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path, "HOME": str(binary.parent), "KUBECONFIG": str(binary.parent / "none")}
    command = [str(binary), *arguments]
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=60)


def test_what_was_packed_runs_through_a_link_and_says_what_it_lacks(archive: Path, tmp_path: Path) -> None:
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "store", filter="data")
    (tmp_path / "link").mkdir()
    linked = tmp_path / "link" / "kubectl-perseus"
    linked.symlink_to(os.path.relpath(tmp_path / "store" / "kubectl-perseus", linked.parent))
    interpreters, tools = tmp_path / "python", tmp_path / "tools"
    for folder, programs in ((interpreters, {f"python{HERE}": sys.executable}), (tools, {})):
        folder.mkdir()
        for name, program in programs.items():
            # A link to the interpreter of a virtual environment would not find its packages.
            (folder / name).write_text(f'#!/bin/sh\nexec "{program}" "$@"\n')
            (folder / name).chmod(0o755)
    shown = run(linked, "--help", path=f"{interpreters}:/usr/bin:/bin")
    assert shown.returncode == 0, shown.stderr
    assert "doctor" in shown.stdout
    assert run(linked, "list", path=f"{interpreters}:/usr/bin:/bin").returncode == 2, "no kubeconfig"
    (tools / "readlink").symlink_to("/usr/bin/readlink")
    shim = tools / f"python{HERE}"  # as version managers leave for a Python that is not installed
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    without = run(linked, "list", path=str(tools))
    assert (without.returncode, without.stdout) == (1, "")
    assert without.stderr == f"kubectl perseus: no Python found; install one of {HERE}\n"


LOADED = """
import json, pkgutil, sys
from importlib.metadata import packages_distributions
import perseus_operator.plugin, perseus_operator.solving.request
for module in pkgutil.iter_modules(perseus_operator.plugin.__path__, "perseus_operator.plugin."):
    __import__(module.name)
import perseus_solver.calibration, perseus_solver.model.problem, perseus_solver.model.result, perseus_solver.schedules
known = packages_distributions()
print(json.dumps(sorted({name for module in sys.modules for name in known.get(module.split(".")[0], ())})))
"""


def test_all_that_the_plugin_imports_is_packed() -> None:
    requirements = tool("image_requirements", "deploy/images/requirements.py")
    found = subprocess.run([sys.executable, "-c", LOADED], check=True, capture_output=True, text=True).stdout
    lock = (ROOT / "requirements-images.lock").read_text()
    packed = {requirements.normal(line) for line in requirements.pinned(lock, plugin.NEEDS) if line[0].isalpha()}
    optional = {"pysocks", "setuptools", "perseus-k8s"}  # urllib3 takes the first if it is there
    optional |= {"googleapis-common-protos"}  # shares the name google with protobuf, which alone is imported
    assert {requirements.normal(name) for name in json.loads(found)} - optional <= packed
