"""The Python packages of a release, and a package index that is only files.

One source package; from it, and from nothing else, three wheels: for Linux on x86-64 and on aarch64 with compiled
marks, and one for any machine. zig compiles for both: it brings each C library that it is asked for, so the wheels run
with glibc 2.17, the oldest that has all functions that the marks call, whatever this machine has. auditwheel checks it.
"""

from __future__ import annotations

import hashlib
import html
import re
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from email.parser import BytesParser
from pathlib import Path
from typing import Final

from release_build.commands import ReleaseFailed, run

GLIBC: Final = (2, 17)
MACHINES: Final = ("x86_64", "aarch64")
_PAGE: Final = """<!DOCTYPE html>
<html><head><meta name="pypi:repository-version" content="1.0"></head><body>
{}
</body></html>
"""


def build(source: Path, output: Path, epoch_s: int) -> list[Path]:
    """Build the source package and the wheels.

    Args:
        source: folder of the project's files, without what git ignores.
        output: folder to write into.
        epoch_s: seconds since 1970 that become the time of every file.

    Returns:
        The files, the source package first.

    Raises:
        ReleaseFailed: one could not be built, or would run on other machines than its name says.
    """
    output.mkdir(parents=True)
    dated = {"SOURCE_DATE_EPOCH": str(epoch_s)}
    _hatchling(source, output, "sdist", dated)
    [sdist] = output.glob("*.tar.gz")
    _hatchling(_unpacked(sdist, output.with_name("pure")), output, "wheel", {**dated, "HATCH_BUILD_NO_HOOKS": "true"})
    for machine in MACHINES:
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
        compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]} -Wl,-s"
        _hatchling(
            _unpacked(sdist, output.with_name(machine)),
            output,
            "wheel",
            {**dated, "CC": compiler, "PERSEUS_WHEEL_PLATFORM": tag},
        )
    wheels = sorted(output.glob("*.whl"))
    tags = sorted(wheel.stem.split("-", 2)[2] for wheel in wheels)
    wanted = sorted(["py3-none-any", *(f"cp311-abi3-manylinux_{GLIBC[0]}_{GLIBC[1]}_{each}" for each in MACHINES)])
    if tags != wanted:
        raise ReleaseFailed(f"built wheels {', '.join(tags)} instead of {', '.join(wanted)}")
    for wheel in wheels:
        if not wheel.stem.endswith("-any"):
            check_platform(wheel)
    return [sdist, *wheels]


def check_platform(wheel: Path) -> None:
    """Check that the libraries in a wheel run on every machine that its name promises.

    Raises:
        ReleaseFailed: auditwheel names a newer platform than the wheel does.
    """
    said = " ".join(run(sys.executable, "-m", "auditwheel", "show", wheel).split())
    promised = wheel.stem.rpartition("-")[2]
    found = re.search(r'is consistent with the following platform tag: "(\w+)"', said)
    if (
        found is None
        or _glibc(found[1]) > _glibc(promised)
        or found[1].partition("_x")[2] != promised.partition("_x")[2]
    ):
        raise ReleaseFailed(f"{wheel.name} promises {promised}; auditwheel: {said}")


def write_index(files: Sequence[Path], folder: Path) -> None:
    """Write a package index (PEP 503) that pip reads from the disk, or from any web server.

    Args:
        files: wheels and source packages of one project; they are moved into it.
        folder: of the index; ``--index-url`` names it.
    """
    project = re.sub(r"[-_.]+", "-", files[0].name.split("-")[0]).lower()
    (folder / project).mkdir(parents=True)
    links = []
    for file in sorted(files):
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        python = html.escape(_requires_python(file), quote=True)
        links.append(f'<a href="{file.name}#sha256={digest}" data-requires-python="{python}">{file.name}</a><br>')
        file.replace(folder / project / file.name)
    (folder / project / "index.html").write_text(_PAGE.format("\n".join(links)))
    (folder / "index.html").write_text(_PAGE.format(f'<a href="{project}/">{project}</a>'))


def _hatchling(source: Path, output: Path, target: str, environment: dict[str, str]) -> None:
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        target,
        "--directory",
        output.resolve(),
    ]
    run(*command, cwd=source, more=environment)


def _unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as tar:
        tar.extractall(folder, filter="data")
    [inside] = folder.iterdir()
    return inside


def _requires_python(file: Path) -> str:
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            [name] = [each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")]
            metadata = wheel.read(name)
    else:
        with tarfile.open(file) as tar:
            [member] = [each for each in tar if re.fullmatch(r"[^/]+/PKG-INFO", each.name)]
            content = tar.extractfile(member)
            assert content is not None
            metadata = content.read()
    return str(BytesParser().parsebytes(metadata)["Requires-Python"])


def _glibc(tag: str) -> tuple[int, int]:
    found = re.match(r"manylinux_(\d+)_(\d+)_", tag)
    return (int(found[1]), int(found[2])) if found else (99, 0)
