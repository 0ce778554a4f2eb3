"""Redraws the pictures of the documentation: `make pictures`, after the tests that looked at the same views.

What the browser of `make observability-test` has shown is in out/observability; the two of the concepts page come from
the command line, as that page says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image, PngImagePlugin

from documentation_pictures.subjects import FOLDER, ROOT, publish
from perseus_sim.profiles import profile_csv
from perseus_solver.drawing import DESCRIPTION

SHOWN = ROOT / "out" / "observability"
VIEWS = {
    "dashboard-fleet": "dashboard-fleet",
    "dashboard-gpu": "dashboard-gpu",
    "dashboard-job": "dashboard-job",
    "dashboard-node": "dashboard-node",
    "dashboard-serving": "dashboard-serving",
    "page": "straggler",
}
PROBLEM = ("--schedule", "1F1B", "--stages", "4", "--microbatches", "8", "--blocking-power", "83.64")
"""As docs/concepts.md has it."""
PROFILE = (4, "a100", 1.2)
"""Stages, GPU and imbalance of its profile."""


def draw_concepts(folder: Path) -> None:
    """Draw the pipeline before and after, and its frontier."""
    (folder / "profile.csv").write_text(profile_csv(*PROFILE))
    for command, flag, name in (("plan", "--gantt", "pipeline"), ("frontier", "--plot", "frontier")):
        perseus = [Path(sys.executable).with_name("perseus"), command, "--profile", "profile.csv", *PROBLEM]
        subprocess.run([*perseus, "--output", f"{name}.json", flag, f"{name}.png"], cwd=folder, check=True)
        publish(f"concepts-{name}", folder / f"{name}.png")
        _keep_what_is_stated(f"concepts-{name}", folder / f"{name}.png")


def stated(name: str) -> list[str]:
    """Return what is written in a picture of the documentation that a command has drawn."""
    with Image.open(FOLDER / f"{name}.png") as picture:
        return str(picture.info[DESCRIPTION]).splitlines()


def _keep_what_is_stated(name: str, drawn: Path) -> None:
    """Let a published picture carry what the drawn one states, beside its mark."""
    texts = PngImagePlugin.PngInfo()
    with Image.open(drawn) as picture:
        texts.add_text(DESCRIPTION, picture.info[DESCRIPTION])
    with Image.open(FOLDER / f"{name}.png") as picture:
        for key, text in picture.info.items():
            if isinstance(text, str):
                texts.add_text(key, text)
        picture.save(FOLDER / f"{name}.png", optimize=True, pnginfo=texts)


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
