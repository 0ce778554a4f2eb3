"""Build the project's images with docker, podman or buildah, whichever is usable on this machine.

usage: build.py [--archive FILE] [agent] [operator] [gpu-sim] [trainer]      default: all images

Environment:
  REGISTRY=...      prefix of the names, without a slash at its end
  TAG=...           default: the chart's appVersion; latest is refused
  BASE=...          base image; default: the Dockerfiles', with buildah a local image
  COMPILER=...      the same of the stages that compile and strip
  BASE_DATE=...     day on which the digests of BASE and COMPILER were looked up; becomes a label
  PIP_OPTIONS=...   options of pip in the build, such as --no-index --find-links=/wheels
  WHEELS=...        a folder that the build sees as /wheels
  PUSH=yes          push the images; BASE and COMPILER must then be pinned: name:version@sha256:..., with BASE_DATE

buildah needs neither a container engine nor a registry: its base is a Debian that mmdebstrap makes, and it installs
wheels that pip fetched before; both are stored in ~/.cache/perseus-k8s/images. --archive writes all images into one OCI
archive, for ``ctr images import``, ``kind load image-archive`` and ``minikube image load``. It then prints the size of
every layer above the base, and fails if an image exceeds its bound in ``BOUNDS_MB``. Standard library only.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perseus-k8s" / "images"
BOUNDS_MB: Final = {"agent": 60, "operator": 250, "gpu-sim": 60, "trainer": 100}
"""Largest size of an image's layers above its base, uncompressed: what a node must fetch and store beside the base."""
SUITE: Final = "bookworm"  # its Python is 3.11
BASES: Final = {"BASE": ("python3", "python3-venv", "libstdc++6"), "COMPILER": ("gcc", "libc6-dev")}
"""Packages of the local images that replace the images named by the Dockerfiles' arguments."""
_SMALL: Final = tuple(f"path-exclude=/usr/share/{kind}/*" for kind in ("doc", "man", "locale", "info"))
_IMAGE_NAME: Final = "io.containerd.image.name"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


class BuildFailed(Exception):
    """A build failed. The message is one sentence for the command line."""


def _run(*command: str | Path, quiet: bool = False, cwd: Path = ROOT) -> str:
    """Run a command and return its standard output.

    Args:
        command: the program and its arguments.
        quiet: whether to capture standard error too, and to show it only if the command fails.
        cwd: folder to run it in.

    Raises:
        BuildFailed: the command failed.
    """
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if quiet else None,
        text=True,
        check=False,
        env={**os.environ, "BUILDAH_ISOLATION": os.environ.get("BUILDAH_ISOLATION", "chroot")},
    )
    if done.returncode:
        raise BuildFailed(f"{' '.join(map(str, command[:3]))} … failed with {done.returncode}\n{done.stdout}".strip())
    return done.stdout


