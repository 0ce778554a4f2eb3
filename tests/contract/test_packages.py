"""The operator's packages can be taken in at a glance: few entries, and few floors of imports between them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from tests.offenders import ROOT, Offence, no_offenders, tree_of

OPERATOR = ROOT / "operator"
MOST_ENTRIES, MOST_FLOORS = 16, 6
"""There was a package of 38 modules on 11 floors, in which no feature could be found."""
PACKAGES = sorted(path.parent for path in OPERATOR.rglob("__init__.py"))


def entries(package: Path) -> list[Path]:
    """Modules and packages that are directly in a package, and other files."""
    left_out = {"__init__.py", "__pycache__", "py.typed"}
    return sorted(path for path in package.iterdir() if path.name not in left_out)


def imports(module: Path) -> Iterator[str]:
    """What a module imports, anywhere in it."""
    for node in ast.walk(tree_of(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def floors(package: Path) -> list[str]:
    """The longest chain of imports between the entries of a package, the lowest first."""
    prefix = ".".join((*package.relative_to(OPERATOR).parts, ""))
    siblings = {path.stem: path for path in entries(package)}
    graph: dict[str, set[str]] = {}
    for name, path in siblings.items():
        modules = path.rglob("*.py") if path.is_dir() else [path]
        named = {each.removeprefix(prefix) for module in modules for each in imports(module) if each.startswith(prefix)}
        graph[name] = {each.partition(".")[0] for each in named} & siblings.keys() - {name}
    chains: dict[str, list[str]] = {}
    for name in TopologicalSorter(graph).static_order():
        chains[name] = [*max((chains[each] for each in graph[name]), key=len, default=[]), name]
    return max(chains.values(), key=len, default=[])


def test_no_package_has_more_than_sixteen_entries() -> None:
    assert len(PACKAGES) > 25
    counted = {package: len(entries(package)) for package in PACKAGES}
    no_offenders(Offence(package, 1, f"{count} entries") for package, count in counted.items() if count > MOST_ENTRIES)


def test_no_package_has_more_than_six_floors() -> None:
    """But the operator itself, whose packages have a fixed order: the contract in pyproject.toml says it."""
    chains = {package: floors(package) for package in PACKAGES if package != OPERATOR / "perseus_operator"}
    assert max(map(len, chains.values())) > 3, "else imports are not seen"
    no_offenders(
        Offence(package, 1, f"{len(chain)} floors: {' < '.join(chain)}")
        for package, chain in chains.items()
        if len(chain) > MOST_FLOORS
    )
