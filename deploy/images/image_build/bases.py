"""What replaces registry and package index where there is neither: local base images, and wheels that were fetched.

mmdebstrap makes the bases from Debian's packages. Those of this machine's architecture are installed. Those of another
one are only extracted, because what their packages run at installation cannot run here.
"""

# ruff: noqa: T201  # part of a command-line program

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from image_build.builder import CACHE, HERE, ROOT, Builder, BuildFailed, run
from image_build.contents import FOLDER
from requirements import wheel_options


@dataclass(frozen=True)
class Debian:
    """A local image that replaces one that the Dockerfiles name."""

    suite: str
    python: str
    """Version of its Python, for which wheels are fetched."""
    packages: tuple[str, ...]
    cross: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further packages of a base that only runs in builds, by the architecture for which it compiles. An image for that
    architecture is not made."""


BASES: Final = {
    "BASE": Debian("bookworm", "3.11", ("python3", "python3-venv", "libstdc++6")),
    "COMPILER": Debian(
        "bookworm",
        "3.11",
        ("gcc", "libc6-dev"),
        {
            "amd64": ("gcc-x86-64-linux-gnu", "libc6-dev-amd64-cross"),
            "arm64": ("gcc-aarch64-linux-gnu", "libc6-dev-arm64-cross"),
        },
    ),
    # Debian 12 has PyTorch 1.13; Debian 13 has 2.6.
    "TORCH": Debian("trixie", "3.13", ("python3", "python3-venv", "python3-torch")),
}
"""By argument of the Dockerfiles."""
LOCKS: Final = {"BASE": "requirements-images.lock", "TORCH": "requirements-example.lock"}
"""What is installed with the Python of a base."""
_SMALL: Final = tuple(f"path-exclude=/usr/share/{kind}/*" for kind in ("doc", "man", "locale", "info"))
# With /usr merged from the start the image needs no perl, a quarter of it, to merge it later.
_MERGED: Final = "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"


def arguments_of(name: str) -> list[str]:
    """Return those of ``BASES`` that a Dockerfile builds on."""
    given = re.findall(r"^ARG (\w+)=", (FOLDER / f"{name}.Dockerfile").read_text(), re.MULTILINE)
    return [argument for argument in BASES if argument in given]


def local_base(builder: Builder, argument: str, architectures: Sequence[str]) -> str:
    """Return the name of a local list of base images, and make those that the store does not have.

    Args:
        builder: buildah.
        argument: the Dockerfiles' argument that it replaces, a key of ``BASES``.
        architectures: those of the images that will be built on it.

    Raises:
        BuildFailed: mmdebstrap is missing or failed.
    """
    debian = BASES[argument]
    foreign = sorted(set(architectures) - {HERE})
    installed = (*debian.packages, *(package for each in foreign for package in debian.cross.get(each, ())))
    parts = [_image(builder, argument, HERE, installed)]
    if not debian.cross:
        parts += [_image(builder, argument, each, debian.packages) for each in foreign]
    name = f"localhost/perseus-{argument.lower()}s:{_key(*parts)}"
    if not _is_stored(builder, "manifest", "exists", name):
        run(*builder.command, "manifest", "create", name, *parts, quiet=True)
    return name


def _image(builder: Builder, argument: str, architecture: str, packages: tuple[str, ...]) -> str:
    debian = BASES[argument]
    made = f"{architecture} extracted" if architecture != HERE else architecture
    name = f"localhost/perseus-{argument.lower()}-{architecture}:{_key(debian.suite, made, *packages, *_SMALL)}"
    if _is_stored(builder, "inspect", name):
        return name
    if shutil.which("mmdebstrap") is None:
        raise BuildFailed(f"no base image: set {argument}=, or install mmdebstrap to make one without a registry")
    print(f"making {name}: Debian {debian.suite} with {' and '.join(packages)}", flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        small = [f"--dpkgopt={option}" for option in _SMALL]
        wanted = f"--include={','.join(('usr-is-merged', *packages))}"
        target = [debian.suite, f"{folder}/base.tar"]
        if architecture == HERE:
            run("mmdebstrap", "--quiet", "--variant=essential", _MERGED, wanted, *small, *target, quiet=True)
        else:
            foreign = ["--variant=extract", f"--architectures={architecture}", "--include=?essential"]
            run("mmdebstrap", "--quiet", *foreign, _MERGED, wanted, *small, *target, quiet=True)
            # What base-passwd does at its installation: without it root has no name.
            with tarfile.open(target[1]) as tar:
                for kind in ("passwd", "group"):
                    file = tar.extractfile(f"./usr/share/base-passwd/{kind}.master")
                    assert file is not None
                    (Path(folder) / kind).write_bytes(file.read())
        accounts = "" if architecture == HERE else "COPY passwd group /etc/\n"
        (Path(folder) / "Dockerfile").write_text(f"FROM scratch\nADD base.tar /\n{accounts}")
        platform = ["--format", "docker", "--platform", f"linux/{architecture}"]
        run(*builder.command, "build", *platform, "--tag", name, folder, quiet=True)
    return name


def _is_stored(builder: Builder, *question: str) -> bool:
    return subprocess.run([*builder.command, *question], capture_output=True, check=False).returncode == 0


def wheelhouse(arguments: Iterable[str], architecture: str) -> Path:
    """Return a folder with the wheels of images on these bases; this machine's pip fetches them with its own
    configuration.

    Raises:
        BuildFailed: pip did not find one of them for this architecture.
    """
    locks = {LOCKS[argument]: BASES[argument].python for argument in arguments if argument in LOCKS}
    locks.setdefault(LOCKS["BASE"], BASES["BASE"].python)  # what builds the project is in it
    texts = [(ROOT / lock).read_text() for lock in sorted(locks)]
    chosen = wheel_options(architecture)
    folder = CACHE / f"wheels-{architecture}-{_key(*chosen, *texts)}"
    if not folder.exists():
        print(f"fetching wheels into {folder}", flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as partial:
            fetched = Path(partial) / "wheels"
            for lock, python in locks.items():
                options = ("--quiet", "--require-hashes", "--no-deps", "--python-version", python, *chosen)
                run(sys.executable, "-m", "pip", "download", *options, "-d", fetched, "-r", ROOT / lock, quiet=True)
            fetched.rename(folder)
    return folder


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
