"""Redraws the pictures of the documentation: `make pictures`, after the tests that looked at the same views.

What the browser of `make observability-test` has shown is in out/observability; the two of the concepts page come from
the command line, as that page says.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from documentation_pictures.subjects import ROOT, publish
from perseus_sim.profiles import profile_csv

SHOWN = ROOT / "out" / "observability"
VIEWS = {
    "dashboard-fleet": "dashboard-fleet",
    "dashboard-gpu": "dashboard-gpu",
    "dashboard-job": "dashboard-job",
    "dashboard-node": "dashboard-node",
    "page": "straggler",
}
PROBLEM = ("--schedule", "1F1B", "--stages", "4", "--microbatches", "8", "--blocking-power", "83.64")
"""As docs/concepts.md has it."""


def draw_concepts(folder: Path) -> None:
    """Draw the pipeline before and after, and its frontier."""
    (folder / "profile.csv").write_text(profile_csv(4, imbalance=1.2))
    for command, flag, name in (("plan", "--gantt", "pipeline"), ("frontier", "--plot", "frontier")):
        perseus = [Path(sys.executable).with_name("perseus"), command, "--profile", "profile.csv", *PROBLEM]
        subprocess.run([*perseus, "--output", f"{name}.json", flag, f"{name}.png"], cwd=folder, check=True)
        publish(f"concepts-{name}", folder / f"{name}.png")


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
