"""Redraws the pictures of the documentation: `make pictures`, after the tests that looked at the same view.

The operator's page, as the browser of `make observability-test` has shown it, is in out/observability; the two pictures
of the concepts page come from the command line, as that page says.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Final

from PIL import Image, PngImagePlugin

from perseus_sim.profiles import profile_csv
from perseus_solver.drawing import DESCRIPTION

ROOT: Final = Path(__file__).resolve().parents[2]
FOLDER: Final = ROOT / "docs" / "images"
SUBJECTS: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "concepts-frontier": ["solver/perseus_solver/plots.py"],
        "concepts-pipeline": ["solver/perseus_solver/plots.py"],
        "page": ["operator/perseus_operator/servers/web/static"],
    }
)
"""By the picture's name: the files, or the folders of files, that decide how it looks. Pictures of measurements are not
among them: benchmarks draw those, from data that is not in the repository.
"""
_MARK: Final = "Drawn-From"
SHOWN: Final = ROOT / "out" / "observability"
VIEWS: Final = {"page": "straggler"}
PROBLEM: Final = ("--schedule", "1F1B", "--stages", "4", "--microbatches", "8", "--blocking-power", "83.64")
"""As docs/concepts.md has it."""
PROFILE: Final = (4, "a100", 1.2)
"""Stages, GPU and imbalance of its profile."""


def digest(name: str) -> str:
    """Return the digest of what a picture shows, as it is now."""
    contents = hashlib.sha256()
    for subject in SUBJECTS[name]:
        path = ROOT / subject
        for file in sorted(path.glob("*.*")) if path.is_dir() else [path]:
            contents.update(file.name.encode() + b"\0" + file.read_bytes())
    return contents.hexdigest()


def marked_digest(name: str) -> str:
    """Return the digest of what a picture of the documentation was drawn from; empty where it carries none."""
    with Image.open(FOLDER / f"{name}.png") as picture:
        return str(picture.info.get(_MARK, ""))


def publish(name: str, drawn: Path) -> None:
    """Take a picture into the documentation: as small as it can be, with the texts that it states, and marked."""
    with Image.open(drawn) as picture:
        texts = PngImagePlugin.PngInfo()
        for key, text in picture.info.items():
            if isinstance(key, str) and isinstance(text, str):
                texts.add_text(key, text)
        texts.add_text(_MARK, digest(name))
        picture.convert("RGB").save(FOLDER / f"{name}.png", optimize=True, pnginfo=texts)


def draw_concepts(folder: Path) -> None:
    """Draw the pipeline before and after, and its frontier."""
    (folder / "profile.csv").write_text(profile_csv(*PROFILE))
    for command, flag, name in (("plan", "--gantt", "pipeline"), ("frontier", "--plot", "frontier")):
        perseus: list[str | Path] = [
            Path(sys.executable).with_name("perseus"),
            command,
            "--profile",
            "profile.csv",
            *PROBLEM,
        ]
        subprocess.run([*perseus, "--output", f"{name}.json", flag, f"{name}.png"], cwd=folder, check=True)
        publish(f"concepts-{name}", folder / f"{name}.png")


def stated(name: str) -> list[str]:
    """Return what is written in a picture of the documentation that a command has drawn."""
    with Image.open(FOLDER / f"{name}.png") as picture:
        return str(picture.info[DESCRIPTION]).splitlines()


def main() -> None:
    """Redraw all."""
    missing = [view for view in VIEWS.values() if not (SHOWN / f"{view}.png").is_file()]
    if missing:
        sys.exit(f"make pictures: the browser has not shown {', '.join(missing)}; see `make observability-test`")
    for name, view in VIEWS.items():
        publish(name, SHOWN / f"{view}.png")
    with TemporaryDirectory() as folder:
        draw_concepts(Path(folder))


if __name__ == "__main__":
    main()
