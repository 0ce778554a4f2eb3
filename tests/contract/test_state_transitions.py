"""What the planner reads about a job changes only by the named methods of its classes.

Every assignment in the operator to an attribute that one of these classes declares is found in the source. Outside the
class it is an error, whatever the object is called.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.offenders import Offence, about_each, no_offenders, tree_of

import perseus_operator

ROOT = Path(perseus_operator.__file__).parent
STATE = {
    "families/training/training.py": "Training",
    "nodes/node.py": "Node",
    "nodes/plans.py": "NodePlans",
    "jobs/job.py": "Job",
    "families/training/features/frontier/solve_progress.py": "SolveProgress",
    "families/training/features/stragglers/progress.py": "StragglerProgress",
    "families/training/features/frontier/input_progress.py": "InputProgress",
    "families/training/features/frontier/calibration_progress.py": "CalibrationProgress",
    "jobs/lifecycle.py": "JobEnd",
    "families/training/features/hardware/progress.py": "HardwareProgress",
    "families/training/features/profile/progress.py": "ProfilingProgress",
    "families/training/features/profile/observation.py": "Observation",
}
MUTATING = {"append", "add", "pop", "clear", "update", "setdefault", "remove", "discard"}


def state_class(file: str) -> ast.ClassDef:
    """The class of a file of ``STATE``."""
    body = tree_of(ROOT / file).body
    return next(node for node in body if isinstance(node, ast.ClassDef) and node.name == STATE[file])


def fields() -> set[str]:
    found = set()
    for file in STATE:
        body = state_class(file).body
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


def test_only_the_state_itself_changes_its_fields() -> None:
    declared, modules = fields(), sorted(ROOT.rglob("*.py"))
    assert len(declared) > 50
    assert len(modules) > 150
    no_offenders(
        Offence(module, target.lineno, f"{ast.unparse(target)}: call a named method of the state instead")
        for module in modules
        for target in written_attributes(tree_of(module))
        if target.attr in declared and not own_name(target)
    )


def methods_of(file: str) -> list[ast.FunctionDef]:
    return [node for node in state_class(file).body if isinstance(node, ast.FunctionDef)]


def test_every_transition_is_documented() -> None:
    no_offenders(
        Offence(ROOT / file, method.lineno, f"{method.name} changes the state: say when it is called")
        for file in STATE
        for method in methods_of(file)
        if not method.name.startswith("_")
        and any(own_name(target) for target in written_attributes(method))
        and not ast.get_docstring(method)
    )


@about_each(list(STATE)[:3])
def test_the_docstring_lists_every_transition(file: str) -> None:
    listed = ast.get_docstring(tree_of(ROOT / file)) or ""
    transitions = [
        method.name
        for method in methods_of(file)
        if not method.name.startswith("_") and not method.decorator_list and not _is_query(method)
    ]
    assert [name for name in transitions if name not in listed] == []


def _is_query(method: ast.FunctionDef) -> bool:
    return not any(own_name(target) for target in written_attributes(method)) and not any(
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) for node in ast.walk(method)
    )
