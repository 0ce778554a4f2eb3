"""Who holds a token, and what that user may do, as the API server says it."""

from __future__ import annotations

import kubernetes.aio.client as k8s

from perseus_core import keys
from perseus_operator.clients.kube.requests import TIMEOUT_S, KubeRequests
from perseus_operator.objects.values import User


class AccessReviews(KubeRequests):
    """TokenReview and SubjectAccessReview. Both are created and answered at once; the API server stores neither."""

    async def user_of(self, token: str) -> User | None:
        """Whose token it is, by TokenReview; None: the API server accepts it neither for us nor for itself."""
        return await self._user_of(token, [keys.API_GROUP]) or await self._user_of(token, None)

    async def _user_of(self, token: str, audiences: list[str] | None) -> User | None:
        body = k8s.V1TokenReview(spec=k8s.V1TokenReviewSpec(token=token, audiences=audiences))
        reviews = k8s.AuthenticationV1Api(self._api)
        status = (await self._request(reviews.create_token_review(body, _request_timeout=TIMEOUT_S))).status
        user, accepted = status.user, set(status.audiences or ())
        if not status.authenticated or user is None or not user.username:
            return None
        if audiences and not accepted & set(audiences):
            return None  # by an authenticator that does not look at audiences
        extra = tuple(sorted((key, tuple(values)) for key, values in (user.extra or {}).items()))
        return User(user.username, user.uid or "", tuple(user.groups or ()), extra)

    async def may_get(self, user: User, plural: str, namespace: str) -> bool:
        """Whether a user may get all objects of ours of a kind (in plural) in a namespace, by SubjectAccessReview."""
        asked = k8s.V1SubjectAccessReviewSpec(
            user=user.name,
            uid=user.uid,
            groups=list(user.groups),
            extra={key: list(values) for key, values in user.extra},
            resource_attributes=k8s.V1ResourceAttributes(
                verb="get", group=keys.API_GROUP, resource=plural, namespace=namespace
            ),
        )
        reviews = k8s.AuthorizationV1Api(self._api)
        body = k8s.V1SubjectAccessReview(spec=asked)
        answer = await self._request(reviews.create_subject_access_review(body, _request_timeout=TIMEOUT_S))
        return bool(answer.status.allowed)
