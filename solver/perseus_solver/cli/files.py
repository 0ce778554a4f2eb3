"""Files of the command: what it reads has a limit; what it writes is checked first, and is complete or absent."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from perseus_runtime import files
from perseus_solver.errors import SolverError

STDOUT = "-"

Writer = Callable[[Iterable[bytes]], None]


class Unwritable(SolverError):
    """A file cannot be written."""


class Outputs:
    """The files of one command, as a context: leaving it without an error puts all of them in place, otherwise none.

    Each file is written under a hidden name beside its target and then renamed. So a reader never sees half a file, and
    an old file survives a failure.
    """

    def __init__(self, inputs: Mapping[str, Path] | None = None) -> None:
        """Note what is not to be overwritten.

        Args:
            inputs: the files that the command reads, by the options that name them.
        """
        self._inputs = {Path(os.path.realpath(path)): option for option, path in (inputs or {}).items()}
        self._pending: list[tuple[str, Path]] = []

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for temporary, target in self._pending:
            if kind is None:
                os.replace(temporary, target)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)

    def open(self, option: str, name: str) -> Writer:
        """Reserve a file, and return the function that writes it later.

        Args:
            option: the command-line option that named the file, for messages.
            name: its path, or ``-`` for standard output.

        Raises:
            Unwritable: the file cannot be written.
        """
        if name == STDOUT:
            return _write_stdout
        target = Path(os.path.realpath(name))  # a link keeps pointing where it points
        if target.exists() and not target.is_file() and not target.is_dir():
            return lambda chunks: _write_through(option, target, chunks)  # a device or pipe is written, never replaced
        try:
            if target.is_dir():
                raise IsADirectoryError(0, "it is a directory")
            if any(target == other for _, other in self._pending):
                raise OSError(0, "another option names the same file")
            if target in self._inputs:
                raise OSError(0, f"{self._inputs[target]} reads the same file")
            mode = target.stat().st_mode & 0o777 if target.exists() else 0o666 & ~_umask()
            descriptor, temporary = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
            os.chmod(temporary, mode)
            os.close(descriptor)
        except OSError as error:
            raise Unwritable(f"{option} {name} cannot be written: {error.strerror or error}") from error
        self._pending.append((temporary, target))

        def write(chunks: Iterable[bytes]) -> None:
            with _refusing(option, target), open(temporary, "wb") as file:
                _pour(file, chunks)

        return write


def read_file(what: str, path: Path, most_bytes: int, error: type[SolverError]) -> bytes:
    """Read a whole file of the user's.

    Args:
        what: what it holds, for messages.
        path: the file.
        most_bytes: the largest size.
        error: what to raise.

    Raises:
        SolverError: of the type given; the file cannot be read or is too large.
    """
    try:
        return files.read_file(path, most_bytes)
    except files.UnusableFile as cause:
        raise error(f"{what} {cause}") from cause


def _pour(file: BinaryIO, chunks: Iterable[bytes]) -> None:
    for chunk in chunks:
        file.write(chunk)


def _write_stdout(chunks: Iterable[bytes]) -> None:
    _pour(sys.stdout.buffer, chunks)
    sys.stdout.flush()


def _write_through(option: str, target: Path, chunks: Iterable[bytes]) -> None:
    with _refusing(option, target), target.open("wb") as file:
        _pour(file, chunks)


@contextlib.contextmanager
def _refusing(option: str, target: Path) -> Iterator[None]:
    """Turn an error of the file system, such as a full disk, into a message of one line."""
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{option} {target} cannot be written: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
