"""How a contract is asserted about many files, fields or images: one test that lists everything that breaks the rule.

no_offenders(Offence(path, line, "told: not a word of the glossary") for …)      rules that look for what is wrong
check_each(FIELDS, check_field, name_of)                                         rules that are plain assertions
"""

from __future__ import annotations

import ast
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).resolve().parents[1]
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Offence:
    """A place that breaks a rule."""

    path: Path
    line: int
    rule: str

    def __str__(self) -> str:
        return f"{name_of(self.path)}:{self.line}: {self.rule}"


def name_of(path: Path) -> str:
    """A path as people write it: from the root of the repository."""
    return str(path.relative_to(ROOT))


@cache
def text_of(path: Path) -> str:
    """A file, read once."""
    return path.read_text(encoding="utf-8")


@lru_cache(maxsize=32)
def tree_of(path: Path) -> ast.Module:
    """A module, parsed once as long as a test looks at it; the trees of all would need 100 MB."""
    return ast.parse(text_of(path))


def no_offenders(offences: Iterable[object]) -> None:
    """Fail with all of them, if there are any."""
    lines = [str(offence) for offence in offences]
    if lines:
        pytest.fail("\n".join([f"{len(lines)} break the rule:", *lines]), pytrace=False)


def check_each(cases: Iterable[T], check: Callable[[T], None], name: Callable[[T], str] = str) -> None:
    """Run a check's assertions about each case, and fail with every case that breaks one.

    Args:
        cases: at least one.
        check: asserts; the first assertion about a case that fails is listed, with its line.
        name: of a case, for the list.
    """
    found, count = [], 0
    for case in cases:
        count += 1
        try:
            check(case)
        except AssertionError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            said = str(error).partition("\n")[0]
            found.append(f"{name(case)}: {said or at.line}  [{Path(at.filename).name}:{at.lineno}: {at.line}]")
    assert count, "nothing was checked"
    no_offenders(found)


def about_each(
    cases: Iterable[T], name: Callable[[T], str] = str
) -> Callable[[Callable[[T], None]], Callable[[], None]]:
    """Make one test of assertions about each case, as ``check_each`` does: in place of a parametrised test."""

    def decorate(check: Callable[[T], None]) -> Callable[[], None]:
        def test() -> None:
            check_each(cases, check, name)

        test.__name__, test.__doc__, test.__module__ = check.__name__, check.__doc__, check.__module__
        return test  # not functools.wraps: pytest would ask for a fixture of the check's argument

    return decorate
