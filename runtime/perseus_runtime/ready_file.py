"""The file in which a program says that it serves, and where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def write_ready_file(path: str, document: Mapping[str, object]) -> None:
    """Write JSON at once: a reader that waits for the file finds it whole.

    Args:
        path: of the file; empty: none is written.
        document: what it says.

    Raises:
        OSError: it cannot be written.
    """
    if path:
        temporary = Path(path + ".new")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path)
