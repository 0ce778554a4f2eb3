"""Build hook of hatchling: compile what is written in C, the client's marks and the solver's inner loops.

Without a C compiler the wheel is pure Python: marks are slower there, and the solver says that it cannot solve. Marks
keep to CPython's stable interface and the solver's library knows nothing of Python: one wheel for 3.11 and every
version after it.

Environment, for wheels that are published; with either of them a failure to compile is an error:
  CC=...                      the compiler and its arguments; default: the first of cc, gcc and clang
  PERSEUS_WHEEL_PLATFORM=...  platform of the wheel where CC compiles for another machine than this one, or for an older
                              C library: manylinux_2_17_aarch64
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST: Final = (3, 11)
ALWAYS: Final = ("-Wall", "-Wextra", "-fPIC", "-shared")
SOLVER: Final = ("-std=c11", "-O3", "-ffp-contract=off")
"""Without fused operations, whose results differ between machines."""


class Library(NamedTuple):
    """What is compiled into one file. Paths count from the root of the project, and from its packages in a wheel."""

    sources: tuple[str, ...]
    target: str
    options: tuple[str, ...]
    libraries: tuple[str, ...] = ()

    @property
    def in_wheel(self) -> str:
        return self.target.partition("/")[2]


MARKS: Final = Library(
    ("client/perseus_client/_marks.c",),
    "client/perseus_client/_marks.abi3.so",
    (
        "-O2",
        f"-DPy_LIMITED_API=0x{OLDEST[0]:02x}{OLDEST[1]:02x}0000",
        f"-I{sysconfig.get_path('include')}",
    ),
)
LOOPS: Final = Library(
    (
        "solver/perseus_solver/compiled/simplex.c",
        "solver/perseus_solver/compiled/sweeps.c",
        "solver/perseus_solver/compiled/control.c",
        "solver/perseus_solver/compiled/execution.c",
    ),
    "solver/perseus_solver/compiled/library.so",
    SOLVER,
    ("-lm",),
)


class CompiledHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls before it makes a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        asked = os.environ.get("PERSEUS_WHEEL_PLATFORM", "")
        compiler = shlex.split(os.environ.get("CC", "")) or _compiler()
        for library, lost in ((MARKS, "marks stay in Python"), (LOOPS, "the solver will not solve")):
            why = _unfit() if library is MARKS else ""
            why = why or compile_library(Path(self.root), library, compiler)
            if why and (asked or os.environ.get("CC")):
                raise RuntimeError(f"{library.target} was not compiled: {why}")
            if why:
                (Path(self.root) / library.target).unlink(missing_ok=True)
                self.app.display_warning(f"perseus-k8s: {lost} ({why})")
                continue
            platform = asked or sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"] = False
            build_data["tag"] = f"cp{OLDEST[0]}{OLDEST[1]}-abi3-{platform}"
            if version != "editable":
                build_data["force_include"][str(Path(self.root) / library.target)] = library.in_wheel


def compile_library(root: Path, library: Library, compiler: Sequence[str]) -> str:
    """Why it could not be compiled; empty if it was.

    Args:
        root: folder of the project.
        library: what to compile.
        compiler: program and arguments; none if there is none.
    """
    if not compiler:
        return "no C compiler"
    target = root / library.target
    partial = target.with_suffix(f".{os.getpid()}.partial")  # another environment may be made at the same time
    sources = [str(root / source) for source in library.sources]
    command = [*compiler, *ALWAYS, *library.options, *sources, "-o", str(partial), *library.libraries]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    if done.returncode:
        partial.unlink(missing_ok=True)
        return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
    partial.replace(target)  # other installations may be importing the one of before
    return ""


def _unfit() -> str:
    """Why marks cannot be compiled for this Python; empty if they can."""
    if sys.platform != "linux" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "compiled for CPython on Linux only"
    return ""


def _compiler() -> list[str]:
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), [])
