"""Build hook of hatchling: compile the client's marks where there is a compiler; without one the wheel is pure Python.

The result keeps to CPython's stable interface: one file for 3.11 and every version after it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

OLDEST = (3, 11)


class MarksHook(BuildHookInterface):  # type: ignore[misc]
    """What hatchling calls before it makes a wheel, an editable one too."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / "client" / "perseus_client"
        built = folder / "_marks.abi3.so"
        why = compile_marks(folder / "_marks.c", built)
        if why:
            built.unlink(missing_ok=True)
            self.app.display_warning(f"perseus_client: marks stay in Python ({why})")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"cp{OLDEST[0]}{OLDEST[1]}-abi3-{platform}"
        if version != "editable":
            build_data["force_include"][str(built)] = f"perseus_client/{built.name}"


def compile_marks(source: Path, target: Path) -> str:
    """Why it could not be compiled; empty if it was."""
    if sys.platform != "linux" or sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "compiled for CPython on Linux only"
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        return "no C compiler"
    partial = target.with_suffix(".partial")
    limited = f"-DPy_LIMITED_API=0x{OLDEST[0]:02x}{OLDEST[1]:02x}0000"
    headers = f"-I{sysconfig.get_path('include')}"
    done = subprocess.run(
        [compiler, "-O2", "-Wall", "-Wextra", "-fPIC", "-shared", limited, headers, str(source), "-o", str(partial)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["the compiler failed"])[0]
    partial.replace(target)  # other installations may be importing the one of before
    return ""
