"""What the operator asks of the Kubernetes API. ``KubeClient`` asks an API server; tests have doubles."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from perseus_operator.objects import ConfigMap, JobRef, Json, Pod, StoredObject


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

    async def write_profile(self, namespace: str, name: str, spec: Json) -> None:
        """Create a PerseusProfile, or merge a spec into the operator's own of this name. It has no owner.

        Raises:
            KubeConflict: a user wrote the PerseusProfile of this name.
        """
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
        """Replace the whole status of a PerseusJob.

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
        """Return the UIDs of the PerseusJobs in these namespaces; none named: in all."""
        ...

    async def agent_addresses(self, namespace: str) -> dict[str, str]:
        """Return host:port by node name, of every agent whose pod has an address."""
        ...

    async def training_pods(self, namespaces: Iterable[str]) -> list[Pod]:
        """List the opted-in pods that are bound to a node and are not being deleted.

        Args:
            namespaces: to look in; empty: all.
        """
        ...
