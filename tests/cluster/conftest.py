"""The real cluster that tests run on: the one of `make cluster` (or of PERSEUS_CLUSTER), which must be up.

The project's images are built and loaded once; PERSEUS_IMAGES names an existing archive instead. Tests that make and
remove their own clusters use none of these fixtures.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from controllers import JOB_SET, KUEUE, installed
from installation import PATIENCE_S, Installation
from journey import Journey
from kubernetes import client
from kubernetes.config import new_client_from_config
from tests import waiting
from tests.namespaces import own_namespace
from urllib3.exceptions import HTTPError

from local_cluster.cluster import Cluster
from local_cluster.errors import ClusterError
from local_cluster.machine import default_state

ROOT = Path(__file__).resolve().parents[2]
Eventually = Callable[..., Any]
Helm = Callable[..., str]
Building = tuple[subprocess.Popen[str], Path]
"""The process that builds an archive of images, and the path of the archive."""
_NOT_YET = (AssertionError, OSError, ClusterError, client.ApiException, HTTPError)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests first that need no images, while the images are built."""
    items.sort(key=lambda item: "images" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster. A test that breaks a part of it must repair it."""
    found = Cluster(default_state())
    if not found.kubeconfig.exists() or found.control_plane.pid is None:
        pytest.skip(f"no cluster runs in {found.state}: make one with `make cluster`")
    return found


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[Any]:
    """The administrator's connection."""
    with new_client_from_config(str(cluster.kubeconfig)) as connection:
        yield connection


@pytest.fixture(scope="session", autouse=True)
def building(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Building | None]:
    """The build of the project's images, if a test needs them; it runs beside the tests that do not."""
    needed = any("images" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not needed or "PERSEUS_IMAGES" in os.environ or not Cluster(default_state()).kubeconfig.exists():
        yield None
        return
    archive = tmp_path_factory.mktemp("images") / "images.tar"
    command = [sys.executable, str(ROOT / "deploy" / "images" / "build.py"), "--archive", str(archive)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as builder:
        yield builder, archive
        if builder.poll() is None:  # no test used the images: the builder stops its build
            builder.send_signal(signal.SIGINT)
            builder.communicate()
    archive.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def images(cluster: Cluster, building: Building | None) -> set[str]:
    """The names of the project's images, which every node has."""
    if building is None:
        archive = Path(os.environ["PERSEUS_IMAGES"])
    else:
        builder, archive = building
        output, _ = builder.communicate()
        assert builder.returncode == 0, output
    return set.intersection(*map(set, cluster.load(archive).values()))


@pytest.fixture(scope="session")
def helm(cluster: Cluster) -> Helm:
    """``helm("install", ...)`` runs helm on the cluster and returns its output, with which it also fails."""
    environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}

    def run(*arguments: str) -> str:
        command = [str(cluster.assets / "helm"), *arguments]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"helm {' '.join(arguments)}\n{ran.stdout}{ran.stderr}"
        return ran.stdout

    return run


@pytest.fixture(scope="session")
def installations() -> Iterator[contextlib.ExitStack]:
    """Holds the current installation, so that a test that needs the cluster without it can uninstall it."""
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def installation(
    cluster: Cluster,
    api: Any,
    helm: Helm,
    images: set[str],
    eventually: Eventually,
    installations: contextlib.ExitStack,
) -> Installation:
    """One installation for the tests of faults and of identity: making it takes as long as several tests."""
    return installations.enter_context(Installation(cluster, api, helm, eventually).installed())


@pytest.fixture(scope="module")
def cleared_journey(
    cluster: Cluster,
    api: Any,
    helm: Helm,
    images: set[str],
    eventually: Eventually,
    installations: contextlib.ExitStack,
) -> Iterator[Journey]:
    """A user of a cluster without a release: what was left is removed first, and in the end what the module made."""
    installations.close()
    journey = Journey(cluster, api, helm, eventually)
    journey.clear()
    yield journey
    journey.clear()


@pytest.fixture(scope="module")
def job_sets_and_queues(cluster: Cluster, helm: Helm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """JobSet and Kueue, installed for the module."""
    with installed(cluster, helm, tmp_path_factory.mktemp("controllers"), (JOB_SET, KUEUE), patience_s=PATIENCE_S):
        yield


@pytest.fixture
def one_chapter_after_the_other(request: pytest.FixtureRequest, journey: Journey) -> Iterator[None]:
    """Skip a chapter of the module's journey after a failed one, because it depends on the earlier ones."""
    if journey.failed:
        pytest.skip("an earlier chapter has failed")
    failed = request.session.testsfailed
    yield
    journey.failed = request.session.testsfailed > failed


@pytest.fixture(scope="session")
def eventually() -> Eventually:
    """``eventually(what, check, timeout_s=120)`` waits until ``check()`` is true and returns what it returned.

    An exception of the API server, of kubectl or a failed assertion counts as "not yet": tests stop parts on purpose.
    """

    def wait(what: str, check: Callable[[], Any], timeout_s: float = 120.0) -> Any:
        return waiting.eventually(check, f"not {what}", every_s=0.25, patience_s=timeout_s, not_yet=_NOT_YET)

    return wait


@pytest.fixture
def namespace(api: Any) -> Iterator[str]:
    """A separate namespace for the test."""
    with own_namespace(api) as name:
        yield name
