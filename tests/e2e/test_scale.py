"""The operator's benchmark, small: its phases hold on a real API server, and what grows with jobs is shared.

The figures at full size are `make bench ONLY=operator`; here only what no busy machine changes is asserted.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.bench.operator import Size, measure
from tests.waiting import PATIENCE_S

from perseus_sim.cluster.api_servers import embedded_server, real_server
from perseus_sim.cluster.control_plane import NoControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

SMALL = Size(agents=50, jobs=25, iteration_s=2.0, steady_s=10.0, edits_per_s=10.0, patience_s=2 * PATIENCE_S)


def test_many_jobs_share_what_is_the_same_and_leave_the_api_server_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Never a given cluster: its nodes and pods are not ours to make up.
    monkeypatch.delenv("KUBECONFIG_E2E", raising=False)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(real_server(tmp_path / "api"))
        except NoControlPlane:  # requests are not counted then
            server = stack.enter_context(embedded_server(tmp_path / "embedded"))
        figures = asyncio.run(measure(server, tmp_path, SMALL))
    assert figures.solves == 1, "25 jobs of the same inputs"
    assert figures.restart_solves == 0
    assert len(figures.edits_ms) == SMALL.jobs
    assert figures.rss_mib < 1024
    if figures.settle_requests is not None and figures.restart_requests is not None:
        # Finalizer, profile, frontier looked for and kept, a handful of statuses and events.
        assert figures.settle_requests <= 50 * SMALL.jobs
        assert figures.restart_requests <= 20 * SMALL.jobs
        assert figures.steady_requests_per_s is not None
        assert figures.steady_requests_per_s <= 12 + SMALL.jobs / 60, "figures ten a second, a profile a minute each"
