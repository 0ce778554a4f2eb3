"""Packs ``kubectl perseus`` as krew installs it: one archive for each platform, and the plugin's manifest with the
SHA-256 of each.

    python3 deploy/release/plugin.py --uri https://…/download --output out/plugin

An archive holds the plugin's part of the project and, for each Python that is supported, the packages that it needs,
pinned and checked by the hashes of ``requirements-images.lock``; of the machine it needs a Python alone. Wheels are
taken for the platform that is asked for, so one machine packs all. The same input gives the same bytes.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = (
    *("core/perseus_core", "runtime/perseus_runtime", "proto/perseus_proto"),
    *("solver/perseus_solver", "operator/perseus_operator"),
)
NEEDS: Final = ("kubernetes", "numpy", "protobuf", "pyyaml")
"""What the plugin imports, beside the standard library; a test compares it with the code."""
PYTHONS: Final = ("3.11", "3.12", "3.13")
"""Those that a release supports: docs/releases.md."""
PLATFORMS: Final[Mapping[tuple[str, str], tuple[str, ...]]] = {
    ("linux", "amd64"): ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"),
    ("linux", "arm64"): ("manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"),
    ("darwin", "arm64"): ("macosx_14_0_arm64", "macosx_11_0_arm64"),
}
"""Wheels of a platform, the best first; by operating system and architecture as krew names them."""
BINARY: Final = "kubectl-perseus"
LAUNCHER: Final = """#!/bin/sh
# Started by kubectl, through a link of krew's.
self="$0"
while [ -h "$self" ]; do
  link="$(readlink "$self")"
  case "$link" in /*) self="$link" ;; *) self="${self%/*}/$link" ;; esac
done
home="$(cd "${self%/*}" && pwd)"
for version in @VERSIONS@; do
  # One that is found may be a shim without a Python behind it.
  if "python$version" -c "" >/dev/null 2>&1; then
    PYTHONPATH="$home/app:$home/lib/$version" exec "python$version" -s -m perseus_operator.plugin.cli "$@"
  fi
done
echo "kubectl perseus: no Python found; install one of @VERSIONS@" >&2
exit 1
"""


def version() -> str:
    """Return the project's version."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def pack(archive: Path, libraries: Mapping[str, Path]) -> str:
    """Write the archive of one platform.

    Args:
        archive: to be written, ``.tar.gz``.
        libraries: folder of installed packages by version of Python.

    Returns:
        Its SHA-256, in hexadecimal.
    """
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as tar:
        launcher = LAUNCHER.replace("@VERSIONS@", " ".join(sorted(libraries, key=_number, reverse=True)))
        _add(tar, BINARY, launcher.encode(), mode=0o755)
        _add(tar, "LICENSE", (ROOT / "LICENSE").read_bytes())
        for package in PACKAGES:
            _add_tree(tar, ROOT / package, f"app/{Path(package).name}")
        for python, folder in sorted(libraries.items()):
            _add_tree(tar, folder, f"lib/{python}")
    archive.parent.mkdir(parents=True, exist_ok=True)
    with archive.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=0) as compressed:
        compressed.write(packed.getvalue())
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def manifest(uri: str, digests: Mapping[tuple[str, str], str]) -> dict[str, Any]:
    """Return krew's manifest of the plugin.

    Args:
        uri: of the folder in which the archives are published.
        digests: SHA-256 of the archive of each platform, by operating system and architecture.
    """
    return {
        "apiVersion": "krew.googlecontainertools.github.com/v1alpha2",
        "kind": "Plugin",
        "metadata": {"name": "perseus"},
        "spec": {
            "version": f"v{version()}",
            "homepage": _homepage(),
            "shortDescription": "Energy plans of training jobs, what they save",
            "description": (
                "Lists the PerseusJobs of a cluster and what they save, says step by step why one does not\n"
                "(doctor), shows its time-energy frontier and the clocks of its plan, and declares stragglers.\n"
            ),
            "caveats": f"Needs Python: one of {', '.join(PYTHONS)}.\n",
            "platforms": [
                {
                    "selector": {"matchLabels": {"os": system, "arch": machine}},
                    "uri": f"{uri.rstrip('/')}/{archive_name(system, machine)}",
                    "sha256": digest,
                    "bin": BINARY,
                }
                for (system, machine), digest in sorted(digests.items())
            ],
        },
    }


def archive_name(system: str, machine: str) -> str:
    """Return the name of a platform's archive."""
    return f"{BINARY}-v{version()}-{system}-{machine}.tar.gz"


def install(folder: Path, python: str, wheels: Sequence[str], options: Sequence[str] = ()) -> None:
    """Install what the plugin needs for a platform and a Python, from the lock and by hash.

    Raises:
        subprocess.CalledProcessError: pip did not find it; pip says why.
    """
    lister = [sys.executable, str(ROOT / "deploy" / "images" / "requirements.py"), *NEEDS]
    needed = subprocess.run(lister, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write(needed)
        listed.flush()
        platforms = [argument for wheel in wheels for argument in ("--platform", wheel)]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
        command += [*platforms, "--require-hashes", "--target", str(folder), *options, "-r", listed.name]
        subprocess.run(command, check=True)
    for unused in ("bin", "numpy/tests", "numpy/_core/tests"):
        shutil.rmtree(folder / unused, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Pack every platform and write the manifest."""
    parser = argparse.ArgumentParser(prog="plugin.py", description="Pack kubectl perseus as krew installs it.")
    parser.add_argument("--uri", required=True, help="of the folder in which the archives will be published")
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--pip-options", default="", help="for builders without a package index")
    options = parser.parse_args(arguments)
    digests = {}
    for platform, wheels in PLATFORMS.items():
        with tempfile.TemporaryDirectory() as scratch:
            libraries = {python: Path(scratch) / python for python in PYTHONS}
            for python, folder in libraries.items():
                install(folder, python, wheels, options.pip_options.split())
            archive = options.output / archive_name(*platform)
            digests[platform] = pack(archive, libraries)
            print(f"{archive}: {archive.stat().st_size / 1e6:.0f} MB, SHA-256 {digests[platform]}")
    described = options.output / "perseus.yaml"
    described.write_text(yaml.safe_dump(manifest(options.uri, digests), sort_keys=False), encoding="utf-8")
    print(described)


def _homepage() -> str:
    chart = yaml.safe_load((ROOT / "charts" / "perseus" / "Chart.yaml").read_text(encoding="utf-8"))
    return str(chart["home"])


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def _add_tree(tar: tarfile.TarFile, folder: Path, name: str) -> None:
    for path in sorted(folder.rglob("*")):
        inside = path.relative_to(folder)
        if path.is_file() and "__pycache__" not in inside.parts:
            _add(tar, f"{name}/{inside.as_posix()}", path.read_bytes())


def _add(tar: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    """Add a file without what differs between builds: owner, time and the builder's mode."""
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    tar.addfile(entry, io.BytesIO(data))


if __name__ == "__main__":
    main()
