"""The memory that agent and keeper share: at every moment it names each GPU that may be locked."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_agent.clocks.journal import Journal, decode_journal
from perseus_agent.errors import JournalError
from perseus_agent.keeper.ledger import SLOTS, Ledger


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_what_is_owed_and_not_settled_is_named_on_the_other_side(steps: list[tuple[bool, int]]) -> None:
    ledger = Ledger.create()
    other, owed = Ledger(ledger.descriptor), set()
    for owes, gpu in steps:
        if owes:
            ledger.owe(f"GPU-{gpu}")
            owed.add(f"GPU-{gpu}")
        else:
            ledger.settle(f"GPU-{gpu}")
            owed.discard(f"GPU-{gpu}")
        assert set(other.owed()) == owed
    os.close(ledger.descriptor)


def test_a_gpu_for_which_there_is_no_room_is_not_locked(tmp_path: Path) -> None:
    ledger = Ledger.create()
    for gpu in range(SLOTS):
        ledger.owe(f"GPU-{gpu}")
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    with pytest.raises(JournalError, match="no room"):
        journal.record_lock("one more")
    assert journal.locked == frozenset()


def test_a_gpu_is_owed_before_it_is_on_disk_and_settled_although_the_disk_is_full(tmp_path: Path) -> None:
    ledger = Ledger.create()
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    (tmp_path / "journal.new").mkdir()
    with pytest.raises(JournalError):
        journal.record_lock("GPU-a")
    assert ledger.owed() == ("GPU-a",)
    (tmp_path / "journal.new").rmdir()
    journal.record_lock("GPU-a")
    (tmp_path / "journal.new").mkdir()
    with pytest.raises(JournalError):
        journal.record_reset("GPU-a")
    assert ledger.owed() == ()


def test_whatever_the_file_lists_is_owed(tmp_path: Path) -> None:
    """The agent may be killed between its two notes: then the keeper gives back what the file lists, and removes it."""
    listed_when: list[tuple[str, bool]] = []

    class Watched(Ledger):
        def owe(self, gpu_uuid: str) -> None:
            listed_when.append(("owed", listed()))
            super().owe(gpu_uuid)

        def settle(self, gpu_uuid: str) -> None:
            listed_when.append(("settled", listed()))
            super().settle(gpu_uuid)

    def listed() -> bool:
        path = tmp_path / "journal"
        return path.exists() and "GPU-a" in decode_journal(path.read_bytes()).locked

    journal, _ = Journal.open(tmp_path / "journal", "boot", Watched(Ledger.create().descriptor))
    journal.record_lock("GPU-a")
    assert listed()
    journal.record_reset("GPU-a")
    assert listed_when == [("owed", False), ("settled", False)]


def test_silence_matters_only_while_something_is_owed() -> None:
    ledger = Ledger.create()
    ledger.owe("GPU-a")
    assert not ledger.overdue  # it does not serve yet
    ledger.alive_for(-1)
    assert ledger.overdue
    ledger.alive_for(60)
    assert not ledger.overdue
    ledger.alive_for(-1)
    ledger.settle("GPU-a")
    assert not ledger.overdue
