"""The pictures of the documentation show what is drawn today."""

from __future__ import annotations

import re

from tests.offenders import about_each

from documentation_pictures.subjects import FOLDER, ROOT, SUBJECTS, digest, marked_digest


@about_each(SUBJECTS)
def test_a_picture_is_as_new_as_what_it_shows(name: str) -> None:
    assert marked_digest(name) == digest(name), f"docs/images/{name}.png is stale: run `make pictures`"


def test_every_picture_is_shown_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w.-]+)\.png", page.read_text())}
    assert shown == {picture.stem for picture in FOLDER.glob("*.png")}
