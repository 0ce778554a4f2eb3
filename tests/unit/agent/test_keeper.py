"""The memory that agent and keeper share: at every moment it names each GPU that may be locked."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.recording_gpu import RecordingGpu
from tests.doubles.recording_node import wait_for

from perseus_agent.clocks.governor import Governor, GovernorLimits
from perseus_agent.clocks.journal import Journal, decode_journal
from perseus_agent.errors import JournalError
from perseus_agent.keeper.keeper import keep
from perseus_agent.keeper.ledger import SLOTS, UNWATCHED_S, Ledger
from perseus_agent.keeper.link import KeeperLink, open_socket
from perseus_agent.settings import Settings


def watched_ledger() -> Ledger:
    ledger = Ledger.create()
    ledger.watched_for(60)
    return ledger


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5))))
def test_what_is_owed_and_not_settled_is_named_on_the_other_side(steps: list[tuple[bool, int]]) -> None:
    ledger = watched_ledger()
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
    ledger = watched_ledger()
    for gpu in range(SLOTS):
        ledger.owe(f"GPU-{gpu}")
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    with pytest.raises(JournalError, match="no room"):
        journal.record_lock("one more")
    assert journal.locked == frozenset()


def test_a_gpu_is_owed_before_it_is_on_disk_and_settled_although_the_disk_is_full(tmp_path: Path) -> None:
    ledger = watched_ledger()
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

    journal, _ = Journal.open(tmp_path / "journal", "boot", Watched(watched_ledger().descriptor))
    journal.record_lock("GPU-a")
    assert listed()
    journal.record_reset("GPU-a")
    assert listed_when == [("owed", False), ("settled", False)]


def test_silence_matters_only_while_something_is_owed() -> None:
    ledger = watched_ledger()
    ledger.owe("GPU-a")
    assert not ledger.overdue  # it does not serve yet
    ledger.alive_for(-1)
    assert ledger.overdue
    ledger.alive_for(60)
    assert not ledger.overdue
    ledger.alive_for(-1)
    ledger.settle("GPU-a")
    assert not ledger.overdue


def test_without_a_keeper_no_further_gpu_is_locked(tmp_path: Path) -> None:
    ledger = Ledger.create()
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    for watched_s, locked in ((0.0, False), (60.0, True), (0.0, False)):
        ledger.watched_for(watched_s)
        if locked:
            journal.record_lock("GPU-a")
        else:
            with pytest.raises(JournalError, match="no clock keeper"):
                journal.record_lock("GPU-b")
    assert ledger.owed() == ("GPU-a",), "what is locked stays owed"


@pytest.mark.parametrize("ago_s", [0.0, UNWATCHED_S - 1, UNWATCHED_S + 1])
def test_a_watch_expires_after_a_while_and_can_be_taken_up_again(ago_s: float) -> None:
    ledger = Ledger.create()
    ledger.watched_for(-ago_s)
    assert not ledger.watched
    assert ledger.watch_expired == (ago_s > UNWATCHED_S)
    ledger.watched_for(60)
    assert ledger.watched
    assert not ledger.watch_expired


def test_a_gpu_without_a_keeper_goes_back_to_default_clocks_and_may_be_driven_again_with_one(tmp_path: Path) -> None:
    ledger, gpu = watched_ledger(), RecordingGpu("GPU-a")
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    governor = Governor(gpu, journal, GovernorLimits(min_switch_interval_s=0.0), lambda notice: None)
    governor.engage()
    governor.want(900)
    ledger.watched_for(0.0)
    assert governor.check_keeper() is None
    governor.want(705)
    assert gpu.locked_mhz == 705, "for a while the agent goes on"
    ledger.watched_for(-UNWATCHED_S - 1)
    governor.check_keeper()
    assert gpu.locked_mhz is None
    governor.want(900)
    governor.engage()  # another rank
    governor.want(900)
    assert gpu.locked_mhz is None
    assert "no clock keeper" in governor.controllability_message
    ledger.watched_for(60)
    governor.check_keeper()
    governor.want(900)
    assert gpu.locked_mhz == 900


def test_a_reset_needs_no_keeper(tmp_path: Path) -> None:
    ledger, gpu = Ledger.create(), RecordingGpu("GPU-a", locked_mhz=900)
    ledger.watched_for(-UNWATCHED_S - 1)
    journal, _ = Journal.open(tmp_path / "journal", "boot", ledger)
    governor = Governor(gpu, journal, GovernorLimits(), lambda notice: None)
    governor.engage()
    governor.adopt()
    governor.release("an earlier agent had locked it")
    assert gpu.locked_mhz is None


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[str]:
    """The socket of a keeper without GPUs, in a thread, which watches this process once it has sent a ledger."""
    (tmp_path / "gpus").write_text("")
    path, stop = str(tmp_path / "keeper.sock"), threading.Event()
    devices = f"tests.doubles.recording_gpu:open_devices:{tmp_path}"
    settings = Settings(insecure=True, keeper_socket=path, journal=str(tmp_path / "journal"), devices=devices)
    threading.Thread(target=keep, args=(settings, stop), daemon=True).start()
    wait_for(lambda: Path(path).exists(), "it listens")
    yield path
    stop.set()


def connect(path: str) -> socket.socket:
    connection = open_socket()
    connection.connect(path)
    connection.settimeout(60)
    return connection


def test_a_stranger_on_the_keepers_socket_is_refused_and_changes_nothing(
    keeper: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    short = os.memfd_create("short")
    for descriptors in ([], [short], [short, short]):
        with connect(keeper) as stranger:
            socket.send_fds(stranger, [b"x"], descriptors)
            assert stranger.recv(1) == b"", "it hangs up"
    with connect(keeper) as silent:
        assert silent.recv(1) == b"", "it does not wait for long"
    with monkeypatch.context() as another_user:
        another_user.setattr(os, "geteuid", lambda: 12345)
        with connect(keeper) as stranger:
            assert stranger.recv(1) == b""
    assert "runs as user" in caplog.text
    ledger = Ledger.create()
    KeeperLink(keeper, ledger, os.open(os.devnull, os.O_RDONLY)).start()
    ledger.alive_for(60)
    wait_for(lambda: ledger.watched, "an agent is served after all of them")
