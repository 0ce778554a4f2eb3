"""Images without a registry: make an image of one static binary, and load archives into a node.

The cluster has no way out to a registry, so the pause container and CoreDNS are wrapped here. Archives have the format
of `docker save`, `podman save` and `buildah push docker-archive:`.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import tarfile
from pathlib import Path

from local_cluster.machine import Machine

SOCKET = "/run/containerd/containerd.sock"
_IMAGES = ("--address", SOCKET, "--namespace", "k8s.io", "images")


def wrap(binary: Path, name: str, archive: Path) -> None:
    """Write an image that holds one static binary and starts it."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as tar:
        entry = tarfile.TarInfo(binary.name)
        entry.size, entry.mode = binary.stat().st_size, 0o755
        with binary.open("rb") as content:
            tar.addfile(entry, content)
    digest = hashlib.sha256(layer.getbuffer()).hexdigest()
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{binary.name}"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": ["layer.tar"]}]
    with tarfile.open(archive, "w") as tar:
        for path, data in {
            "config.json": json.dumps(config).encode(),
            "layer.tar": layer.getvalue(),
            "manifest.json": json.dumps(manifest).encode(),
        }.items():
            part = tarfile.TarInfo(path)
            part.size = len(data)
            tar.addfile(part, io.BytesIO(data))


def load(node: Machine, ctr: Path, archive: Path) -> list[str]:
    """Load an archive into a node, by containerd's own client, and return the names of its images."""
    with archive.open("rb") as content:
        output = node.run(str(ctr), *_IMAGES, "import", "--local", "-", stdin=content).stdout
    return [line.split()[1] for line in output.splitlines() if line.startswith("unpacking ")]


def names(node: Machine, ctr: Path) -> set[str]:
    """Return the names of the images that the node has."""
    return set(node.run(str(ctr), *_IMAGES, "list", "--quiet").stdout.split())


def _architecture() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
