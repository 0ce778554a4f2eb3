"""What each picture of the documentation shows, and the mark that a picture carries of what it was drawn from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from PIL import Image, PngImagePlugin

ROOT: Final = Path(__file__).resolve().parents[3]
FOLDER: Final = ROOT / "docs" / "images"
_BOARDS: Final = "charts/perseus/files/dashboards"
_DRAWER: Final = "deploy/pictures/documentation_pictures"
SUBJECTS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "concepts-frontier": ["solver/perseus_solver/plots.py"],
        "concepts-pipeline": ["solver/perseus_solver/plots.py"],
        "dashboard-fleet": [f"{_BOARDS}/perseus-fleet.json", _DRAWER],
        "dashboard-gpu": [f"{_BOARDS}/perseus-gpu.json", _DRAWER],
        "dashboard-job": [f"{_BOARDS}/perseus-job.json", _DRAWER],
        "dashboard-node": [f"{_BOARDS}/perseus-node.json", _DRAWER],
        "dashboard-serving": [f"{_BOARDS}/perseus-serving.json", _DRAWER],
        "page": ["operator/perseus_operator/servers/web/static"],
    }
)
"""By the picture's name: the files, or the folders of files, that decide how it looks. Pictures of measurements are not
among them: benchmarks draw those, from data that is not in the repository.
"""
_MARK: Final = "Drawn-From"


def digest(name: str) -> str:
    """Return the digest of what a picture shows, as it is now."""
    found = hashlib.sha256()
    for subject in SUBJECTS[name]:
        path = ROOT / subject
        for file in sorted(path.glob("*.*")) if path.is_dir() else [path]:
            found.update(file.name.encode() + b"\0" + file.read_bytes())
    return found.hexdigest()


def marked_digest(name: str) -> str:
    """Return the digest of what a picture of the documentation was drawn from; empty where it carries none."""
    with Image.open(FOLDER / f"{name}.png") as picture:
        return str(picture.info.get(_MARK, ""))


def publish(name: str, drawn: Path) -> None:
    """Take a picture into the documentation, as small as it can be and marked."""
    mark = PngImagePlugin.PngInfo()
    mark.add_text(_MARK, digest(name))
    with Image.open(drawn) as picture:
        picture.convert("RGB").save(FOLDER / f"{name}.png", optimize=True, pnginfo=mark)
