"""Run again the few tests of a suite that have failed.

On a shared machine one test of thousands may fail for a reason outside it, and a run of an hour is lost. It gets one
more try, and nothing hides it: it is named in the summary, and its suite counts as affected next time. Standard library
only: there is no virtual environment yet.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Final

MOST: Final = 3
"""More tests than these do not fail by chance."""


class FailedTests:
    """What pytest remembers of one suite: the tests that failed, in a folder of the suite's own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        shutil.rmtree(folder, ignore_errors=True)

    @property
    def names(self) -> list[str]:
        """The tests that failed when the suite last ran; empty if it failed for another reason."""
        return sorted(self._read("lastfailed"))

    @property
    def environment(self) -> Mapping[str, str]:
        """In which a first try leaves its memory here."""
        options = f"{os.environ.get('PYTEST_ADDOPTS', '')} -o cache_dir={self._folder}"
        return {**os.environ, "PYTEST_ADDOPTS": options}

    def again(self) -> Mapping[str, str]:
        """Return the environment in which the suite's command runs just these.

        Tests of one file may be chapters of a story: where pytest knows the file's others, they run again, too. (It
        does not where tests run on several workers; there each stands alone.)
        """
        names = self.names
        files = {name.partition("::")[0] for name in names}
        others = [name for name in self._read("nodeids") if name.partition("::")[0] in files]
        self._path("lastfailed").write_text(json.dumps(dict.fromkeys([*names, *others], True)), encoding="utf-8")
        first = dict(self.environment)
        return {**first, "PYTEST_ADDOPTS": f"{first['PYTEST_ADDOPTS']} --last-failed --last-failed-no-failures=none"}

    def _path(self, name: str) -> Path:
        return self._folder / "v" / "cache" / name

    def _read(self, name: str) -> list[str]:
        """Names of tests: the elements of a list, or the keys of an object."""
        try:
            return list(json.loads(self._path(name).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError):
            return []
