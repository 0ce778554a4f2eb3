"""The operator's page, as far as rights go: a viewer with a token asks each replica again and again what he may see.

HTTP is left out; who may see what is the real code, and the API server is asked over its replica's connection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from tests.simulation.api import ApiFaults
from tests.simulation.scheduler import NS, Scheduler

from perseus_core import keys
from perseus_operator.errors import KubeError, KubeUnavailable
from perseus_operator.objects.values import User
from perseus_operator.servers.web.access import Access, NotKnown

ASKS_S: Final = 2.0
REMEMBERED_S: Final = 31.0
"""Promise 10: half a minute, and how long it takes to ask. A right that is taken away ends so soon."""


@dataclass
class Rights:
    """What the API server says of the viewer."""

    may_see: bool = True
    """The right to get PerseusJobs."""
    known: bool = True
    """The token is accepted."""
    taken_ns: int | None = None
    """Since when he may see nothing; None: he may."""

    def change(self, now_ns: int, *, may_see: bool = True, known: bool = True) -> None:
        """An administrator changes them."""
        self.may_see, self.known = may_see, known
        self.taken_ns = None if may_see and known else now_ns if self.taken_ns is None else self.taken_ns


class Reviews:
    """What the API server answers; its calls are made in threads."""

    def __init__(self, scheduler: Scheduler, api: ApiFaults, rights: Rights) -> None:
        self._scheduler = scheduler
        self._api = api
        self._rights = rights

    def user_of(self, token: str) -> User | None:
        """As TokenReview."""
        self._reach()
        return User("viewer") if self._rights.known else None

    def may_get(self, user: User, plural: str, namespace: str) -> bool:
        """As SubjectAccessReview."""
        self._reach()
        return self._rights.may_see

    def _reach(self) -> None:
        self._scheduler.pause(self._scheduler.random.uniform(0.001, 0.03))
        if self._api.away or self._scheduler.random.random() < self._api.failing:
            raise KubeUnavailable("503: the API server does not answer")


def view(scheduler: Scheduler, name: str, namespace: str, api: ApiFaults, rights: Rights) -> None:
    """Ask for jobs of a namespace as long as a replica lives: the body of a thread of its process."""
    access = Access(Reviews(scheduler, api, rights))
    while True:
        scheduler.pause(ASKS_S)
        try:
            sees = access.viewer("Bearer token").may_see(keys.PLURAL, namespace)
        except (TimeoutError, KubeError, NotKnown):
            sees = False
        since_ns = scheduler.now_ns - (rights.taken_ns or scheduler.now_ns)
        if sees and since_ns > REMEMBERED_S * NS:
            scheduler.fail(
                f"promise 10: the page of {name} shows jobs to a viewer whose right was taken away"
                f" {since_ns / NS:.0f} s ago"
            )
