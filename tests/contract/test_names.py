"""Locals and fields say what they hold: none of any room is called found, made, known, of or own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.offenders import ROOT, Offence, no_offenders, text_of

ROOMS: Final = ("core", "runtime", "proto", "client", "agent", "solver", "sim", "bench", "operator")
TELEGRAMS: Final = frozenset({"found", "made", "known", "of", "own"})


def telegrams(path: Path, source: str) -> Iterator[Offence]:
    """Variables and parameters of a module that are named by one of these words."""
    if not any(word in source for word in TELEGRAMS):
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        else:
            continue
        if name in TELEGRAMS:
            yield Offence(path, node.lineno, f"{name}: say what it holds")


def test_no_local_is_a_telegram() -> None:
    modules = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if "_pb2" not in path.name]
    assert len(modules) > 100
    no_offenders(offence for path in modules for offence in telegrams(path, text_of(path)))


def test_the_contract_finds_locals_parameters_and_loops() -> None:
    source = "def f(known):\n    found = 1\n    return [of for of in known], [own := 2], found\n\n\ndef own(): ...\n"
    assert sorted(offence.rule.split(":")[0] for offence in telegrams(ROOT / "x.py", source)) == [
        "found",
        "known",
        "of",
        "own",
    ]
