"""What a release is made from: one commit, and nothing that is only in the working tree."""

from __future__ import annotations

from pathlib import Path

import pytest

from release_build.commands import ReleaseFailed, run
from release_build.registry import serving
from release_build.sources import export, require_clean

CHANGELOG = "# Changelog\n\n## Unreleased\n\n- new\n\n## 0.1.0 – 2026-11-25\n\n- first\n"
FILES = {
    "pyproject.toml": '[project]\nname = "x"\nversion = "0.2.0"\n',
    "charts/perseus/Chart.yaml": "name: perseus\nhome: https://perseus.example/\n",
    "CHANGELOG.md": CHANGELOG,
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "repository"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    run("git", "init", "--quiet", cwd=root)
    _commit(root)
    return root


def _commit(root: Path) -> None:
    who = {
        f"GIT_{role}_{what}": f"x{at}x"
        for role in ("AUTHOR", "COMMITTER")
        for what, at in {"NAME": "", "EMAIL": "@"}.items()
    }
    run("git", "add", "--all", cwd=root)
    run("git", "commit", "--quiet", "--message=x", cwd=root, more={**who, "GIT_COMMITTER_DATE": "1700000000 +0000"})


def test_it_has_the_files_and_the_time_of_the_commit(repository: Path, tmp_path: Path) -> None:
    (repository / "pyproject.toml").write_text("changed since\n")
    (repository / "added").write_text("")
    sources = export(repository, "HEAD", tmp_path / "exported")
    assert {str(p.relative_to(sources.folder)) for p in sources.folder.rglob("*") if p.is_file()} == set(FILES)
    assert (sources.version, sources.home, sources.epoch_s) == ("0.2.0", "https://perseus.example/", 1_700_000_000)
    assert {int(path.stat().st_mtime) for path in sources.folder.rglob("*") if path.is_file()} == {1_700_000_000}
    with pytest.raises(ReleaseFailed, match="added"):
        require_clean(repository)
    _commit(repository)
    require_clean(repository)


def test_the_notes_are_those_of_the_version_or_of_what_is_unreleased(repository: Path, tmp_path: Path) -> None:
    assert export(repository, "HEAD", tmp_path / "new").changes() == "## Unreleased\n\n- new\n"
    (repository / "pyproject.toml").write_text(FILES["pyproject.toml"].replace("0.2.0", "0.1.0"))
    _commit(repository)
    assert export(repository, "HEAD", tmp_path / "released").changes() == "## 0.1.0 – 2026-11-25\n\n- first\n"
    (repository / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0.1\n")
    _commit(repository)
    with pytest.raises(ReleaseFailed, match=r"no section of 0\.1\.0, nor"):
        export(repository, "HEAD", tmp_path / "none").changes()


def test_a_commit_that_git_does_not_know_is_refused(repository: Path, tmp_path: Path) -> None:
    with pytest.raises(ReleaseFailed, match="git rev-parse"):
        export(repository, "no-such-commit", tmp_path / "exported")


def test_a_registry_that_does_not_start_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ReleaseFailed, match="does not answer"), serving(Path("/bin/false"), tmp_path / "storage"):
        pass
