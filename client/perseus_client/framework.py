"""What the adapters of training frameworks share: attaching and detaching, version checks, rank ids, exported
schedules.

Nothing here imports a framework, and nothing raises into training: whatever is not as expected becomes one line in the
log, and training goes on without energy plans.

An adapter exports one row of ``Cell`` for each stage. The CSV that the solver reads (``csv_of``) and the schedule that
this rank sends to the agent (``schedule_of``) come from the same rows, so a schedule is never declared twice.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import perseus_client
from perseus_client.session import Session
from perseus_core.keys import ENV_SOCKET
from perseus_core.rank import RankId

log = logging.getLogger("perseus_client")

KINDS: Final = {"F": "forward", "B": "backward", "I": "input_gradient", "W": "weight_gradient"}
"""Letters of ``torch.distributed.pipelining``'s CSV, which all adapters write."""


class Unsupported(Exception):
    """What this process runs cannot be followed; the message says what and why."""


class Cell(NamedTuple):
    """One instruction in an exported schedule."""

    virtual_stage: int
    """Position of the chunk in the model's chain of layers."""
    letter: str
    microbatch: int
    joined: bool = False
    """It runs in one action with the next one, as an overlapped forward and backward do: both results are sent at the
    end."""


Schedule = list[tuple[str | int, int, int]]
STEP: Final = ("step", 0, 0)
"""The instruction of an iteration that is marked as a whole."""


class RankWork(NamedTuple):
    """What a rank executes in an iteration."""

    rank: RankId
    schedule: Schedule
    joined: Sequence[int] = ()
    """Places in the schedule of instructions that run in one action with the next."""


def csv_of(rows: Iterable[Sequence[Cell]]) -> str:
    """The schedule of all stages as CSV, as torch writes it but computations only; ``perseus_solver.schedules`` reads
    it."""
    lines = []
    for row in rows:
        cells, action = [], []
        for virtual_stage, letter, microbatch, joined in row:
            action.append(f"{virtual_stage}{letter}{microbatch}")
            if not joined:
                cells.append(f"({';'.join(action)})OVERLAP_F_B" if len(action) > 1 else action[0])
                action = []
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def schedule_of(row: Sequence[Cell]) -> Schedule:
    """(kind, microbatch, chunk) of one stage's row. The virtual stages of the row are its chunks, in ascending
    order."""
    chunks = {stage: chunk for chunk, stage in enumerate(sorted({cell.virtual_stage for cell in row}))}
    return [(KINDS[cell.letter], cell.microbatch, chunks[cell.virtual_stage]) for cell in row]


def joined_of(row: Sequence[Cell]) -> list[int]:
    """The places in one stage's row of instructions that run in one action with the next."""
    return [place for place, cell in enumerate(row) if cell.joined]


def one_f_one_b_row(stage: int, stages: int, microbatches: int) -> list[Cell]:
    """The row of one stage in 1F1B: forwards until the first gradient can be there, then one of each in turn."""
    warm = min(microbatches, stages - stage)
    row = [Cell(stage, "F", k) for k in range(warm)]
    for k in range(microbatches - warm):
        row += [Cell(stage, "B", k), Cell(stage, "F", warm + k)]
    return row + [Cell(stage, "B", k) for k in range(microbatches - warm, microbatches)]


def replica_of(rank: int, groups: Iterable[Sequence[int]]) -> int:
    """How many ranks below this one have the same position in every given group: the number of this replica.

    Args:
        rank: global rank.
        groups: the rank's own groups (stages, tensor-parallel), each as its members' global ranks in order.

    Raises:
        Unsupported: the members of a group are not evenly spaced, so the other groups cannot be derived from this one.
    """
    strides = []
    for members in groups:
        if len(members) < 2:
            continue
        stride, size = members[1] - members[0], len(members)
        if stride < 1 or any(member // stride % size != index for index, member in enumerate(members)):
            raise Unsupported(f"ranks {list(members)} are not evenly spaced: pass dp= and tp= to attach()")
        strides.append((stride, size))
    return sum(
        all(other // stride % size == rank // stride % size for stride, size in strides) for other in range(rank)
    )


def agent_expected(options: dict[str, Any]) -> bool:
    """Whether a socket of an agent is configured; without one an adapter touches nothing."""
    return bool(options.get("socket_path") or os.environ.get(ENV_SOCKET))


def require_version(name: str, version: str, oldest: str, newest_run: str) -> None:
    """Refuse a version that is too old; log a version that is newer than all tested ones.

    Raises:
        Unsupported: older than ``oldest``.
    """
    if _numbers(version) < _numbers(oldest):
        raise Unsupported(f"{name} {version} is too old: {oldest} or newer is needed")
    if _numbers(version)[:2] > _numbers(newest_run)[:2]:
        log.info("perseus_client: %s %s is newer than %s, the newest tested", name, version, newest_run)


def require_names(name: str, owner: object, *attributes: str) -> None:
    """Require the names that an adapter replaces; where one is missing, the framework works differently from what is
    known.

    Raises:
        Unsupported: one is missing.
    """
    for attribute in attributes:
        if not hasattr(owner, attribute):
            where = getattr(owner, "__name__", type(owner).__name__)
            raise Unsupported(f"this version of {name} has no {where}.{attribute}")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3]]


