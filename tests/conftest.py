"""What every test may use: the folder of real measurements, or a skip that says it is absent."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sosp24() -> Path:
    """Folder with the public measurements of the SOSP'24 artifact; PERSEUS_DATA names another place."""
    folder = Path(os.environ.get("PERSEUS_DATA", REPOSITORY.parent / "shared" / "data")) / "sosp24"
    if not folder.is_dir():
        pytest.skip(f"no measurements at {folder}: set PERSEUS_DATA to the folder that holds sosp24/")
    return folder
