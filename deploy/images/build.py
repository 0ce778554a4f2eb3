"""Build the project's images with docker, podman or buildah, whichever is usable on this machine.

usage: build.py [--archive FILE] [agent] [bench] [operator] [solver] [gpu-sim] [trainer] [steps-example]

Without names all but steps-example.

Environment:
  PLATFORMS=...     linux/amd64, linux/arm64 or both with a comma; default: this machine's. No code of another platform
                    is run. steps-example is built for this machine's alone
  REGISTRY=...      prefix of the names, without a slash at its end
  TAG=...           default: the chart's appVersion; latest is refused
  BASE=...          base image; default: the Dockerfiles', with buildah a local image
  COMPILER=...      the same of the stages that compile and strip
  TORCH=...         the same of steps-example: Debian, with PyTorch or to install it
  BASE_DATE=...     day on which the digests of BASE, COMPILER and TORCH were looked up; becomes a label
  PIP_OPTIONS=...   options of pip in the build, such as --no-index --find-links=/wheels
  WHEELS=...        a folder that the build sees as /wheels
  PUSH=yes          push the images, as one index of all platforms; their BASE, COMPILER and TORCH must then be pinned:
                    name:version@sha256:..., with BASE_DATE. Only a registry on this machine takes others, for a trial
  SOURCE_DATE_EPOCH=...  seconds since 1970 that become the time of the images and of all their files: the same sources
                    on the same base then give the same digests

buildah needs neither a container engine nor a registry: its base is a Debian that mmdebstrap makes, and it installs
wheels that pip fetched before; both are stored in ~/.cache/perseus-k8s/images. --archive writes all images of one
platform into one OCI archive, for ``ctr images import``, ``kind load image-archive`` and ``minikube image load``. With
it, or with several platforms, build.py prints the size of every layer above the base. It then fails if an image exceeds
its bound, has a file that its platform cannot run, lacks a library, or has other files than that of another platform.
Standard library only.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import os
import re
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from image_build import contents
from image_build.bases import BASES, arguments_of, local_base, wheelhouse
from image_build.builder import CACHE, HERE, ROOT, Builder, BuildFailed, alone, on_this_machine
from image_build.elf import MACHINES

STORED: Final = "localhost/perseus"
"""Prefix of lists of images in the store of podman or buildah."""
ON_REQUEST: Final = ("steps-example",)
"""Images that are built only where they are named, and for this machine: with PyTorch a base has 840 MB."""


def check_pinned(arguments: Iterable[str]) -> None:
    """Check that what is pushed, and others will run, is built from images that a digest names: a tag may move.

    Args:
        arguments: what is built on, keys of ``BASES``.

    Raises:
        BuildFailed: one of them is not, or it is not known how old it is.
    """
    if not os.environ.get("PUSH") or on_this_machine(os.environ.get("REGISTRY", "")):
        return
    for argument in arguments:
        given = os.environ.get(argument, "")
        if not re.fullmatch(r"[^@\s]+:[^@:/\s]+@sha256:[0-9a-f]{64}", given):
            raise BuildFailed(f"PUSH: {argument} must be name:version@sha256:<64 hexadecimal digits>, not {given!r}")
    date = os.environ.get("BASE_DATE", "")
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date):
        raise BuildFailed(f"PUSH: BASE_DATE must be a day, YYYY-MM-DD, not {date!r}")


def labels(base: str) -> list[str]:
    """Return the options that note in the image what it was built from, and how old that is."""
    name, _, digest = base.partition("@")
    found = {"name": name, "digest": digest, "date": os.environ.get("BASE_DATE", "")}
    return [f"--label=org.opencontainers.image.base.{key}={value}" for key, value in found.items() if value]


def architectures() -> list[str]:
    """Return the architectures that PLATFORMS names, amd64 first.

    Raises:
        BuildFailed: it names another.
    """
    given = {platform.strip() for platform in os.environ.get("PLATFORMS", f"linux/{HERE}").split(",")}
    known = {f"linux/{architecture}": architecture for architecture in MACHINES}
    if unknown := given - set(known):
        raise BuildFailed(f"PLATFORMS: unknown platform {min(unknown)!r}: known are {', '.join(known)}")
    return [architecture for platform, architecture in known.items() if platform in given]


def version_of_chart() -> str:
    """Return the version of the images that the chart installs."""
    chart = (ROOT / "charts" / "perseus" / "Chart.yaml").read_text()
    version = re.search(r'^appVersion: *"?([^"\n]*)"?$', chart, re.MULTILINE)
    assert version is not None
    return version[1]


def check(builder: Builder, built: Mapping[str, Mapping[str, str]], archive: Path | None) -> None:
    """Print the size of every layer of the images, and check what is in them.

    Args:
        builder: what built them.
        built: name and tag of each image by that in the builder's store, by architecture.
        archive: to write them into, if they are of one architecture.

    Raises:
        BuildFailed: one is too large, or cannot run on its platform. Then there is no archive.
    """
    if archive:
        archive.unlink(missing_ok=True)
        archive.parent.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    names: dict[str, dict[str, set[str]]] = {}
    for architecture, images in built.items():
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            builder.lay_out(images, Path(folder))
            for image in contents.images_of(Path(folder)):
                print(contents.report(image), flush=True)
                problems += contents.problems_of(image)
                if image.architecture != architecture:
                    problems.append(f"{image.name}: it is for {image.architecture}, not {architecture}")
                names.setdefault(image.name, {})[architecture] = contents.names_above_the_base(image)
            if archive and not problems:
                partial = archive.with_name(f"{archive.name}.partial")
                with tarfile.open(partial, "w") as tar:
                    tar.add(folder, "")
                partial.replace(archive)
                print(f"{archive}: {archive.stat().st_size / 1e6:.0f} MB")
    for name, files in names.items():
        first, *others = files.items()
        for architecture, found in others:
            if different := first[1] ^ found:
                problems.append(f"{name}: {min(different)} is not in both of {first[0]} and {architecture}")
    if problems:
        raise BuildFailed("\n  ".join(["the images must not be used:", *problems]))


def main() -> None:
    names = list(contents.BOUNDS_MB)
    parser = argparse.ArgumentParser(description="Build the project's images.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--archive", type=Path, help="write all images into one OCI archive and check their contents")
    given = parser.parse_args()
    setting = os.environ.get
    if unknown := set(given.names) - set(names):
        raise BuildFailed(f"unknown image {min(unknown)!r}: known are {', '.join(names)}")
    tag = setting("TAG") or version_of_chart()
    if tag == "latest":
        raise BuildFailed("TAG=latest is refused, as by the chart: it does not say which version runs")
    machines = architectures()
    if given.archive and len(machines) > 1:
        raise BuildFailed("--archive: an archive is for the nodes of one platform: name one in PLATFORMS")

    chosen = [name for name in names if (name in given.names if given.names else name not in ON_REQUEST)]
    if machines != [HERE] and set(chosen) & set(ON_REQUEST):
        raise BuildFailed(f"{', '.join(ON_REQUEST)} is built for linux/{HERE} alone: its build runs what it installs")
    on = [argument for argument in BASES if any(argument in arguments_of(name) for name in chosen)]
    check_pinned(on)
    builder = Builder.find()
    pip_options, wheels = setting("PIP_OPTIONS", ""), setting("WHEELS")
    bases = {argument: setting(argument, "") for argument in on if setting(argument)}
    fetch = builder.name == "buildah" and not pip_options and not wheels
    if builder.name == "buildah":
        bases = {argument: bases.get(argument) or local_base(builder, argument, machines) for argument in on}
    if wheels and builder.name == "docker":
        raise BuildFailed("WHEELS: docker mounts no folders into builds; use podman or buildah")

    prefix = f"{setting('REGISTRY')}/" if setting("REGISTRY") else ""
    built: dict[str, dict[str, str]] = {}
    options: dict[str, list[str | Path]] = {}
    for name in chosen:
        image = f"{prefix}perseus-{name}:{tag}"
        # In buildah's store, which nothing else uses, names do not depend on the registry: a short one may find any.
        as_named = len(machines) == 1 and builder.name != "buildah"
        own = image if builder.name == "docker" else f"{STORED}/perseus-{name}:{tag}"
        values = {"PIP_OPTIONS": "--no-index --find-links=/wheels" if fetch else pip_options, **bases}
        options[image] = [
            "--file",
            contents.FOLDER / f"{name}.Dockerfile",
            *labels(bases.get(arguments_of(name)[0], "")),
        ]
        options[image] += [f"--build-arg={key}={value}" for key, value in values.items()]
        built[image] = {machine: image if as_named else f"{own}-{machine}" for machine in machines}
        for machine, part in built[image].items():
            folder = wheelhouse(on, machine) if fetch else wheels
            mounted = ["--volume", f"{Path(folder).resolve()}:/wheels:ro"] if folder else []
            started = time.monotonic()
            print(f"building {image} for {machine} with {builder.name}", end="", flush=True)
            builder.build(part, machine, [*options[image], *mounted])
            print(f": {time.monotonic() - started:.0f} s", flush=True)
    if given.archive or len(machines) > 1:
        by_machine = {machine: {parts[machine]: image for image, parts in built.items()} for machine in machines}
        check(builder, by_machine, given.archive)
    if setting("PUSH"):
        for image, parts in built.items():
            builder.push(image, f"{STORED}/{image.rpartition('/')[2]}", parts, options[image])
    builder.forget_layers()


if __name__ == "__main__":
    try:
        with alone():
            main()
    except BuildFailed as error:
        sys.exit(f"build.py: {error}")
