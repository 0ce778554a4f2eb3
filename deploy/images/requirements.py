"""Prints what an extra of the project requires, one line each, so that a layer can hold it without the project.

Called while an image is built: ``python3 requirements.py agent``. Standard library only.
"""

# ruff: noqa: T201  # its output is its product

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(project: dict[str, object], extra: str) -> Iterator[str]:
    """Those of the extra, and of the extras that it names."""
    for text in project["optional-dependencies"][extra]:  # type: ignore[index]
        own = re.fullmatch(rf"{project['name']}\[([\w,]+)\]", text)
        if own:
            for inner in own[1].split(","):
                yield from requirements(project, inner)
        else:
            yield text


if __name__ == "__main__":
    print("\n".join(requirements(tomllib.loads(Path("pyproject.toml").read_text())["project"], sys.argv[1])))
