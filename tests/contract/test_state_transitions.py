"""What the planner reads about a job changes only by the named methods of its classes.

Every assignment in the operator to an attribute that one of these classes declares is found in the source. Outside the
class it is an error, whatever the object is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import perseus_operator

ROOT = Path(perseus_operator.__file__).parent
STATE = {
    "planning/state.py": "JobState",
    "planning/node.py": "Node",
    "planning/node_plans.py": "NodePlans",
    "planning/input_progress.py": "InputProgress",
    "planning/calibration_progress.py": "CalibrationProgress",
    "planning/lifecycle.py": "JobEnd",
    "planning/hardware_progress.py": "HardwareProgress",
    "planning/profiling/progress.py": "ProfilingProgress",
    "planning/observation.py": "Observation",
}
OTHERS = {
    # Values of their own that happen to have a field of the same name: a budget, a node's metrics.
    "controller/energy_classes.py": {"spec", "fault"},
    "controller/power_budgets.py": {"generation", "spec", "fault", "retry_at_s"},
}


MUTATING = {"append", "add", "pop", "clear", "update", "setdefault", "remove", "discard"}


def class_named(name: str, source: str) -> ast.ClassDef:
    return next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name)


def fields() -> set[str]:
    found = set()
    for file, name in STATE.items():
        body = class_named(name, (ROOT / file).read_text(encoding="utf-8")).body
        found |= {
            node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return found


def written_attributes(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Attributes that are assigned, augmented, deleted, or changed through an index or a mutating method."""
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            targets = list(node.targets)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            targets = [node.func.value]
        while targets:
            target = targets.pop()
            if isinstance(target, ast.Tuple | ast.List):
                targets += target.elts
            elif isinstance(target, ast.Subscript):
                targets.append(target.value)
            elif isinstance(target, ast.Attribute):
                yield target


def own_name(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id == "self"


@pytest.mark.parametrize("module", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_state_itself_changes_its_fields(module: Path) -> None:
    name = str(module.relative_to(ROOT))
    watched = fields() - OTHERS.get(name, set())
    tree = ast.parse(module.read_text(encoding="utf-8"))
    foreign = [
        f"line {target.lineno}: {ast.unparse(target)}"
        for target in written_attributes(tree)
        if target.attr in watched and not own_name(target)
    ]
    assert foreign == [], "call a named method of the state instead"


@pytest.mark.parametrize(("file", "name"), STATE.items())
def test_every_transition_is_documented(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    methods = [node for node in class_named(name, source).body if isinstance(node, ast.FunctionDef)]
    for method in methods:
        changes = any(own_name(target) for target in written_attributes(method))
        if changes and not method.name.startswith("_"):
            assert ast.get_docstring(method), method.name


@pytest.mark.parametrize(("file", "name"), list(STATE.items())[:3])
def test_the_docstring_lists_every_transition(file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    listed = ast.get_docstring(ast.parse(source)) or ""
    methods = [node for node in class_named(name, source).body if isinstance(node, ast.FunctionDef)]
    transitions = [
        method.name
        for method in methods
        if not method.name.startswith("_") and not method.decorator_list and not _is_query(method)
    ]
    assert [name for name in transitions if name not in listed] == []


def _is_query(method: ast.FunctionDef) -> bool:
    return not any(own_name(target) for target in written_attributes(method)) and not any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in ast.walk(method)
    )
