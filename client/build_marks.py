"""Build hook of hatchling: compile the client's marks where there is a compiler; without one the wheel is pure Python.

The result keeps to CPython's stable interface: one file for 3.11 and every version after it.

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
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST = (3, 11)


class MarksHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls before it makes a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / "client" / "perseus_client"
        built = folder / "_marks.abi3.so"
        asked = os.environ.get("PERSEUS_WHEEL_PLATFORM", "")
        compiler = shlex.split(os.environ.get("CC", "")) or _compiler()
        why = compile_marks(folder / "_marks.c", built, compiler)
        if why and (asked or os.environ.get("CC")):
            raise RuntimeError(f"perseus_client: marks were not compiled: {why}")
        if why:
            built.unlink(missing_ok=True)
            self.app.display_warning(f"perseus_client: marks stay in Python ({why})")
            return
        platform = asked or sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp{OLDEST[0]}{OLDEST[1]}-abi3-{platform}"
        if version != "editable":
            build_data["force_include"][str(built)] = f"perseus_client/{built.name}"


def compile_marks(source: Path, target: Path, compiler: Sequence[str]) -> str:
    """Why it could not be compiled; empty if it was.

    Args:
        source: in C.
        target: library to write.
        compiler: program and arguments; none if there is none.
    """
    if sys.platform != "linux" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "compiled for CPython on Linux only"
    if not compiler:
        return "no C compiler"
    partial = target.with_suffix(".partial")
    limited = f"-DPy_LIMITED_API=0x{OLDEST[0]:02x}{OLDEST[1]:02x}0000"
    headers = f"-I{sysconfig.get_path('include')}"
    options = ["-O2", "-Wall", "-Wextra", "-fPIC", "-shared", limited, headers]
    try:
        done = subprocess.run(
            [*compiler, *options, str(source), "-o", str(partial)], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{compiler[0]}: {error.strerror}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
    partial.replace(target)  # other installations may be importing the one of before
    return ""


def _compiler() -> list[str]:
    return next(([path] for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), [])
