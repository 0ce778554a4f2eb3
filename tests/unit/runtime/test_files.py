"""Files that a user names are read within a limit, and what is wrong with one is one line that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from perseus_runtime.files import UnusableFile, read_file


def test_a_file_of_the_limit_is_read_and_one_byte_more_is_not(tmp_path: Path) -> None:
    path = tmp_path / "factors.csv"
    path.write_bytes(b"four")
    assert read_file(path, 4) == b"four"
    with pytest.raises(UnusableFile, match=f"^{path} is too large: at most 3 bytes$"):
        read_file(path, 3)


def test_an_endless_file_is_refused() -> None:
    with pytest.raises(UnusableFile, match=r"^/dev/zero is too large: at most 1,000 bytes$"):
        read_file(Path("/dev/zero"), 1000)


@pytest.mark.parametrize(("name", "why"), [("none", "No such file or directory"), (".", "Is a directory")])
def test_what_cannot_be_read_says_why(tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(UnusableFile, match=f"cannot be read: {why}"):
        read_file(tmp_path / name, 1000)
