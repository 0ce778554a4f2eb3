"""A namespace of a test's own, on whatever API server it runs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes import client


@contextmanager
def own_namespace(api: Any) -> Iterator[str]:
    """The name of a new namespace, deleted at the end; nobody waits until it is gone."""
    core = client.CoreV1Api(api)
    name = f"test-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)
