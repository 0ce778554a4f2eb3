"""The project speaks the field's language: the words that a newcomer had to look up stay out.

docs/glossary.md says which word means what. The lists here are the words that the glossary replaced, in identifiers of
all rooms, and in texts: docstrings, messages, documentation, chart. History (CHANGELOG.md) keeps its words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.offenders import ROOT, Offence, no_offenders, text_of, tree_of

ROOMS = ("core", "runtime", "proto", "solver", "agent", "bench", "client", "operator", "sim")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")

IDENTIFIERS = frozenset(
    """
    calm door doors hand heed hear heard learn learner learning learnt mind plausible recall recalled
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


@cache
def parts(identifier: str) -> set[str]:
    """``told_slowdowns`` and ``StragglerTold`` as lower-case words."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", identifier)}


def offences_of_code(module: Path) -> Iterator[Offence]:
    """Identifiers, docstrings, strings and comments of a module."""
    source, names, strings = text_of(module), {module.stem: 1}, []
    nodes: list[ast.AST] = [tree_of(module)]
    while nodes:  # ast.walk, and what is no node, in one pass
        node = nodes.pop()
        for field in node._fields:
            value = getattr(node, field, None)
            for item in value if isinstance(value, list) else (value,):
                if isinstance(item, ast.AST):
                    nodes.append(item)
                elif isinstance(item, str) and isinstance(node, ast.Constant):
                    strings.append((node.lineno, item))
                elif isinstance(item, str):  # whatever is a word anywhere else is an identifier
                    names[item] = min(getattr(node, "lineno", 1), names.get(item, sys.maxsize))
    for name, line in names.items():
        if parts(name) & IDENTIFIERS:
            yield Offence(module, line, f"identifier {name}: not a word of the field")
    yield from offences_of_texts(module, strings)
    if TEXT.search(source):  # to read a module by its tokens takes long
        tokens = tokenize.generate_tokens(io.StringIO(source).readline)
        comments = [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]
        yield from offences_of_texts(module, comments)


def offences_of_texts(path: Path, texts: Iterable[tuple[int, str]]) -> Iterator[Offence]:
    """Words of texts, each with the line at which it begins."""
    for first, text in texts:
        for match in TEXT.finditer(text):
            line = first + text.count("\n", 0, match.start())
            yield Offence(path, line, f"text {match[0]!r}: not the usual word")


def test_the_code_uses_the_fields_terms_and_the_usual_words() -> None:
    assert len(MODULES) > 400
    no_offenders(offence for module in MODULES for offence in offences_of_code(module))


def test_pages_use_the_usual_words() -> None:
    assert len(PAGES) > 100
    no_offenders(offence for page in PAGES for offence in offences_of_texts(page, [(1, text_of(page))]))


def test_the_glossary_has_one_line_for_each_word() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| .+ \|$", (ROOT / "docs/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    words = [row for row in rows if row not in {"word", "---"}]
    assert len(words) > 40
    assert sorted(words) == sorted(set(words)), "a word with two meanings"
