"""The layout of the repository: folders and packages, and what may be imported where."""

from __future__ import annotations

import ast
import operator
import subprocess
import sys
from pathlib import Path

import pytest
from tests.offenders import ROOT, Offence, no_offenders, text_of, tree_of

ROOMS = {
    room: f"perseus_{room}"
    for room in ("core", "runtime", "proto", "solver", "agent", "bench", "client", "operator", "sim")
}
MOST_LINES, MOST_TEST_LINES = 400, 500


def test_top_folders_are_not_packages() -> None:
    # operator/__init__.py would shadow the standard library's operator and break the interpreter itself.
    made = [ROOT / folder / "__init__.py" for folder in ROOMS]
    no_offenders(
        Offence(path, 1, "the folder must not be a package")
        for path in [*made, *(ROOT / "tests").rglob("__init__.py")]
        if path.exists()
    )


def test_operator_is_the_standard_library_module_in_the_root_folder() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == Path(operator.__file__)


def test_every_room_is_typed_and_every_module_has_a_docstring() -> None:
    folders = [ROOT / room / package for room, package in ROOMS.items()]
    untyped = [Offence(folder, 1, "no py.typed") for folder in folders if not (folder / "py.typed").exists()]
    modules = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(modules) > 400
    undocumented = (
        Offence(module, 1, "no docstring")
        for module in modules
        if not module.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        and not text_of(module).lstrip().startswith(('"""', 'r"""', "#!"))
    )
    no_offenders([*untyped, *undocumented])


def test_no_module_is_too_long_to_be_read_in_one_go() -> None:
    paths = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = {ROOT / path: len(text_of(ROOT / path).splitlines()) for path in paths.split() if (ROOT / path).exists()}
    assert len(lines) > 1_000
    no_offenders(
        Offence(path, count, f"{count} lines: split it by subject at {most}")
        for path, count in lines.items()
        if count > (most := MOST_TEST_LINES if path.is_relative_to(ROOT / "tests") else MOST_LINES)
        and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
    )


def test_every_room_opens_with_a_page_that_says_where_to_begin() -> None:
    for room, package in ROOMS.items():
        page = ast.get_docstring(tree_of(ROOT / room / package / "__init__.py")) or ""
        assert 8 <= len(page.splitlines()) <= 40, f"{package}: one screen"
        assert "Begin with" in page, package


def test_client_needs_the_standard_library_only() -> None:
    # Training code imports it: it must add nothing to a training image, and no heavy import.
    script = (
        "import sys; before = set(sys.modules); import perseus_client; "
        "print('\\n'.join(sorted(m.split('.')[0] for m in set(sys.modules) - before)))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )
    assert loaded - {"perseus_client", "perseus_core", "perseus_proto"} <= set(sys.stdlib_module_names)
    assert "perseus_client" in loaded


@pytest.mark.parametrize("which", ["", "-docs", "-frameworks", "-vllm"])
def test_a_lock_pins_versions_names_no_index_and_says_why_it_has_no_hashes(which: str) -> None:
    lines = (ROOT / f"requirements{which}.lock").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all("==" in pin and "://" not in pin and "--" not in pin for pin in pins)
    assert lines[0].startswith("# Versions without hashes")
