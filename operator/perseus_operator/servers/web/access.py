"""Who may see what on the page: those who may get PerseusJobs, or ServingPools, of that namespace with kubectl.

The API server says whose token it is (TokenReview) and what that user may do (SubjectAccessReview). Both are remembered
for half a minute, so a right that is taken away ends the page's answers that soon. The page itself has no rights to
lend: a viewer sees through it what they may see without it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from perseus_operator.objects.values import User

MAX_TOKEN: Final = 16_384
"""Characters. Tokens of service accounts have about 1,000; those of identity providers, with many groups, more."""
REMEMBERED_S: Final = 30.0
_MOST_REMEMBERED: Final = 4096
_PATIENCE_S: Final = 5.0
_PAUSE_S: Final = 0.02
"""After each unknown token: strangers can have the API server asked about at most 50 a second."""


class NotKnown(Exception):
    """No token, or one that the API server does not know; the message says which."""


@dataclass(frozen=True)
class Viewer:
    """Who asks for a page; None: everyone who reaches it, together."""

    user: User | None
    may_see: Callable[[str, str], bool]
    """Whether they may see the objects of a kind, in plural, of a namespace; asked about "": of every namespace."""


class Reviews(Protocol):
    """What the API server is asked."""

    def user_of(self, token: str) -> User | None:
        """Whose token it is; None: nobody's."""
        ...

    def may_get(self, user: User, plural: str, namespace: str) -> bool:
        """Whether a user may get every PerseusJob, or every ServingPool, of a namespace."""
        ...


class Access:
    """Answers from memory where it can. Its methods are called in the server's threads.

    They raise TimeoutError if the API server is slow or too many strangers ask, and KubeError if it does not answer.
    """

    def __init__(self, reviews: Reviews, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._reviews = reviews
        self._monotonic_s = monotonic_s
        self._remembered: OrderedDict[Hashable, tuple[float, Any]] = OrderedDict()
        self._lock = threading.Lock()
        self._asking = threading.Lock()

    def viewer(self, authorization: str) -> Viewer:
        """Find out who sent a request.

        Args:
            authorization: the header of that name.

        Returns:
            That user, and what they may see.

        Raises:
            NotKnown: it is no bearer token of a user.
        """
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            raise NotKnown("a token is needed: header Authorization: Bearer TOKEN")
        if len(token) > MAX_TOKEN:
            raise NotKnown(f"the token has {len(token)} characters; at most {MAX_TOKEN} are read")
        key = hashlib.sha256(token.encode()).digest()  # tokens themselves are not kept
        user = self._cached(key, lambda: self._strangers_user(token))
        if user is None:
            raise NotKnown("the API server does not accept this token; it may have expired")
        return Viewer(user, partial(self._may_see, user))

    def _may_see(self, user: User, plural: str, namespace: str) -> bool:
        return bool(self._cached((user, plural, namespace), lambda: self._reviews.may_get(user, plural, namespace)))

    def _strangers_user(self, token: str) -> User | None:
        """One token after the other: made-up tokens slow strangers down, not the operator."""
        if not self._asking.acquire(timeout=_PATIENCE_S):
            raise TimeoutError
        try:
            return self._reviews.user_of(token)
        finally:
            time.sleep(_PAUSE_S)
            self._asking.release()

    def _cached(self, key: Hashable, ask: Callable[[], Any]) -> Any:
        now_s = self._monotonic_s()
        with self._lock:
            end_s, answer = self._remembered.get(key, (now_s, None))
        if end_s > now_s:
            return answer
        answer = ask()
        with self._lock:
            self._remembered[key] = now_s + REMEMBERED_S, answer
            self._remembered.move_to_end(key)
            while len(self._remembered) > _MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        return answer
