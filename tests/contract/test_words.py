"""The project speaks the field's language: the words that a newcomer had to look up stay out.

docs/glossary.md says which word means what. The lists here are the words that the glossary replaced, in identifiers of
all rooms, and in texts: docstrings, messages, documentation, chart. History (CHANGELOG.md) keeps its words.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("proto", "solver", "agent", "client", "operator", "sim")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")

IDENTIFIERS = frozenset(
    """
    calm door doors fact facts hand heed hear heard learn learner learning learnt mind plausible recall recalled
    recalling think thought told telling whoever
    """.split()  # noqa: SIM905
)
TEXT = re.compile(r"\b(told|thoughts?|thinks?|heed(s|ed)?|learnt|plausible|whoever|calm(er|est|ed)?)\b", re.IGNORECASE)

MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py") if not GENERATED.search(path.name))
PAGES = sorted(
    [
        *(path for path in (ROOT / "docs").rglob("*.md")),
        *(path for path in ROOT.glob("*.md") if path.name != "CHANGELOG.md"),
        *(path for path in (ROOT / "charts").rglob("*") if path.suffix in {".yaml", ".txt", ".md", ".tpl"}),
        *(path for path in (ROOT / "deploy").rglob("*.yaml")),
        *(ROOT / "proto").rglob("*.proto"),
        *(path for path in (ROOT / "operator").rglob("static/*") if path.suffix in {".js", ".html"}),
    ]
)


def parts(identifier: str) -> set[str]:
    """``told_slowdowns`` and ``StragglerTold`` as lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_identifiers_use_the_fields_terms(module: Path) -> None:
    source = module.read_text(encoding="utf-8")
    names = {
        token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME
    }
    assert sorted(name for name in {*names, module.stem} if parts(name) & IDENTIFIERS) == []


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Docstrings, strings and comments, with their line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("module", MODULES, ids=name_of)
def test_texts_of_the_code_use_the_usual_words(module: Path) -> None:
    found = [
        f"line {line}: {match[0]}"
        for line, text in texts(module.read_text(encoding="utf-8"))
        for match in TEXT.finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_use_the_usual_words(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = [f"line {text.count(chr(10), 0, match.start()) + 1}: {match[0]}" for match in TEXT.finditer(text)]
    assert found == []


def test_the_glossary_has_one_line_for_each_word() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| .+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [row for row in rows if row not in {"word", "---"}]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words)), "a word with two meanings"
