"""What must survive a kill -9: which GPUs this agent has locked, and the highest epoch seen of each job.

A GPU is written here, on disk, before its first lock and removed after its reset; at start every GPU that is still
listed is reset. The file is replaced whole and carries its own digest, so it is either a state that existed or it is
refused. A damaged one no longer says which GPUs are locked, so every GPU that the agent may drive is presumed to be
until it has been reset. Opening writes nothing: on a full disk the resets come first, and only new locks are refused.
After a reboot the driver has forgotten all locks, so entries of another boot are dropped. Any thread may call it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

from perseus_agent.errors import JournalError, SettingsError

MAX_BYTES: Final = 1 << 20
MAX_EPOCHS: Final = 1_024
"""Jobs whose epoch is remembered; of those that hold no lease the longest unseen is forgotten first. A node runs a
handful of jobs at a time, and holds leases of far fewer than these."""
_VERSION: Final = 1


@dataclass(frozen=True)
class JournalState:
    """One state of the journal."""

    boot_id: str = ""
    locked: frozenset[str] = frozenset()
    """UUIDs of the GPUs that this agent may have locked."""
    epochs: dict[str, int] = field(default_factory=dict)
    """Job UID to the highest epoch seen, longest unseen first."""


def encode_journal(state: JournalState) -> bytes:
    """The file's content."""
    body = {"version": _VERSION, "boot_id": state.boot_id, "locked": sorted(state.locked), "epochs": state.epochs}
    return json.dumps({"digest": _digest(body), "body": body}, indent=1).encode() + b"\n"


def decode_journal(data: bytes) -> JournalState:
    """The state in the file.

    Raises:
        JournalError: it is not one that ``encode_journal`` wrote.
    """
    try:
        document = json.loads(data)
        body = document["body"]
        if document["digest"] != _digest(body):
            raise JournalError("journal: its digest is not that of its content")
        if body["version"] != _VERSION:
            raise JournalError(f"journal: version {body['version']!r} is of another release; this one reads {_VERSION}")
        return JournalState(body["boot_id"], frozenset(body["locked"]), dict(body["epochs"]))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise JournalError(f"journal: not a journal of this agent: {error}") from None


def _epochs_of(data: bytes) -> dict[str, int]:
    """The epochs in a whole journal of another release: an epoch means the same in each. None, if it is damaged."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, JournalError):
        document = json.loads(data)
        if document["digest"] == _digest(document["body"]):
            return dict(document["body"]["epochs"])
    return {}


class OwedGpus(Protocol):
    """What learns of a GPU before its first lock and after its reset, apart from the disk: the keeper's ledger."""

    @property
    def watched(self) -> bool: ...

    @property
    def watch_expired(self) -> bool: ...

    def owe(self, gpu_uuid: str) -> None: ...

    def settle(self, gpu_uuid: str) -> None: ...


