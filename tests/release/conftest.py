"""What the tests of a release need: the release that `make release` made, and the programs that it was made with.

Without a release in out/release, or in the folder that PERSEUS_RELEASE names, the tests of what is in one are skipped
with a message, and so are those of wheels without the packages of ``perseus-k8s[release]``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from release import ROOT, Tools
from release_build import packages
from release_build.commands import ReleaseFailed, run
from release_build.registry import Registry, serving


@pytest.fixture(scope="session")
def release() -> Path:
    folder = Path(os.environ.get("PERSEUS_RELEASE", ROOT / "out" / "release"))
    if not (folder / "SHA256SUMS").exists():
        pytest.skip(f"no release in {folder}: run `make release`")
    return folder


@pytest.fixture(scope="session")
def tools() -> Tools:
    if shutil.which("go") is None:
        pytest.skip("no Go on this machine to build registry, cosign and Helm")
    try:
        return Tools.built()
    except ReleaseFailed as error:
        pytest.skip(f"registry, cosign and Helm cannot be built: {error}")


@pytest.fixture
def registry(release: Path, tools: Tools) -> Iterator[Registry]:
    """The release's own."""
    with serving(tools.registry, release / "registry") as running:
        yield running


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the working tree that git does not ignore."""
    folder = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", cwd=ROOT).split("\0"):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Source package and wheels of the working tree."""
    absent = [name for name in ("auditwheel", "hatchling", "ziglang") if importlib.util.find_spec(name) is None]
    if absent:
        pytest.skip(f"no {', '.join(absent)} here: run `make release-test`")
    return packages.build(source, tmp_path_factory.mktemp("packages") / "built", 1_700_000_000)


@pytest.fixture(scope="session")
def index(built: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package index of them."""
    folder = tmp_path_factory.mktemp("index")
    copies = [Path(shutil.copy(file, folder / file.name)) for file in built]
    packages.write_index(copies, folder / "simple")
    return folder / "simple"


def fails(*command: str | Path) -> str:
    """Run a command that must fail, and return what it said."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr
