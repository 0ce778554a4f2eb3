"""The images of a release in the local registry, each an index of two platforms, and the bills of what is in them."""

from __future__ import annotations

import io
import json
import os
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from release_build.commands import ReleaseFailed, run
from release_build.registry import Registry

NAMES: Final = ("operator", "solver", "agent", "bench", "gpu-sim", "trainer")
"""As build.py of the images calls them."""
PLATFORMS: Final = ("linux/amd64", "linux/arm64")
PREFIX: Final = "perseus"
"""Of the repositories in the local registry."""
BASES: Final = ("BASE", "COMPILER")
"""What the images are built on, by argument of the Dockerfiles."""
_BILL: Final = "opt/app/sbom.cdx.json"


@dataclass(frozen=True)
class Published:
    """One image in the registry."""

    name: str
    repository: str
    """Such as ``perseus/perseus-agent``."""
    digest: str
    """Of the index."""
    platforms: Mapping[str, str]
    """Digest of each image by its platform."""


def build(source: Path, registry: Registry, tag: str, epoch_s: int) -> None:
    """Build all images for all platforms, check what is in them, and push them to the local registry.

    It prints the size of every layer.

    Args:
        source: folder of the project's files.
        registry: to push to.
        tag: of every image.
        epoch_s: seconds since 1970 that become the time of every file.

    Raises:
        ReleaseFailed: one could not be built, or must not be used.
    """
    settings = {
        "PLATFORMS": ",".join(PLATFORMS),
        "REGISTRY": f"{registry.host}/{PREFIX}",
        "PUSH": "yes",
        "TAG": tag,
        "SOURCE_DATE_EPOCH": str(epoch_s),
    }
    run(sys.executable, source / "deploy" / "images" / "build.py", *NAMES, cwd=source, more=settings, shown=True)


def published(registry: Registry, tag: str) -> Iterator[Published]:
    """Yield what a tag names in the local registry.

    Raises:
        ReleaseFailed: an image is missing, or is not for all platforms.
    """
    for name in NAMES:
        repository = f"{PREFIX}/perseus-{name}"
        digest, index = registry.manifest(repository, tag)
        platforms = {_platform(entry): entry["digest"] for entry in index.get("manifests", ())}
        if sorted(platforms) != sorted(PLATFORMS):
            raise ReleaseFailed(f"{repository}:{tag} is for {', '.join(platforms) or 'no platform'} only")
        yield Published(name, repository, digest, platforms)


def bill(registry: Registry, image: Published, platform: str) -> bytes:
    """Return the CycloneDX bill of an image, which its build left in it.

    Raises:
        ReleaseFailed: there is none.
    """
    _, manifest = registry.manifest(image.repository, image.platforms[platform])
    for layer in reversed(manifest["layers"]):
        with tarfile.open(fileobj=io.BytesIO(registry.blob(image.repository, layer["digest"]))) as tar:
            try:
                file = tar.extractfile(_BILL)
            except KeyError:
                continue
            assert file is not None
            return file.read()
    raise ReleaseFailed(f"{image.repository} for {platform} has no /{_BILL}")


def values(images: Mapping[str, Published]) -> str:
    """Return values of the chart that pin its images by digest, whichever registry they are copied to."""
    sections = {name: name for name in ("operator", "solver", "agent")}
    sections |= {"simulatedGpus": "gpu-sim", "acceptance": "bench"}
    pinned = {section: {"image": {"digest": images[name].digest}} for section, name in sections.items()}
    return json.dumps(pinned, indent=2) + "\n"  # JSON is YAML


def bases() -> dict[str, str]:
    """Return the images that the release was built on, by argument; those that are not given are local ones."""
    return {argument: os.environ.get(argument, "") for argument in BASES}


def are_pinned(bases: Mapping[str, str]) -> bool:
    """Return whether a digest names each of the bases, so that others can look up what is in them."""
    return all("@sha256:" in bases[argument] for argument in BASES)


def _platform(entry: Mapping[str, Any]) -> str:
    return f"{entry['platform']['os']}/{entry['platform']['architecture']}"
