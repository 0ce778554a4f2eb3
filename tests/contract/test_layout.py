"""The layout of the repository: folders and packages, and what may be imported where."""

from __future__ import annotations

import operator
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {"proto": "perseus_proto", "solver": "perseus_solver", "agent": "perseus_agent", "client": "perseus_client",
         "operator": "perseus_operator", "sim": "perseus_sim"}  # fmt: skip


@pytest.mark.parametrize("folder", [*ROOMS, "tests"])
def test_top_folders_are_not_packages(folder: str) -> None:
    # operator/__init__.py would shadow the standard library's operator and break the interpreter itself.
    assert not list((ROOT / folder).glob("__init__.py"))
    if folder == "tests":
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_operator_is_the_standard_library_module_in_the_root_folder() -> None:
    found = subprocess.run(
        [sys.executable, "-c", "import operator; print(operator.__file__)"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(found.stdout.strip()) == Path(operator.__file__)


@pytest.mark.parametrize("package", ROOMS.values())
def test_every_room_is_typed_and_every_module_has_a_docstring(package: str) -> None:
    folder = next(ROOT.glob(f"*/{package}"))
    assert (folder / "py.typed").exists()
    for module in folder.rglob("*.py"):
        if not module.name.endswith(("_pb2.py", "_pb2_grpc.py")):
            first = module.read_text(encoding="utf-8").lstrip()
            assert first.startswith(('"""', 'r"""', "#!")), f"{module.relative_to(ROOT)} has no docstring"


def test_client_needs_the_standard_library_only() -> None:
    # Training code imports it: it must add nothing to a training image, and no heavy import.
    script = (
        "import sys; before = set(sys.modules); import perseus_client; "
        "print('\\n'.join(sorted(m.split('.')[0] for m in set(sys.modules) - before)))"
    )
    loaded = set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )
    assert loaded - {"perseus_client", "perseus_proto"} <= set(sys.stdlib_module_names)
    assert "perseus_client" in loaded


def test_no_registry_host_and_no_index_in_the_lock() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert "://" not in lock
    assert "--" not in lock
    assert all("==" in line for line in lock.splitlines())