class Journal:
    """The file, with the state in memory. Every change is on disk when the method returns."""

    def __init__(self, path: Path, boot_id: str, owed: OwedGpus | None = None) -> None:
        """Use ``open``."""
        self._path = path
        self._lock = threading.Lock()
        self._state = JournalState(boot_id)
        self._owed = owed
        self._held: Callable[[str], bool] = lambda _: False

    @classmethod
    def open(cls, path: Path, boot_id: str, owed: OwedGpus | None = None) -> tuple[Journal, JournalError | None]:
        """Read the journal, or begin a new one. The error says why what it held is not known; then call
        ``presume_locked``. Nothing is written, and a damaged file stays until the next change replaces it.
        """
        journal = cls(path, boot_id, owed)
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
            if len(data) > MAX_BYTES:
                raise JournalError(f"journal: longer than {MAX_BYTES} bytes")
            state = decode_journal(data)
        except FileNotFoundError:
            return journal, None
        except OSError as error:
            return journal, JournalError(f"--journal: cannot read {path}: {error}")
        except JournalError as error:
            with contextlib.suppress(OSError):  # a copy for people, where there is room for one
                path.with_suffix(path.suffix + ".damaged").write_bytes(data)
            journal._state = replace(journal._state, epochs=_epochs_of(data))
            return journal, error
        same_boot = state.boot_id == boot_id
        journal._state = replace(state, boot_id=boot_id, locked=state.locked if same_boot else frozenset())
        return journal, None

    def presume_locked(self, gpu_uuids: Iterable[str]) -> None:
        """Take these GPUs as locked, since the file no longer says which are; each until its reset is recorded."""
        with self._lock:
            self._state = replace(self._state, locked=self._state.locked | set(gpu_uuids))

    @property
    def locked(self) -> frozenset[str]:
        """GPUs that this agent may have locked."""
        return self._state.locked

    @property
    def watched(self) -> bool:
        """Whether a keeper watches, which gives back what this agent leaves locked, or none is wanted."""
        return self._owed is None or self._owed.watched

    @property
    def watch_expired(self) -> bool:
        """Whether a keeper is wanted and none has watched for so long that every GPU must be given back."""
        return self._owed is not None and self._owed.watch_expired

    def keep_epochs(self, held: Callable[[str], bool]) -> None:
        """Never forget the epoch of a job of which this is true: it holds a lease, and an operator that was replaced
        must not get it back by way of many other jobs."""
        self._held = held

    def epoch(self, job_uid: str) -> int:
        """The highest epoch seen for a job; 0 if none was."""
        return self._state.epochs.get(job_uid, 0)

    def record_lock(self, gpu_uuid: str) -> None:
        """Record a GPU; call this before its first lock.

        Raises:
            JournalError: it is not on disk; the GPU must not be locked.
        """
        if self._owed is not None:
            try:
                self._owed.owe(gpu_uuid)
            except ValueError as error:
                raise JournalError(str(error)) from error
        with self._lock:
            if gpu_uuid not in self._state.locked:
                self._write(replace(self._state, locked=self._state.locked | {gpu_uuid}))

    def record_reset(self, gpu_uuid: str) -> None:
        """Remove a GPU; call this after its reset. If it fails, the GPU is reset once more at the next start:
        harmless."""
        try:
            with self._lock:
                if gpu_uuid in self._state.locked:
                    self._write(replace(self._state, locked=self._state.locked - {gpu_uuid}))
        finally:  # after the file: whatever it lists when this process is killed, the keeper gives back and removes
            if self._owed is not None:
                self._owed.settle(gpu_uuid)

    def record_epoch(self, job_uid: str, epoch: int) -> None:
        """Record an epoch unless a higher one is known; call this before it is accepted, and under no other lock: a
        slow disk takes seconds.

        Raises:
            JournalError: it is not on disk; the epoch must not be accepted.
        """
        with self._lock:
            epochs = dict(self._state.epochs)
            if epochs.pop(job_uid, 0) >= epoch:
                return
            epochs[job_uid] = epoch
            excess = max(len(epochs) - MAX_EPOCHS, 0)
            for forgotten in [uid for uid in epochs if not self._held(uid)][:excess]:
                del epochs[forgotten]
            self._write(replace(self._state, epochs=epochs))

    def _write(self, state: JournalState) -> None:
        temporary = self._path.with_suffix(self._path.suffix + ".new")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(encode_journal(state))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self._path)
            directory = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise JournalError(f"--journal: cannot write {self._path}: {error}") from error
        self._state = state


class JournalLock:
    """One program per node writes clocks: a lock beside the journal, which the kernel releases when its holder dies."""

    def __init__(self, journal: Path) -> None:
        """Of this journal; it is not taken yet."""
        self.path = journal.with_suffix(journal.suffix + ".lock")
        self.descriptor: int | None = None
        """A process that inherits it holds the lock as well."""

    def take(self) -> bool:
        """Take the lock if nobody holds it. Returns whether this process holds it now.

        Raises:
            SettingsError: its file cannot be made.
        """
        if self.descriptor is not None:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SettingsError(f"--journal: cannot make {self.path}: {error}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        self.descriptor = descriptor
        return True

    def release(self) -> None:
        """Release it; no error if it is not held."""
        descriptor, self.descriptor = self.descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def boot_id(proc_root: Path = Path("/proc")) -> str:
    """The identity of this boot of the node; empty where /proc does not have it."""
    try:
        return (proc_root / "sys" / "kernel" / "random" / "boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _digest(body: Any) -> str:
    if not (
        isinstance(body, dict)
        and isinstance(body.get("boot_id"), str)
        and isinstance(body.get("locked"), list)
        and all(isinstance(uuid, str) for uuid in body["locked"])
        and isinstance(body.get("epochs"), dict)
        and all(type(epoch) is int and epoch >= 0 for epoch in body["epochs"].values())
    ):
        raise JournalError("journal: a field is missing or of another type")
    return hashlib.sha256(json.dumps(body, separators=(",", ":"), sort_keys=True).encode()).hexdigest()