def capturing() -> bool:
    """Whether torch captures this thread's work into a CUDA graph now."""
    with suppress(Exception):  # nothing may reach the training code
        cuda = sys.modules["torch"].cuda
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())
    return False


class Attachment:
    """What ``attach`` returns: the hooks in one framework object, and the session behind them.

    It need not be stored; store it to ``detach`` again, or to read ``session`` and ``active``.
    """

    def __init__(self, framework: str, options: dict[str, Any]) -> None:
        self.session = Session()
        """The live session once there is one."""
        self.active = False
        """Whether hooks are in place. False without an agent, or if the framework cannot be followed."""
        self.rank: RankId | None = None
        """As which the process connected last; None: it has not."""
        self._framework = framework
        self.whole = False
        """Whether iterations are marked as a whole, since their instructions are not seen."""
        self._options = options
        self._undo: list[Callable[[], None]] = []
        self._shape: Hashable = None

    def prepare(self, hook: Callable[[], None]) -> Attachment:
        """Install the hooks by calling ``hook``: all of them, or after an error none."""
        if not agent_expected(self._options):
            return self
        self.active = True
        try:
            hook()
        except Exception as error:  # noqa: BLE001 - nothing may reach the training code
            self._refuse(error)
            self.detach()
        return self

    def connect(self, rank: RankId, schedule: Schedule, joined: Sequence[int] = ()) -> None:
        """Connect with this schedule; the session before it is closed."""
        self.session.close()
        self.rank = rank
        options = {**self._options, "joined": joined} if joined else self._options
        self.session = perseus_client.connect(*rank, schedule, **options)

    def mark_whole(self, why: str) -> None:
        """Say that iterations are marked as a whole from now on; connect for that afterwards."""
        log.info("perseus_client: %s: whole iterations are marked: %s", self._framework, why)
        self.whole = True

    def follow(self, shape: Hashable, describe: Callable[[], RankWork]) -> None:
        """Begin an iteration; connect anew if its shape (such as its number of microbatches) differs from the last
        one's."""
        if shape != self._shape:
            self._shape = shape
            self.connect_for(describe)
        self.session.step_begin()

    def connect_for(self, describe: Callable[[], RankWork]) -> None:
        """Connect with what this describes; where it raises, there are no energy plans."""
        try:
            self.connect(*describe())
        except Exception as error:  # noqa: BLE001 - nothing may reach the training code
            self.session.close()
            self.session = Session()
            self._refuse(error)

    def pause(self) -> None:
        """Disconnect from the agent, which returns the GPU to its default clocks, until ``follow`` is called again."""
        self._shape = None
        self.session.close()
        self.session = Session()

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object (not of its class) or of a module, until ``detach``."""
        absent = object()
        before = vars(owner).get(name, absent)
        setattr(owner, name, value)

        def undo() -> None:
            # If other code has wrapped it since, removing ours would remove theirs too. Without a session ours does
            # nothing.
            if vars(owner).get(name) is value:
                if before is absent:
                    delattr(owner, name)
                else:
                    setattr(owner, name, before)

        self._undo.append(undo)

    def on_detach(self, undo: Callable[[], None]) -> None:
        """Register something else to undo."""
        self._undo.append(undo)

    def detach(self) -> None:
        """Remove the hooks and disconnect from the agent, which returns the GPU to its default clocks. Idempotent."""
        self.active = False
        while self._undo:
            with suppress(Exception):  # one that fails must not keep the other hooks installed
                self._undo.pop()()
        self.pause()

    def _refuse(self, error: Exception) -> None:
        log.error(
            "perseus_client: %s: this rank trains without energy plans: %s",
            self._framework,
            error,
            exc_info=None if isinstance(error, Unsupported) else error,
        )
