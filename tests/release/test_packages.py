"""The wheels that users install: which machine each is for, what is in it, and that pip takes the right one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from tests.release.conftest import fails

from image_build import elf
from release_build import packages
from release_build.commands import ReleaseFailed, run

pytestmark = pytest.mark.timeout(900)
LIBRARIES = {
    "perseus_client/_marks.abi3.so": {"libc.so.6"},
    "perseus_solver/compiled/library.so": {"libc.so.6", "libm.so.6"},
}
"""What is compiled, and the libraries that each may need: the oldest C library that is promised has no other."""
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")


def wheel(built: list[Path], tag: str) -> Path:
    [found] = [path for path in built if path.stem.endswith(tag)]
    return found


@pytest.mark.parametrize(("tag", "architecture"), [("2_17_x86_64", "amd64"), ("2_17_aarch64", "arm64")])
def test_what_is_compiled_is_for_the_machine_in_the_wheels_name(built: list[Path], tag: str, architecture: str) -> None:
    with zipfile.ZipFile(wheel(built, tag)) as archive:
        found = {name: elf.parse(archive.read(name)) for name in LIBRARIES}
        assert {name for name in archive.namelist() if name.endswith((".so", ".partial"))} == LIBRARIES.keys()
    for name, library in found.items():
        assert library is not None
        assert library.machine == elf.MACHINES[architecture]
        assert set(library.needed) <= LIBRARIES[name]


def test_wheels_differ_in_what_is_compiled_alone(built: list[Path]) -> None:
    def modules(path: Path) -> dict[str, int]:
        with zipfile.ZipFile(path) as archive:
            return {entry.filename: entry.CRC for entry in archive.infolist() if ".dist-info/" not in entry.filename}

    pure = modules(wheel(built, "none-any"))
    assert not pure.keys() & LIBRARIES.keys()
    assert "perseus_client/__init__.py" in pure
    for tag in ("2_17_x86_64", "2_17_aarch64"):
        compiled = modules(wheel(built, tag))
        assert all(compiled.pop(name) for name in LIBRARIES)
        assert compiled == pure


def test_the_source_package_has_all_that_a_wheel_is_built_from(built: list[Path]) -> None:
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"client/perseus_client/_marks.c", "deploy/build_compiled.py", "pyproject.toml", "LICENSE"} <= names
    assert {f"solver/perseus_solver/compiled/{part}.c" for part in ("simplex", "sweeps")} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc"))]


def test_the_same_sources_give_the_same_bytes(built: list[Path], source: Path, tmp_path: Path) -> None:
    again = packages.build(source, tmp_path / "again", 1_700_000_000)
    assert {path.name: path.read_bytes() for path in again} == {path.name: path.read_bytes() for path in built}


def test_a_wheel_that_promises_too_much_is_refused(built: list[Path], tmp_path: Path) -> None:
    compiled = wheel(built, "2_17_aarch64")
    packages.check_platform(compiled)
    older = shutil.copy(compiled, tmp_path / compiled.name.replace("manylinux_2_17", "manylinux_2_5"))
    with pytest.raises(ReleaseFailed, match="promises manylinux_2_5_aarch64"):
        packages.check_platform(Path(older))
    other = shutil.copy(compiled, tmp_path / compiled.name.replace("aarch64", "x86_64"))
    with pytest.raises(ReleaseFailed):
        packages.check_platform(Path(other))


def test_without_the_compiler_that_was_asked_for_there_is_no_wheel(built: list[Path], tmp_path: Path) -> None:
    with tarfile.open(built[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    [source] = tmp_path.iterdir()
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path / "dist")]
    for environment in (
        {"CC": "no-such-compiler"},
        {"PERSEUS_WHEEL_PLATFORM": "manylinux_2_17_aarch64", "CC": "false"},
    ):
        done = subprocess.run(
            command, cwd=source, env={**os.environ, **environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode != 0
        assert "_marks.abi3.so was not compiled" in done.stderr + done.stdout
        assert not list((tmp_path / "dist").glob("*.whl"))


@pytest.mark.parametrize(
    ("platform", "tag"),
    [
        ("manylinux_2_28_x86_64", "cp311-abi3-manylinux_2_17_x86_64"),
        ("manylinux_2_17_aarch64", "cp311-abi3-manylinux_2_17_aarch64"),
        ("musllinux_1_2_aarch64", "py3-none-any"),
        ("macosx_14_0_arm64", "py3-none-any"),
    ],
)
@pytest.mark.parametrize("python", ["3.11", "3.13"])
def test_pip_takes_the_wheel_of_each_platform(
    index: Path, platform: str, tag: str, python: str, tmp_path: Path
) -> None:
    asked = [f"--platform={each}" for each in (platform, platform.replace("2_28", "2_17"))]  # as pip of a machine asks
    options = ["--only-binary=:all:", "--no-deps", "--python-version", python, *asked, "--dest", tmp_path]
    run(*PIP, "download", "--quiet", "--index-url", index.as_uri(), *options, "perseus-k8s")
    [taken] = tmp_path.iterdir()
    assert taken.stem.endswith(tag)


def test_a_python_that_is_too_old_and_a_file_that_was_changed_are_refused(index: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--dest", tmp_path / "taken", "--index-url"]
    old = [*PIP, "download", "--only-binary=:all:", "--python-version", "3.10", *options, index.as_uri(), "perseus-k8s"]
    assert "No matching distribution found" in fails(*old)
    changed = tmp_path / "simple"
    shutil.copytree(index, changed)
    for file in (changed / "perseus-k8s").glob("*.whl"):
        file.write_bytes(file.read_bytes() + b"\0")
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in fails(
        *PIP, "download", *options, changed.as_uri(), "perseus-k8s"
    )


def test_what_pip_installs_from_the_index_marks_in_compiled_code(index: Path, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("marks are compiled for Linux only")
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--index-url", index.as_uri(), "perseus-k8s")
    script = "import perseus_client.marks as m; print(m._marks.__file__); import perseus_client; perseus_client.connect"
    assert run(python, "-I", "-c", script).strip().endswith("perseus_client/_marks.abi3.so")
