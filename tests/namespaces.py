"""A separate namespace for one test, on any API server."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes import client


@contextmanager
def own_namespace(api: Any) -> Iterator[str]:
    """Make a namespace with a new name, and delete it at the end without waiting until it is gone."""
    core = client.CoreV1Api(api)
    name = f"test-{uuid.uuid4().hex[:8]}"
    core.create_namespace({"metadata": {"name": name}})
    yield name
    core.delete_namespace(name)
