"""The front doors of the rooms are documented: what goes in, what comes out, what is raised, with an example.

Ruff checks that every public name has a docstring. Here the public entry points must also name each argument, what
they return and what they raise, and the examples in the docstrings are run.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from tests.contract.test_layout import ROOMS
from tests.offenders import ROOT, Offence, about_each, check_each, no_offenders, tree_of

from perseus_core import keys

FACES = {
    "perseus_solver": None,
    "perseus_solver.certify": None,
    "perseus_solver.schedules": None,
    "perseus_solver.serving": None,
    "perseus_client": None,
    "perseus_agent.settings": ("parse_settings",),
    "perseus_sim.profiles": ("profile_csv",),
    "perseus_client.torch_pipelining": ("attach",),
    "perseus_client.megatron": ("attach",),
    "perseus_client.deepspeed": ("attach",),
    "perseus_operator.api.schema": ("parse_spec",),
    "perseus_operator.api.conditions": ("merge_conditions",),
    "perseus_operator.families.training.decide": ("decide",),
    "perseus_operator.plugin.cli": ("run",),
    "perseus_operator.plugin.job": ("load_job",),
    "perseus_operator.plugin.reports": ("frontier_document", "plan_document", "explanation"),
}
"""Module → its public entry points; None: ``__all__``, or all public functions defined there."""
EXAMPLES = (
    "perseus_agent.settings",
    "perseus_sim.profiles",
    "perseus_solver",
    "perseus_solver.serving.exploration",
    "perseus_solver.serving.fingerprint",
    "perseus_solver.serving.table",
    "perseus_client",
    "perseus_runtime.logs",
    "perseus_core.rank",
    "perseus_core.units",
    "perseus_operator.api.schema",
)


def entry_points() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, chosen in FACES.items():
        module = importlib.import_module(name)
        names = chosen or getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]
        for attribute in names:
            value = getattr(module, attribute)
            if inspect.isfunction(value) and (chosen or hasattr(module, "__all__") or value.__module__ == name):
                yield f"{name}.{attribute}", value


CASES = dict(entry_points())


def section(docstring: str, title: str) -> str:
    """The lines of a Google-style section; empty: there is none."""
    lines, found, inside = docstring.splitlines(), [], False
    for line in lines:
        if line.strip() == f"{title}:":
            inside = True
        elif inside and line and not line.startswith(" "):
            break
        elif inside:
            found.append(line)
    return "\n".join(found)


@about_each(CASES)
def test_arguments_results_and_errors_are_documented(name: str) -> None:
    function = CASES[name]
    docstring = inspect.getdoc(function) or ""
    parameters = [p for p in inspect.signature(function).parameters if not p.startswith("_")]
    arguments = section(docstring, "Args")
    assert [p for p in parameters if f"{p}:" not in arguments] == []
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if node.returns is not None and ast.unparse(node.returns) not in {"None", "NoReturn"}:
        assert section(docstring, "Returns") or docstring.startswith("Return "), "what it returns"
    # What a nested function raises, or what is raised inside a try, need not leave the function.
    inner = (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    blocks = [block for block in ast.walk(node) if isinstance(block, inner) and block is not node]
    guarded = {part for block in blocks for part in ast.walk(block)}
    if any(isinstance(part, ast.Raise) and part.exc is not None and part not in guarded for part in ast.walk(node)):
        assert section(docstring, "Raises"), "what it raises"


@about_each(CASES)
def test_the_first_line_is_a_sentence(name: str) -> None:
    first = (inspect.getdoc(CASES[name]) or "").partition("\n\n")[0]
    assert first.rstrip().endswith((".", ":"))


def strings_of_nothing(block: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Lines of strings that are statements, and neither a docstring nor directly behind an assignment."""
    for before, statement in pairwise(block.body):
        if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from strings_of_nothing(statement)
        elif isinstance(statement, ast.Expr) and isinstance(getattr(statement.value, "value", None), str):
            assigned = isinstance(before, ast.Assign | ast.AnnAssign)
            if not assigned or before.end_lineno != statement.lineno - 1:
                yield statement.lineno


def test_a_string_after_an_assignment_is_about_it() -> None:
    folders = [*(ROOT / room for room in ROOMS), ROOT / "deploy", ROOT / "tests" / "doubles"]
    modules = [path for folder in folders for path in folder.rglob("*.py") if "_pb2" not in path.name]
    assert len(modules) > 500
    no_offenders(
        Offence(module, line, "the string is about nothing: it has to stand right behind an assignment")
        for module in modules
        for line in strings_of_nothing(tree_of(module))
    )


def test_the_examples_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(keys.ENV_SOCKET, raising=False)  # as without an agent

    def check(name: str) -> None:
        outcome = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
        assert outcome.attempted > 0, "there is no example"
        assert outcome.failed == 0, "see the captured output"

    check_each(EXAMPLES, check)
