"""The chart of a release: an archive, and the same archive as an OCI artifact in the local registry."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from release_build.commands import run
from release_build.registry import Registry

FOLDER: Final = "perseus/charts"
"""Where charts are in the local registry; the chart's name follows."""


@dataclass(frozen=True)
class Helm:
    """The helm program, without its user's configuration."""

    binary: Path
    home: Path

    def __call__(self, *arguments: str | Path) -> str:
        """Run it and return its output.

        Raises:
            ReleaseFailed: it failed.
        """
        homes = {f"HELM_{kind}_HOME": str(self.home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        return run(self.binary, *arguments, more=homes)


def package(helm: Helm, chart: Path, output: Path, version: str, epoch_s: int) -> Path:
    """Pack the chart. Its files keep their times, so that the same commit gives the same archive.

    Args:
        helm: to pack it with.
        chart: folder of the chart.
        output: folder to write into.
        version: of the chart and of the images that it installs.
        epoch_s: seconds since 1970 that become the time of the archive, which helm notes when it pushes it.

    Raises:
        ReleaseFailed: helm refused.
    """
    output.mkdir(parents=True, exist_ok=True)
    helm("package", chart, "--destination", output, "--version", version, "--app-version", version)
    archive = output / f"perseus-{version}.tgz"
    os.utime(archive, (epoch_s, epoch_s))
    return archive


def push(helm: Helm, registry: Registry, archive: Path, version: str) -> tuple[str, str]:
    """Push a packed chart to the local registry.

    Returns:
        Its repository and its digest.

    Raises:
        ReleaseFailed: helm or the registry refused.
    """
    helm("push", archive, f"oci://{registry.host}/{FOLDER}", "--plain-http")
    repository = f"{FOLDER}/perseus"
    return repository, registry.manifest(repository, version)[0]
