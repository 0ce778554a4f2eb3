"""The program that builds images: docker, podman or buildah."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from image_build.contents import FOLDER, NAME

ROOT: Final = FOLDER.parents[1]
CACHE: Final = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perseus-k8s" / "images"
ARCHITECTURES: Final = {"x86_64": "amd64", "aarch64": "arm64", "arm64": "arm64"}
"""OCI's name by that of this machine."""
HERE: Final = ARCHITECTURES.get(platform.machine(), platform.machine())
"""Architecture of this machine, whose code alone a build can run."""
_BUILD_PLATFORM: Final = f"--build-arg=BUILDPLATFORM=linux/{HERE}"
"""Docker's builder sets it by itself; buildah 1.28 does not, and would run the stages on the other platform."""
_NO_CACHE: Final = "--no-cache"
_MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"


class BuildFailed(Exception):
    """A build failed. The message is one sentence for the command line."""


def run(*command: str | Path, quiet: bool = False, cwd: Path = ROOT) -> str:
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
    """One of the three programs."""

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
            return cls("podman", ["podman"], [_BUILD_PLATFORM, *_dated()])
        if shutil.which("buildah"):
            return cls("buildah", ["buildah", *_storage()], ["--layers", _BUILD_PLATFORM, *_dated()])
        raise BuildFailed("no builder: docker has no engine here, and neither podman nor buildah is installed")

    def build(self, image: str, architecture: str, options: Sequence[str | Path]) -> None:
        """Build one image for one architecture; where its code can run here, also check it by running it.

        Args:
            image: its name and tag.
            architecture: ``amd64`` or ``arm64``.
            options: of this build: its Dockerfile, arguments and labels.

        Raises:
            BuildFailed: the build failed, or what was built does not run.
        """
        command = [*self.command, "build", *self.options, "--platform", f"linux/{architecture}", *options]
        log = run(*command, "--target=image", "--tag", image, ".", quiet=True)
        if architecture == HERE:
            cached = [word for word in command if word != _NO_CACHE]
            log += run(*cached, "--target=checked", ".", quiet=True)
        if os.environ.get("VERBOSE"):
            print(log)  # noqa: T201 - asked for

    def push(self, image: str, name: str, parts: Mapping[str, str], options: Sequence[str | Path]) -> None:
        """Push the image of one architecture to a registry, or those of several as one index.

        Args:
            image: name and tag under which it is pushed.
            name: of this builder's own list of them, unless docker pushes, which names images by their registry.
            parts: name and tag of each image by its architecture.
            options: with which they were built.

        Raises:
            BuildFailed: the registry was not reached, or refused them.
        """
        if self.name == "docker":
            # BuildKit attests the contents of the image and how it was built; a registry stores the attestations.
            platforms = ",".join(f"linux/{architecture}" for architecture in parts)
            attested = ["--push", "--provenance=true", "--sbom=true", "--platform", platforms]
            run("docker", "buildx", "build", *attested, *options, "--target=image", "--tag", image, ".", quiet=True)
            return
        plain = ["--tls-verify=false"] if on_this_machine(image) else []
        if len(parts) == 1:
            run(*self.command, "push", *plain, *parts.values(), f"docker://{image}", quiet=True)
            return
        subprocess.run([*self.command, "manifest", "rm", name], capture_output=True, check=False)
        run(*self.command, "manifest", "create", name, *parts.values(), quiet=True)
        run(*self.command, "manifest", "push", *plain, "--all", "--format=oci", name, f"docker://{image}", quiet=True)

    def forget_layers(self) -> None:
        """Remove what dated builds leave in this project's own store beside their images: none of it is used again."""
        if self.name == "buildah" and _NO_CACHE in self.options:
            subprocess.run([*self.command, "rmi", "--prune"], capture_output=True, check=False)

    def lay_out(self, images: Mapping[str, str], folder: Path) -> None:
        """Write an OCI layout of images. Its layers are not compressed, because they only travel to nodes nearby.

        Args:
            images: name and tag of each, by which nodes will know it, by that in this builder's store.
            folder: to write into.

        Raises:
            BuildFailed: this builder cannot write one.
        """
        match self.name:
            case "docker":  # an OCI layout from version 25 on
                run(*self.command, "save", "--output", folder / "saved.tar", *images)
                with tarfile.open(folder / "saved.tar") as tar:
                    tar.extractall(folder, filter="data")
                (folder / "saved.tar").unlink()
            case "buildah":
                self._lay_out(images, folder)
            case _:
                raise BuildFailed("podman cannot write several images for a look at their contents; install buildah")

    def _lay_out(self, images: Mapping[str, str], folder: Path) -> None:
        blobs = folder / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        manifests = []
        for stored, image in images.items():
            pushed = folder / "image"
            run(*self.command, "push", "--disable-compression", "--format", "oci", stored, f"dir:{pushed}", quiet=True)
            manifest = (pushed / "manifest.json").read_bytes()
            digest = hashlib.sha256(manifest).hexdigest()
            (pushed / "manifest.json").rename(pushed / digest)
            (pushed / "version").unlink()
            for blob in pushed.iterdir():
                blob.replace(blobs / blob.name)
            pushed.rmdir()
            entry = {"mediaType": _MANIFEST, "digest": f"sha256:{digest}", "size": len(manifest)}
            manifests.append({**entry, "annotations": {NAME: full_name(image)}})
        (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": manifests}))
        (folder / "oci-layout").write_text(json.dumps({"imageLayoutVersion": "1.0.0"}))


def _dated() -> list[str]:
    """Return podman's and buildah's options with which the same sources give the same image, if there is a date for it.

    Docker's builder reads the date from the environment. These would take layers of another date from their cache; and
    Docker's format, which alone has health checks, notes the random name of each container of the build.
    """
    date = os.environ.get("SOURCE_DATE_EPOCH")
    return ["--format=oci", f"--timestamp={date}", _NO_CACHE] if date else ["--format=docker"]


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


def on_this_machine(image: str) -> bool:
    """Return whether the registry of an image is on this machine: it needs no TLS, and nobody else reads it."""
    return re.match(r"(localhost|127\.\d+\.\d+\.\d+|\[::1\]):\d+/", f"{image}/") is not None


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
