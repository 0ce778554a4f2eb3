"""Build the project's images, with whichever of docker, podman and buildah works here; ``make images``.

usage: build.py [--archive FILE] [agent] [operator] [gpu-sim] [trainer]      none named: all

  REGISTRY=...      put before the names, without a slash at its end
  TAG=...           default: the chart's appVersion; never latest
  BASE=...          base image, for a release name@sha256:...; default: the Dockerfiles', with buildah a local one
  PIP_OPTIONS=...   options of pip in the build, such as --no-index --find-links=/wheels
  WHEELS=...        a folder that the build sees as /wheels
  PUSH=yes          push what was built

buildah works where there is no container engine and no registry: it then builds upon a Debian that mmdebstrap makes,
and installs wheels that pip fetched outside, both kept in ~/.cache/perseus-k8s/images. --archive writes all of them
into one OCI archive, for ``ctr images import``, ``kind load image-archive`` and ``minikube image load``, prints what
each layer of ours takes, and fails beyond the bound in ``BOUNDS_MB``. Standard library only.
"""

# ruff: noqa: T201  # a script that speaks to people

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
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perseus-k8s" / "images"
BOUNDS_MB: Final = {"agent": 60, "operator": 250, "gpu-sim": 60, "trainer": 100}
"""What the layers of ours may take, uncompressed: what a node must fetch and keep besides the base."""
SUITE: Final = "bookworm"  # its Python is 3.11
BASES: Final = {"BASE": ("python3", "python3-venv", "libstdc++6"), "COMPILER": ("gcc", "libc6-dev")}
"""Packages of the local images that stand for the Dockerfiles' arguments."""
_SMALL: Final = tuple(f"path-exclude=/usr/share/{kind}/*" for kind in ("doc", "man", "locale", "info"))
_IMAGE_NAME: Final = "io.containerd.image.name"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


class BuildFailed(Exception):
    """Said in one sentence."""


def _run(*command: str | Path, quiet: bool = False, cwd: Path = ROOT) -> str:
    """Standard output of a command that succeeds; quiet: and standard error, which is then shown only if it fails.

    Raises:
        BuildFailed: it does not.
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
    """One of the three programs, and what it is always given."""

    name: str
    command: list[str]
    options: list[str] = field(default_factory=list)
    """Of every build."""

    @classmethod
    def find(cls) -> Builder:
        """The first that works here.

        Raises:
            BuildFailed: none does.
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
        """All of them in one OCI archive, layers that they share only once.

        Raises:
            BuildFailed: this builder cannot.
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
                raise BuildFailed("--archive: podman writes no OCI archive of several images; install buildah")
        partial.replace(archive)

    def _lay_out(self, images: Sequence[str], folder: Path) -> None:
        """An OCI layout whose layers are not compressed: they never travel further than to this machine's nodes."""
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
    """A store of our own: the machine's stays as it is, and the layers outlive the tree.

    Overlay where the kernel lets us, or every step copies the whole image.
    """
    buildah = shutil.which("buildah") or "buildah"
    for driver in ("overlay", "vfs"):
        options = ["--root", str(CACHE / driver), "--runroot", str(CACHE / f"{driver}-run"), "--storage-driver", driver]
        if subprocess.run([buildah, *options, "images"], capture_output=True, check=False).returncode == 0:
            return options
    raise BuildFailed(f"buildah cannot keep images in {CACHE}: run it as root, or with subordinate ids in /etc/subuid")


def full_name(image: str) -> str:
    """The name by which the kubelet will ask: one without a registry is Docker Hub's, as in any container runtime."""
    registry, slash, _ = image.partition("/")
    if not slash:
        return f"docker.io/library/{image}"
    return image if re.search(r"[.:]|^localhost$", registry) else f"docker.io/{image}"


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """One build at a time: two trees would give the same names to different images."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            _unmount()


def _unmount() -> None:
    """Buildah leaves its store mounted, and a build that was killed its layers: the machine gets its mounts back."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    for mount in reversed([mount for mount in mounts if mount.startswith(f"{CACHE}/")]):
        subprocess.run(["umount", mount], check=False)  # noqa: S607 - of util-linux


# ------------------------------------------------------------------------------------------- without a registry


