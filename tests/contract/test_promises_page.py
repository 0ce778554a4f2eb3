"""Every promise of docs/promises.md names a test, and every test that the page names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
PROMISES = 12


def test_every_promise_names_tests_that_exist() -> None:
    parts = re.split(r"^\*\*(\d+)\. ", PAGE, flags=re.MULTILINE)[1:]
    assert [int(number) for number in parts[::2]] == list(range(1, PROMISES + 1))
    for number, part in zip(parts[::2], parts[1::2], strict=True):
        named = re.findall(r"^\| `(tests/\S+\.py)::(test_\w+)` \|", part, re.MULTILINE)
        assert named, f"promise {number}"
        for file, test in named:
            assert re.search(rf"^(async )?def {test}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test
