"""Print pinned requirements with their hashes, and all that these require: ``python3 requirements.py agent``. With
``--wheels-for arm64`` print the options with which pip takes wheels of that architecture, on any machine.

An argument is an extra of the project, ``build-system``, or a package. Pins and hashes are those of
``requirements-images.lock``, whose comments say what requires what. An image installs them with ``--require-hashes``,
in a layer of their own, which does not change with the project's code. Standard library only.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

LOCK = "requirements-images.lock"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""Architectures of images by the names of OCI, and as wheels and compilers call them."""
OLDEST_GLIBC, NEWEST_GLIBC = 17, 28
"""Minor versions of the C library, 2.17 to 2.28, whose wheels run in an image: Debian 10 has 2.28."""


def requirements(project: dict[str, object], extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the extras that it names."""
    for text in project["optional-dependencies"][extra]:  # type: ignore[index]
        own = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", text)
        if own:
            for inner in own[1].split(","):
                yield from requirements(project, inner)
        else:
            yield text


def pinned(lock: str, names: Iterable[str]) -> list[str]:
    """Return the lock's lines of these packages and of all that they require.

    Raises:
        KeyError: the lock has no such package.
    """
    lines: dict[str, list[str]] = {}
    required_by: dict[str, set[str]] = {}
    name = ""
    for line in lock.splitlines():
        if comment := re.match(r" +#(?: via)? +(\S+)", line):
            required_by[name].add(normal(comment[1]))
        elif found := re.match(r"([A-Za-z0-9._-]+)==", line):
            name = normal(found[1])
            lines[name], required_by[name] = [line], set()
        elif line.startswith(" ") and not line.strip().startswith("#"):
            lines[name].append(line)
    wanted = {normal(each) for each in names}
    while more := {one for one, needing in required_by.items() if needing & wanted} - wanted:
        wanted |= more
    return [line for one in sorted(wanted) for line in lines[one]]


def wheel_options(architecture: str) -> list[str]:
    """Return pip's options that choose wheels of an architecture, whichever pip runs on.

    Args:
        architecture: ``amd64`` or ``arm64``.

    Raises:
        KeyError: it is neither.
    """
    machine = MACHINES[architecture]
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    return ["--only-binary=:all:", *(f"--platform={tag}" for tag in (*tags, f"manylinux2014_{machine}"))]


def normal(name: str) -> str:
    """The name of a package as locks and indexes compare it; without a version or extras."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~; ]", name)[0]).lower()


def wanted_by(project: dict[str, Any], argument: str) -> list[str]:
    """The packages that an argument of the command line names."""
    if argument == "build-system":
        return [*project["build-system"]["requires"]]
    if argument in project["project"]["optional-dependencies"]:
        return [*requirements(project["project"], argument)]
    return [argument]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--wheels-for"]:
        print(*wheel_options(sys.argv[2]))
        sys.exit()
    described = tomllib.loads(Path("pyproject.toml").read_text())
    asked = [name for argument in sys.argv[1:] for name in wanted_by(described, argument)]
    print("\n".join(pinned(Path(LOCK).read_text(), asked)))
