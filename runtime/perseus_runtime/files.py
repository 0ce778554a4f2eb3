"""Files that a user names: what is read of them has a limit, and what is wrong with one is said in one line."""

from __future__ import annotations

from pathlib import Path


class UnusableFile(ValueError):
    """A file cannot be used; the message begins with its path, and fits behind the name of what it was to hold."""


def read_file(path: Path, most_bytes: int) -> bytes:
    """Read a whole file.

    Args:
        path: the file.
        most_bytes: the largest size. No more than one byte above it is ever read.

    Raises:
        UnusableFile: it cannot be read, or is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise UnusableFile(f"{path} cannot be read: {error.strerror or error}") from error
    if len(content) > most_bytes:
        raise UnusableFile(f"{path} is too large: at most {most_bytes:,} bytes")
    return content
