"""The numbers under which this operator commands: one drawn at its start, and higher ones for jobs that need them.

An agent refuses an epoch below the highest that it has seen for the job. If the counter is beyond this operator's,
a newer operator has drawn from it and commands. If it has not, the counter itself was lost: with its namespace, or
because etcd was restored from a backup. Then the counter is raised above what the agent has seen, and that job goes on
under the new number. Other jobs keep theirs, so nothing that an agent says about one job concerns another.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

MAX_LOST: Final = 1_000_000
"""An epoch is drawn at each start of an operator: no counter was ahead by more when it was lost. An agent that
names a higher one is not believed."""
MAX_RAISES: Final = 16
"""For one job: more than there are different operators that its agents can have seen last. An agent that asks for ever
higher numbers stops its own job, and uses up no more than this of them."""


class Epochs:
    """The epochs of one operator process."""

    def __init__(
        self, first: int, *, newest: Callable[[], Awaitable[int]], raise_to: Callable[[int, int], Awaitable[int]]
    ) -> None:
        """Start with the epoch drawn at the start of the process.

        Args:
            first: that epoch.
            newest: reads the counter. Raises KubeError.
            raise_to: counts on from an epoch if the counter is not above the known one (second argument); the counter
                after it. Raises KubeError.
        """
        self.first = first
        self.drawn = first
        """The highest that this process has drawn."""
        self.newest = newest
        self._raise_to = raise_to
        self._raises: Counter[str] = Counter()
        # One question at a time: what is drawn for one agent must not look to the next like another operator's.
        self._asking = asyncio.Lock()

    async def above(self, seen: int | None, job_uid: str) -> int | None:
        """An epoch for a job above one that an agent has seen.

        Args:
            seen: by the agent; None: it does not say.
            job_uid: of the PerseusJob.

        Returns:
            The epoch; None: a newer operator commands, or the agent cannot be believed.

        Raises:
            KubeError: the API server did not answer, or another writer was faster; try again.
        """
        async with self._asking:
            return await self._above(seen, job_uid)

    async def _above(self, seen: int | None, job_uid: str) -> int | None:
        if seen is None or self._raises[job_uid] >= MAX_RAISES or seen > self.drawn + MAX_LOST:
            return None
        if seen >= self.drawn:
            counter = await self._raise_to(seen + 1, self.drawn)
            if counter != seen + 1:
                return None
            self.drawn = counter
        elif await self.newest() > self.drawn:
            return None
        self._raises[job_uid] += 1
        return self.drawn

    def forget(self, job_uid: str) -> None:
        """The job does not exist any more."""
        del self._raises[job_uid]
