"""The sources of a release: one commit, and what its files say about it."""

from __future__ import annotations

import re
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from release_build.commands import ReleaseFailed, run


@dataclass(frozen=True)
class Sources:
    """Files of one commit, in a folder of their own, without what git ignores."""

    folder: Path
    commit: str
    epoch_s: int
    """When it was committed, seconds since 1970: the time of everything in the release."""

    @property
    def version(self) -> str:
        """Of Python packages, images and chart alike."""
        project = tomllib.loads((self.folder / "pyproject.toml").read_text(encoding="utf-8"))
        return str(project["project"]["version"])

    @property
    def home(self) -> str:
        """Address of the project, with a slash at its end."""
        chart = (self.folder / "charts" / "perseus" / "Chart.yaml").read_text(encoding="utf-8")
        [home] = re.findall(r"^home: (\S+)$", chart, re.MULTILINE)
        return f"{home.rstrip('/')}/"

    def changes(self) -> str:
        """Return the changelog's section of this version; without one that of what is not yet released.

        Raises:
            ReleaseFailed: it has neither.
        """
        text = (self.folder / "CHANGELOG.md").read_text(encoding="utf-8")
        sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)[1:]
        for heading in (rf"## \[?{re.escape(self.version)}\]?(?![\w.])", "## Unreleased"):
            for section in sections:
                if re.match(heading, section):
                    return section.rstrip() + "\n"
        raise ReleaseFailed(f"CHANGELOG.md has no section of {self.version}, nor of what is unreleased")


def export(root: Path, revision: str, folder: Path) -> Sources:
    """Write the files of a commit into a folder.

    Args:
        root: of the repository.
        revision: what git calls the commit.
        folder: to write into.

    Raises:
        ReleaseFailed: git does not know it.
    """
    commit = run("git", "rev-parse", "--verify", f"{revision}^{{commit}}", cwd=root).strip()
    epoch_s = int(run("git", "show", "--no-patch", "--format=%ct", commit, cwd=root))
    packed = folder.with_suffix(".tar")
    run("git", "archive", "--format=tar", "--output", packed.resolve(), commit, cwd=root)
    with tarfile.open(packed) as tar:
        tar.extractall(folder, filter="data")
    packed.unlink()
    return Sources(folder, commit, epoch_s)


def require_clean(root: Path) -> None:
    """Check that what would be released is what is in the working tree.

    Raises:
        ReleaseFailed: there are changes that are not committed.
    """
    if changed := run("git", "status", "--porcelain", cwd=root).rstrip():
        raise ReleaseFailed(f"a release is a commit, and these changes are in none:\n{changed}")