@dataclass
class Builder:
    """One of the three programs, with the options of every call."""

    name: str
    command: list[str]
    options: list[str] = field(default_factory=list)
    """Options of every build."""

    @classmethod
    def find(cls) -> Builder:
        """Return the first of docker, podman and buildah that is usable on this machine.

        Raises:
            BuildFailed: none is.
        """
        docker = shutil.which("docker")
        if docker and subprocess.run([docker, "info"], capture_output=True, check=False).returncode == 0:
            return cls("docker", ["docker"])
        if shutil.which("podman"):
            return cls("podman", ["podman"], ["--format", "docker"])
        if shutil.which("buildah"):
            return cls("buildah", ["buildah", *_storage()], ["--layers", "--format", "docker"])
        raise BuildFailed("no builder: docker has no engine here, and neither podman nor buildah is installed")

    def build(self, name: str, image: str) -> None:
        dockerfile = HERE / f"{name}.Dockerfile"
        log = _run(*self.command, "build", *self.options, "--file", dockerfile, "--tag", image, ".", quiet=True)
        if os.environ.get("VERBOSE"):
            print(log)

    def save(self, images: Sequence[str], archive: Path) -> None:
        """Write images into one OCI archive, in which layers that they share are stored once.

        Raises:
            BuildFailed: this builder cannot write such an archive.
        """
        archive.parent.mkdir(parents=True, exist_ok=True)
        partial = archive.with_name(f"{archive.name}.partial")
        match self.name:
            case "docker":  # an OCI layout from version 25 on
                _run(*self.command, "save", "--output", partial, *images)
            case "buildah":
                with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
                    self._lay_out(images, Path(folder))
                    with tarfile.open(partial, "w") as tar:
                        tar.add(folder, "")
            case _:
                raise BuildFailed("--archive: podman cannot write an OCI archive of several images; install buildah")
        partial.replace(archive)

    def _lay_out(self, images: Sequence[str], folder: Path) -> None:
        """Write an OCI layout. Its layers are not compressed, because they only travel to this machine's nodes."""
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        manifests = []
        for image in images:
            pushed = folder / "image"
            _run(*self.command, "push", "--disable-compression", "--format", "oci", image, f"dir:{pushed}", quiet=True)
            manifest = (pushed / "manifest.json").read_bytes()
            digest = hashlib.sha256(manifest).hexdigest()
            (pushed / "manifest.json").rename(pushed / digest)
            (pushed / "version").unlink()
            for blob in pushed.iterdir():
                blob.replace(blobs / blob.name)
            pushed.rmdir()
            annotations = {_IMAGE_NAME: full_name(image)}
            entry = {"mediaType": _MANIFEST, "digest": f"sha256:{digest}", "size": len(manifest)}
            manifests.append({**entry, "annotations": annotations})
        (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _storage() -> list[str]:
    """Return buildah's options for a separate store, which leaves the machine's unchanged and outlives this checkout.

    It uses overlays where the kernel allows them; without them every step copies the whole image.
    """
    buildah = shutil.which("buildah") or "buildah"
    for driver in ("overlay", "vfs"):
        options = ["--root", str(CACHE / driver), "--runroot", str(CACHE / f"{driver}-run"), "--storage-driver", driver]
        if subprocess.run([buildah, *options, "images"], capture_output=True, check=False).returncode == 0:
            return options
    raise BuildFailed(f"buildah cannot store images in {CACHE}: run it as root, or with subordinate ids in /etc/subuid")


def full_name(image: str) -> str:
    """Return the name under which the kubelet requests an image: without a registry it is one of Docker Hub."""
    registry, slash, _ = image.partition("/")
    if not slash:
        return f"docker.io/library/{image}"
    return image if re.search(r"[.:]|^localhost$", registry) else f"docker.io/{image}"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Allow one build at a time, because two checkouts would give the same names to different images."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _unmount()


def _unmount() -> None:
    """Unmount buildah's store, and the layers of builds that were killed."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{CACHE}/")]):
        subprocess.run(["umount", mount], check=False)  # noqa: S607 - of util-linux


# ------------------------------------------------------------------------------------------- without a registry


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def local_base(builder: Builder, argument: str) -> str:
    """Return the name of a local base image, and make it if the store does not have it.

    Args:
        builder: buildah.
        argument: the Dockerfiles' argument that it replaces, a key of ``BASES``.

    Raises:
        BuildFailed: mmdebstrap is missing or failed.
    """
    packages = BASES[argument]
    name = f"localhost/perseus-{argument.lower()}:{_key(SUITE, *packages, *_SMALL)}"
    if subprocess.run([*builder.command, "inspect", name], capture_output=True, check=False).returncode == 0:
        return name
    if shutil.which("mmdebstrap") is None:
        raise BuildFailed(f"no base image: set {argument}=, or install mmdebstrap to make one without a registry")
    print(f"making {name}: Debian {SUITE} with {' and '.join(packages)}", flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run(
            "mmdebstrap", "--quiet", "--variant=essential",
            # With /usr merged from the start the image needs no perl, a quarter of it, to merge it later.
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            f"--include={','.join(('usr-is-merged', *packages))}",
            *(f"--dpkgopt={option}" for option in _SMALL),
            SUITE, f"{folder}/base.tar", quiet=True,
        )  # fmt: skip
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        _run(*builder.command, "build", "--format", "docker", "--tag", name, folder, quiet=True)
    return name


def wheelhouse() -> Path:
    """Return a folder with the wheels of all images; this machine's pip fetches them with its own configuration."""
    lock = ROOT / "requirements-images.lock"
    folder = CACHE / f"wheels-{_key(sys.version, lock.read_text())}"
    if not folder.exists():
        print(f"fetching wheels into {folder}", flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as partial:
            fetched = Path(partial) / "wheels"
            options = ("--quiet", "--require-hashes", "--no-deps", "-d", fetched, "-r", lock)
            _run(sys.executable, "-m", "pip", "download", *options, quiet=True)
            fetched.rename(folder)
    return folder


# ------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Layer:
    """One layer above the base."""

    step: str
    size_mb: float


def layers_of(archive: Path) -> Iterator[tuple[str, list[Layer]]]:
    """Yield the name of each image of an OCI archive, and its layers above the base."""
    with tarfile.open(archive) as tar:

        def read(name: str) -> Any:
            file = tar.extractfile(name)
            assert file is not None
            return json.load(file)

        for entry in read("index.json")["manifests"]:
            manifest = read(f"blobs/{entry['digest'].replace(':', '/')}")
            config = read(f"blobs/{manifest['config']['digest'].replace(':', '/')}")
            name = entry["annotations"][_IMAGE_NAME]
            steps = [step.get("created_by", "") for step in config["history"] if not step.get("empty_layer")]
            sizes = [layer["size"] for layer in manifest["layers"]]
            count = instructions(name.rpartition("perseus-")[2].partition(":")[0])
            found = zip(steps[-count:], sizes[-count:], strict=True)
            yield name, [Layer(_short(step), size / 1e6) for step, size in found]


def instructions(name: str) -> int:
    """Return the number of instructions in a Dockerfile's last stage that make a layer."""
    text = (HERE / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    return len(re.findall(r"^(?:COPY|ADD|RUN) ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1], re.MULTILINE))


def _short(step: str) -> str:
    return re.sub(r".*#\(nop\) |^/bin/sh -c | # buildkit$|(COPY|ADD) \w+:\S+ in ", r"\1 ", step).strip()[:60]


def report(archive: Path) -> list[str]:
    """Print the size of every layer above the base; return a message for every image that exceeds its bound."""
    too_large = []
    for image, layers in layers_of(archive):
        name = image.rpartition("perseus-")[2].partition(":")[0]
        total = sum(layer.size_mb for layer in layers)
        print(f"{image}: {total:.1f} MB above the base, {BOUNDS_MB[name]} MB allowed")
        for layer in layers:
            print(f"  {layer.size_mb:7.1f} MB  {layer.step}")
        if total > BOUNDS_MB[name]:
            too_large.append(f"{name}: {total:.1f} MB above the base, {BOUNDS_MB[name]} MB allowed")
    return too_large


def check_pinned() -> None:
    """Check that what is pushed, and others will run, is built from images that a digest names: a tag may move.

    Raises:
        BuildFailed: one of them is not, or it is not known how old it is.
    """
    if not os.environ.get("PUSH"):
        return
    for argument in BASES:
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


# -------------------------------------------------------------------------------------------------------- main


def main() -> None:
    names = list(BOUNDS_MB)
    parser = argparse.ArgumentParser(description="Build the project's images.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(names)}; default: all")
    parser.add_argument("--archive", type=Path, help="write all images into one OCI archive and check their sizes")
    arguments = parser.parse_args()
    setting = os.environ.get
    if unknown := set(arguments.names) - set(names):
        raise BuildFailed(f"unknown image {min(unknown)!r}: known are {', '.join(names)}")
    chart = (ROOT / "charts" / "perseus" / "Chart.yaml").read_text()
    version = re.search(r'^appVersion: *"?([^"\n]*)"?$', chart, re.MULTILINE)
    assert version is not None
    tag = setting("TAG") or version[1]
    if tag == "latest":
        raise BuildFailed("TAG=latest is refused, as by the chart: it does not say which version runs")

    check_pinned()
    builder = Builder.find()
    pip_options, wheels = setting("PIP_OPTIONS", ""), setting("WHEELS")
    bases = {argument: setting(argument) for argument in BASES if setting(argument)}
    if builder.name == "buildah":
        bases = {argument: bases.get(argument) or local_base(builder, argument) for argument in BASES}
        if not pip_options and not wheels:
            pip_options, wheels = "--no-index --find-links=/wheels", str(wheelhouse())
    if wheels:
        if builder.name == "docker":
            raise BuildFailed("WHEELS: docker mounts no folders into builds; use podman or buildah")
        builder.options += ["--volume", f"{Path(wheels).resolve()}:/wheels:ro"]
    for argument, value in {"PIP_OPTIONS": pip_options, **bases}.items():
        builder.options += ["--build-arg", f"{argument}={value}"]
    builder.options += labels(bases.get("BASE", ""))
    if builder.name == "docker" and setting("PUSH"):
        # BuildKit attests the contents of the image and how it was built; a registry stores the attestations.
        builder.options += ["--push", "--provenance=true", "--sbom=true"]

    prefix = f"{setting('REGISTRY')}/" if setting("REGISTRY") else ""
    images = {name: f"{prefix}perseus-{name}:{tag}" for name in names if not arguments.names or name in arguments.names}
    for name, image in images.items():
        started = time.monotonic()
        print(f"building {image} with {builder.name}", end="", flush=True)
        builder.build(name, image)
        print(f": {time.monotonic() - started:.0f} s", flush=True)
        if builder.name != "docker" and setting("PUSH"):
            _run(*builder.command, "push", image)
    if arguments.archive:
        builder.save(list(images.values()), arguments.archive.resolve())
        print(f"{arguments.archive}: {arguments.archive.stat().st_size / 1e6:.0f} MB")
        if too_large := report(arguments.archive):
            raise BuildFailed(f"too large: {'; '.join(too_large)}")


if __name__ == "__main__":
    try:
        with alone():
            main()
    except BuildFailed as error:
        sys.exit(f"build.py: {error}")
