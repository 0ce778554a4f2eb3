"""Print the requirements of an extra of the project, one on each line: ``python3 requirements.py agent``.

An image installs them in a layer of their own, which does not change with the project's code. Standard library only.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(project: dict[str, object], extra: str) -> Iterator[str]:
    """Yield the requirements of an extra, and of the extras that it names."""
    for text in project["optional-dependencies"][extra]:  # type: ignore[index]
        own = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", text)
        if own:
            for inner in own[1].split(","):
                yield from requirements(project, inner)
        else:
            yield text


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], sys.argv[1])))