def _key(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def local_base(builder: Builder, argument: str) -> str:
    """The name of a minimal Debian with some packages, made if it is not in the store yet."""
    packages = BASES[argument]
    name = f"localhost/perseus-{argument.lower()}:{_key(SUITE, *packages, *_SMALL)}"
    if subprocess.run([*builder.command, "inspect", name], capture_output=True, check=False).returncode == 0:
        return name
    if shutil.which("mmdebstrap") is None:
        raise BuildFailed(f"no base image: set {argument}=, or install mmdebstrap, which makes one without a registry")
    print(f"making {name}: Debian {SUITE} with {' and '.join(packages)}", flush=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        _run(
            "mmdebstrap", "--quiet", "--variant=essential",
            # A merged /usr from the start needs no perl, a quarter of the image, to merge it.
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            f"--include={','.join(('usr-is-merged', *packages))}",
            *(f"--dpkgopt={option}" for option in _SMALL),
            SUITE, f"{folder}/base.tar", quiet=True,
        )  # fmt: skip
        (Path(folder) / "Dockerfile").write_text("FROM scratch\nADD base.tar /\n")
        _run(*builder.command, "build", "--format", "docker", "--tag", name, folder, quiet=True)
    return name


def wheelhouse() -> Path:
    """A folder with the wheels of every image, fetched by this machine's pip the way it is configured."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = {text for extra in ("agent", "operator", "solver") for text in extras[extra]} | {
        *project["build-system"]["requires"]
    }
    requirements = sorted(text for text in wanted if not text.startswith(project["project"]["name"]))
    lock = ROOT / "requirements.lock"
    folder = CACHE / f"wheels-{_key(sys.version, *requirements, lock.read_text())}"
    if not folder.exists():
        print(f"fetching wheels into {folder}", flush=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as partial:
            fetched = Path(partial) / "wheels"
            _run(
                sys.executable, "-m", "pip", "download", "--quiet", "-d", fetched, "-c", lock, *requirements, quiet=True
            )
            fetched.rename(folder)
    return folder


# ------------------------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Layer:
    """One layer of ours."""

    what: str
    size_mb: float


def layers_of(archive: Path) -> Iterator[tuple[str, list[Layer]]]:
    """Name of each image of an OCI archive, and its layers above the base."""
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
            ours = instructions(name.rpartition("perseus-")[2].partition(":")[0])
            found = zip(steps[-ours:], sizes[-ours:], strict=True)
            yield name, [Layer(_short(step), size / 1e6) for step, size in found]


def instructions(name: str) -> int:
    """How many instructions of a Dockerfile's last stage make a layer."""
    text = (HERE / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    return len(re.findall(r"^(?:COPY|ADD|RUN) ", re.split(r"^FROM ", text, flags=re.MULTILINE)[-1], re.MULTILINE))


def _short(step: str) -> str:
    return re.sub(r".*#\(nop\) |^/bin/sh -c | # buildkit$|(COPY|ADD) \w+:\S+ in ", r"\1 ", step).strip()[:60]


def report(archive: Path) -> list[str]:
    """Prints sizes; returns what is beyond its bound."""
    beyond = []
    for image, layers in layers_of(archive):
        name = image.rpartition("perseus-")[2].partition(":")[0]
        total = sum(layer.size_mb for layer in layers)
        print(f"{image}: {total:.1f} MB of ours, of {BOUNDS_MB[name]} allowed")
        for layer in layers:
            print(f"  {layer.size_mb:7.1f} MB  {layer.what}")
        if total > BOUNDS_MB[name]:
            beyond.append(f"{name}: {total:.1f} MB, allowed are {BOUNDS_MB[name]}")
    return beyond


# -------------------------------------------------------------------------------------------------------- main


def main() -> None:
    names = list(BOUNDS_MB)
    parser = argparse.ArgumentParser(description="Build the project's images.", epilog=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; none: all")
    parser.add_argument("--archive", type=Path, help="write one OCI archive with all of them, and check their sizes")
    asked = parser.parse_args()
    given = os.environ.get
    if unknown := set(asked.names) - set(names):
        raise BuildFailed(f"unknown image {min(unknown)!r}: known are {', '.join(names)}")
    chart = (ROOT / "charts" / "perseus" / "Chart.yaml").read_text()
    version = re.search(r'^appVersion: *"?([^"\n]*)"?$', chart, re.MULTILINE)
    assert version is not None
    tag = given("TAG") or version[1]
    if tag == "latest":
        raise BuildFailed("TAG=latest is refused, as by the chart: nobody could say what runs")

    builder = Builder.find()
    pip_options, wheels = given("PIP_OPTIONS", ""), given("WHEELS")
    bases = {argument: given(argument) for argument in BASES if given(argument)}
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
    if builder.name == "docker" and given("PUSH"):
        # BuildKit attests what is in the image and how it came there; attestations live in registries.
        builder.options += ["--push", "--provenance=true", "--sbom=true"]

    prefix = f"{given('REGISTRY')}/" if given("REGISTRY") else ""
    images = {name: f"{prefix}perseus-{name}:{tag}" for name in names if not asked.names or name in asked.names}
    for name, image in images.items():
        started = time.monotonic()
        print(f"building {image} with {builder.name}", end="", flush=True)
        builder.build(name, image)
        print(f": {time.monotonic() - started:.0f} s", flush=True)
        if builder.name != "docker" and given("PUSH"):
            _run(*builder.command, "push", image)
    if asked.archive:
        builder.save(list(images.values()), asked.archive.resolve())
        print(f"{asked.archive}: {asked.archive.stat().st_size / 1e6:.0f} MB")
        if beyond := report(asked.archive):
            raise BuildFailed(f"too large: {'; '.join(beyond)}")


if __name__ == "__main__":
    try:
        with alone():
            main()
    except BuildFailed as error:
        sys.exit(f"build.py: {error}")
