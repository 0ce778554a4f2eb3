"""An OCI registry on this machine: CNCF Distribution on loopback, whose storage is a folder of the release."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from release_build.commands import ReleaseFailed

INDEX: Final = "application/vnd.oci.image.index.v1+json"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
_START_TIMEOUT_S: Final = 20.0
_DIRECT: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows loopback


@dataclass(frozen=True)
class Registry:
    """A registry that answers."""

    host: str
    """``127.0.0.1:PORT``."""

    def manifest(self, repository: str, reference: str) -> tuple[str, dict[str, Any]]:
        """Return digest and content of a manifest or an index.

        Args:
            repository: such as ``perseus/perseus-agent``.
            reference: a tag, or a digest.

        Raises:
            ReleaseFailed: the registry does not have it, or has something else under this digest.
        """
        content = self._get(f"{repository}/manifests/{reference}", f"{INDEX}, {MANIFEST}")
        if reference.startswith("sha256:"):
            _require_digest(repository, reference, content)
        return _digest(content), json.loads(content)

    def blob(self, repository: str, digest: str) -> bytes:
        """Return a blob, a layer or a configuration.

        Raises:
            ReleaseFailed: the registry does not have it, or has something else under this digest.
        """
        content = self._get(f"{repository}/blobs/{digest}", "*/*")
        _require_digest(repository, digest, content)
        return content

    def check(self, repository: str, reference: str) -> str:
        """Read all that a manifest or an index consists of, and return its digest.

        Raises:
            ReleaseFailed: a part is missing, or is not what its digest names.
        """
        digest, content = self.manifest(repository, reference)
        for entry in content.get("manifests", ()):
            self.check(repository, entry["digest"])
        for entry in (*content.get("layers", ()), *([content["config"]] if "config" in content else [])):
            self.blob(repository, entry["digest"])
        return digest

    def _get(self, path: str, accept: str) -> bytes:
        request = urllib.request.Request(f"http://{self.host}/v2/{path}", headers={"Accept": accept})
        try:
            with _DIRECT.open(request, timeout=60) as answer:
                return bytes(answer.read())
        except urllib.error.URLError as error:
            raise ReleaseFailed(f"the local registry has no {path}: {error}") from error


@contextlib.contextmanager
def serving(binary: Path, storage: Path, port: int = 0) -> Iterator[Registry]:
    """Serve a registry on loopback until the context ends.

    Args:
        binary: of CNCF Distribution.
        storage: folder of its contents; made if it is not there.
        port: to listen on; 0: any that is free.

    Raises:
        ReleaseFailed: it does not start.
    """
    storage.mkdir(parents=True, exist_ok=True)
    host = f"127.0.0.1:{port or _free_port()}"
    settings = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(storage.resolve())}},
        "http": {"addr": host, "headers": {"X-Content-Type-Options": ["nosniff"]}},
    }
    with tempfile.TemporaryDirectory() as folder:
        file, log = Path(folder) / "registry.json", Path(folder) / "log"
        file.write_text(json.dumps(settings))  # JSON is YAML
        with log.open("w") as output:
            environment = {**os.environ, "OTEL_TRACES_EXPORTER": "none"}
            process = subprocess.Popen(
                [binary, "serve", file], stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        try:
            _wait(process, host, log)
            yield Registry(host)
        finally:
            process.terminate()
            process.wait()


def _wait(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            _DIRECT.open(f"http://{host}/v2/", timeout=1).close()
            return
        time.sleep(0.05)
    raise ReleaseFailed(f"the local registry does not answer on {host}:\n{log.read_text()[-2000:]}")


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _require_digest(repository: str, digest: str, content: bytes) -> None:
    if _digest(content) != digest:
        raise ReleaseFailed(f"the local registry has something else than {repository}@{digest}")


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])
