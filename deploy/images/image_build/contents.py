"""What is in the images of an OCI layout: the size of each layer, and for which machine each executable file is."""

from __future__ import annotations

import json
import posixpath
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from image_build import elf

FOLDER: Final = Path(__file__).resolve().parents[1]
"""Of the Dockerfiles."""
BOUNDS_MB: Final = {
    "agent": 60,
    "bench": 60,
    "operator": 260,
    "solver": 160,
    "gpu-sim": 60,
    "trainer": 100,
    "steps-example": 60,
}
"""Largest size of an image's layers above its base, uncompressed: what a node must fetch and store beside the base."""
NAME: Final = "io.containerd.image.name"
"""Annotation with the full name of an image, by which containerd imports it."""


@dataclass(frozen=True)
class Layer:
    """One layer above the base."""

    step: str
    size_mb: float


@dataclass(frozen=True)
class Image:
    """One image for one architecture."""

    reference: str
    """Its full name with its tag."""
    architecture: str
    above: tuple[Layer, ...]
    """Its layers above the base."""
    blobs: tuple[Path, ...]
    """Files of all its layers, the base's first."""

    @property
    def name(self) -> str:
        """By which build.py calls it."""
        return self.reference.rpartition("perseus-")[2].partition(":")[0]

    @property
    def size_mb(self) -> float:
        """Of the layers above the base."""
        return sum(layer.size_mb for layer in self.above)


def images_of(layout: Path) -> Iterator[Image]:
    """Yield the images of an OCI layout.

    Args:
        layout: the folder with ``index.json``, whose layers are not compressed.
    """

    def blob(entry: dict[str, Any]) -> Path:
        return layout / "blobs" / str(entry["digest"]).replace(":", "/")

    for entry in json.loads((layout / "index.json").read_text())["manifests"]:
        manifest = json.loads(blob(entry).read_text())
        config = json.loads(blob(manifest["config"]).read_text())
        reference = entry["annotations"][NAME]
        steps = [step.get("created_by", "") for step in config["history"] if not step.get("empty_layer")]
        count = instructions(Image(reference, "", (), ()).name)
        found = zip(steps[-count:], manifest["layers"][-count:], strict=True)
        above = tuple(Layer(_short(step), layer["size"] / 1e6) for step, layer in found)
        yield Image(reference, config["architecture"], above, tuple(map(blob, manifest["layers"])))


def instructions(name: str) -> int:
    """Return the number of instructions of a Dockerfile that make the layers above the base."""
    text = (FOLDER / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    [stage] = re.findall(r"^FROM .+ AS image\n((?:.|\n)*?)(?=^FROM |\Z)", text, re.MULTILINE)
    return len(re.findall(r"^(?:COPY|ADD|RUN) ", stage, re.MULTILINE))


def problems_of(image: Image) -> list[str]:
    """Return what is wrong with an image: one sentence for its size, and one for each kind of file that cannot run.

    Every ELF file must be for the image's own architecture, and the image must have each library that one needs.
    """
    problems = []
    bound = BOUNDS_MB[image.name]
    if image.size_mb > bound:
        problems.append(f"{image.name}: {image.size_mb:.1f} MB above the base, {bound} MB allowed")
    machine, files, needed = elf.MACHINES[image.architecture], set[str](), dict[str, str]()
    for blob in image.blobs:
        for path, content in _files(blob):
            files.add(posixpath.basename(path))
            try:
                found = elf.parse(content)
            except ValueError as error:
                problems.append(f"{image.name}: {path} is {error}")
                continue
            if found and found.machine != machine:
                problems.append(f"{image.name}: {path} is not for {image.architecture} (machine {found.machine})")
            elif found:
                needed.update(dict.fromkeys(found.needed, path))
    for library in sorted(set(needed) - files):
        problems.append(f"{image.name}: {needed[library]} needs {library}, which the image lacks")
    return problems


def names_above_the_base(image: Image) -> set[str]:
    """Return the paths of an image's files above the base, with the name of the architecture taken out of each.

    They are the same for all architectures, except for libraries that a wheel brings with a hash in their names.
    """
    paths = {path for blob in image.blobs[-len(image.above) :] for path, _ in _files(blob)}
    return {re.sub("x86_64|aarch64", "MACHINE", path) for path in paths if ".libs/" not in path}


def report(image: Image) -> str:
    """Return the size of an image and of every layer above its base, a line for each."""
    head = f"{image.reference}, {image.architecture}: {image.size_mb:.1f} MB above the base, "
    lines = [f"  {layer.size_mb:7.1f} MB  {layer.step}" for layer in image.above]
    return "\n".join([f"{head}{BOUNDS_MB[image.name]} MB allowed", *lines])


def _files(blob: Path) -> Iterator[tuple[str, bytes]]:
    """Yield path and content of the files of a layer; of a link, which has none, its path and nothing."""
    with tarfile.open(blob) as layer:
        for entry in layer:
            if entry.isreg():
                file = layer.extractfile(entry)
                assert file is not None
                yield entry.name, file.read()
            elif entry.issym() or entry.islnk():
                yield entry.name, b""


def _short(step: str) -> str:
    return re.sub(r".*#\(nop\) |^/bin/sh -c | # buildkit$|(COPY|ADD) \w+:\S+ in ", r"\1 ", step).strip()[:60]
