"""What the operator asks of the Kubernetes API. ``KubeClient`` asks an API server; tests have doubles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Protocol

from perseus_operator.objects.values import ConfigMap, JobRef, Json, Pod, StoredObject

AgentPods = Mapping[str, tuple[str, str]]
"""UID → node and host:port. Of two pods on a node, as in a rollout, the end of one is not the end of the other."""


class Kube(Protocol):
    """What the operator requests from the API server.

    Every method raises ``KubeError`` or a subclass if the API server does not do it: ``KubeUnavailable`` may be tried
    again, ``KubeForbidden`` is a missing right.
    """

    async def read_config_map(self, namespace: str, name: str) -> ConfigMap:
        """Read a ConfigMap that a PerseusJob names.

        Raises:
            KubeNotFound: there is none.
            KubeError: the API server did not answer, or ``binaryData`` is not base64.
        """
        ...

    async def read_profile(self, namespace: str, name: str) -> StoredObject:
        """Read a PerseusProfile.

        Raises:
            KubeNotFound: there is none.
        """
        ...

    def list_profiles(self, namespace: str, most: int, *, of_engines: bool = False) -> AsyncIterator[StoredObject]:
        """Read the first PerseusProfiles of a namespace, a few at a time.

        Args:
            namespace: to look in.
            most: how many are read at most.
            of_engines: those that an operator has stored of engines that serve; else all others.
        """
        ...

    async def write_profile(self, namespace: str, name: str, spec: Json, owner: JobRef | None = None) -> None:
        """Create a PerseusProfile, or merge a spec into the operator's own of this name.

        Args:
            namespace: of the profile.
            name: of the PerseusProfile.
            spec: as of ``api.stored.ProfileSpec``.
            owner: with which it is garbage-collected; None: it stays.

        Raises:
            KubeConflict: a user wrote the PerseusProfile of this name.
        """
        ...

    async def delete_profile(self, namespace: str, profile: StoredObject) -> None:
        """Delete a PerseusProfile as it was read; one that was changed or made since stays.

        Raises:
            KubeConflict: it is another one, or was changed.
            KubeNotFound: it was deleted already.
        """
        ...

    async def named_profiles(self, namespaces: Iterable[str]) -> set[str]:
        """Return the names of the PerseusProfiles that PerseusJobs in these namespaces name; none given: in all."""
        ...

    async def write_calibrations(
        self, namespace: str, name: str, calibrations: Mapping[str, str], config_map: ConfigMap | None
    ) -> None:
        """Add calibrations to the status of a PerseusProfile.

        Args:
            namespace: of the profile.
            name: of the PerseusProfile.
            calibrations: by the key of what they were made for.
            config_map: that stores the profile under the same name; a PerseusProfile that is garbage-collected with it
                is made if there is none. None: the PerseusProfile itself stores the profile.

        Raises:
            KubeNotFound: there is no PerseusProfile of this name.
        """
        ...

    async def read_frontier(self, job: JobRef) -> StoredObject:
        """Read the PerseusFrontier of a job, which has its name.

        Raises:
            KubeNotFound: there is none.
        """
        ...

    async def write_frontier(self, job: JobRef, spec: Json) -> None:
        """Create the PerseusFrontier of a job, or merge a spec into it; it is garbage-collected with the PerseusJob.

        Args:
            job: the PerseusJob.
            spec: as of ``api.stored.FrontierSpec``; None removes a field.

        Raises:
            KubeConflict: the PerseusFrontier of this name is not the operator's, or was changed by another writer again
                and again.
        """
        ...

    async def write_status(self, job: JobRef, status: Json) -> str:
        """Replace the whole status of a PerseusJob or ServingPool.

        Returns:
            The object's resource version after the write.

        Raises:
            KubeNotFound: the job was deleted.
        """
        ...

    async def annotate(self, job: JobRef, annotations: Mapping[str, str | None], *, version: str | None = None) -> str:
        """Set annotations of a PerseusJob.

        Args:
            job: whose annotations these are.
            annotations: by key; None removes the annotation.
            version: the resource version that the write requires; None: any.

        Returns:
            The object's resource version after the write.

        Raises:
            KubeConflict: the object is no longer at ``version``.
            KubeNotFound: the job was deleted.
        """
        ...

    async def delete_job(self, job: JobRef) -> None:
        """Delete a PerseusJob; one of the same name that was made later stays.

        Raises:
            KubeNotFound: it was deleted already.
        """
        ...

    async def post_event(self, job: JobRef, *, kind: str, reason: str, message: str) -> None:
        """Post an event on a PerseusJob; ``kind`` is Normal or Warning."""
        ...

    async def job_uids(self, namespaces: Iterable[str]) -> set[str]:
        """Return the UIDs of the PerseusJobs and ServingPools in these namespaces; none named: in all."""
        ...

    def watch_agents(self, namespace: str) -> AsyncIterator[AgentPods]:
        """Yield the agents' pods that have an address, as they are and after each change: the same mapping each time.

        Raises:
            KubeError: what happens from now on is not known; begin anew.
        """
        ...

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        """List the opted-in pods that are bound to a node and are not being deleted.

        Args:
            namespaces: to look in; empty: all.
        """
        ...

    async def autoscalers(self, namespace: str) -> tuple[list[Json], bool]:
        """List the first HorizontalPodAutoscalers of a namespace, in version ``autoscaling/v2``.

        Returns:
            them, and whether there are no more.

        Raises:
            KubeNotFound: the API server has none in this version.
            KubeForbidden: the operator may not list them.
        """
        ...

    async def resource_slices(self, node: str) -> list[Json]:
        """List the ResourceSlices of a node, of all drivers.

        Raises:
            KubeNotFound: the API server has none: it is older than Kubernetes 1.34.
        """
        ...
