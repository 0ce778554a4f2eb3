"""The journal: what was written is read, anything else is refused and put aside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from perseus_agent.clocks.journal import MAX_EPOCHS, Journal, JournalState, _digest, decode_journal, encode_journal
from perseus_agent.errors import JournalError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "journal.json"


def reopen(path: Path, boot_id: str = "boot") -> Journal:
    journal, damage = Journal.open(path, boot_id)
    assert damage is None
    return journal


def test_locks_and_epochs_survive(path: Path) -> None:
    journal = reopen(path)
    journal.record_lock("GPU-a")
    journal.record_lock("GPU-b")
    journal.record_reset("GPU-a")
    journal.record_epoch("job", 7)
    again = reopen(path)
    assert again.locked == {"GPU-b"}
    assert again.epoch("job") == 7
    assert again.epoch("other") == 0


def test_a_lock_is_on_disk_before_the_call_returns(path: Path) -> None:
    reopen(path).record_lock("GPU-a")
    assert decode_journal(path.read_bytes()).locked == {"GPU-a"}


def test_a_process_killed_at_any_moment_leaves_a_readable_journal(path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from perseus_agent.clocks.journal import Journal\n"
        "journal, _ = Journal.open(Path(sys.argv[1]), 'boot'); print('go', flush=True)\n"
        "while True: journal.record_lock('GPU-a'); journal.record_reset('GPU-a')"
    )
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as writer:
            assert writer.stdout
            writer.stdout.readline()
            writer.kill()
        reopen(path)


def test_locks_of_another_boot_are_dropped_and_epochs_stay(path: Path) -> None:
    journal = reopen(path)
    journal.record_lock("GPU-a")
    journal.record_epoch("job", 7)
    again = reopen(path, "another boot")
    assert again.locked == frozenset()
    assert again.epoch("job") == 7


def test_the_longest_unseen_epoch_is_forgotten_first(path: Path) -> None:
    state = JournalState("boot", epochs={f"job-{i}": 1 for i in range(MAX_EPOCHS)})
    path.parent.mkdir()
    path.write_bytes(encode_journal(state))
    journal = reopen(path)
    journal.record_epoch("job-0", 2)
    journal.record_epoch("new", 1)
    assert journal.epoch("job-1") == 0
    assert journal.epoch("job-0") == 2
    assert journal.epoch("new") == 1


def tampered(change: str, value: object) -> bytes:
    document = json.loads(encode_journal(JournalState("boot", frozenset({"GPU-a"}), {"job": 3})))
    document["body"][change] = value
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b"0" * (2 << 20),
        encode_journal(JournalState("boot"))[:-20],
        tampered("locked", ["GPU-b"]),
        tampered("locked", "GPU-b"),
        tampered("epochs", {"job": -1}),
        tampered("epochs", {"job": 2.5}),
        tampered("version", 2),
        tampered("boot_id", None),
    ],
)
def test_a_damaged_journal_stays_until_every_gpu_presumed_locked_is_on_disk(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    journal, damage = Journal.open(path, "boot")
    assert damage is not None
    assert str(damage).startswith("journal: ")
    assert journal.locked == frozenset()
    assert content.startswith(path.with_suffix(".json.damaged").read_bytes())
    assert path.read_bytes() == content
    journal.presume_locked(["GPU-a", "GPU-b"])
    journal.record_epoch("job", 1)  # killed now, the next agent resets both
    assert reopen(path).locked == {"GPU-a", "GPU-b"}
    journal.record_reset("GPU-a")
    assert reopen(path).locked == {"GPU-b"}


def test_a_journal_of_a_later_release_gives_every_gpu_back_and_keeps_its_fences(path: Path) -> None:
    """An agent that is downgraded does not know which GPUs are locked, but who has been replaced."""
    body = {"version": 2, "boot_id": "boot", "locked": [], "epochs": {"job": 7}, "locked_by_clock": {"GPU-a": 900}}
    path.parent.mkdir()
    path.write_text(json.dumps({"digest": _digest(body), "body": body, "of": "a later release"}))
    journal, why = Journal.open(path, "boot")
    assert str(why) == "journal: version 2 is of another release; this one reads 1"
    assert journal.epoch("job") == 7
    journal.presume_locked(["GPU-a"])
    journal.record_epoch("other", 1)
    assert (reopen(path).locked, reopen(path).epoch("job")) == ({"GPU-a"}, 7)


def test_fields_of_a_later_release_are_left_out_of_a_journal(path: Path) -> None:
    body = {"version": 1, "boot_id": "boot", "locked": ["GPU-a"], "epochs": {"job": 7}, "new": {"GPU-a": 900}}
    path.parent.mkdir()
    path.write_text(json.dumps({"digest": _digest(body), "body": body}))
    assert (reopen(path).locked, reopen(path).epoch("job")) == ({"GPU-a"}, 7)


def test_a_journal_that_cannot_be_written_is_an_error_and_changes_nothing(path: Path) -> None:
    journal = reopen(path)
    path.with_suffix(".json.new").mkdir(parents=True)
    with pytest.raises(JournalError, match="cannot write"):
        journal.record_lock("GPU-a")
    assert journal.locked == frozenset()


def test_opening_writes_nothing_so_that_a_full_disk_stops_no_agent(path: Path) -> None:
    reopen(path).record_lock("GPU-a")
    path.with_suffix(".json.new").mkdir()
    assert reopen(path).locked == {"GPU-a"}


def test_an_older_epoch_never_replaces_a_newer_one(path: Path) -> None:
    journal = reopen(path)
    journal.record_epoch("job", 7)
    journal.record_epoch("job", 6)
    assert reopen(path).epoch("job") == 7
