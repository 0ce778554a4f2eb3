"""The operator's benchmark at a small size: its phases work on a real API server, and equal jobs share one solve.

`make bench ONLY=operator` measures the figures at full size. This test asserts only what does not depend on the load of
the machine.
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

pytestmark = pytest.mark.e2e

SMALL = Size(agents=50, jobs=25, iteration_s=2.0, steady_s=10.0, edits_per_s=10.0, patience_s=2 * PATIENCE_S)


def test_equal_jobs_share_a_solve_and_send_few_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Never on the cluster of KUBECONFIG_E2E: tests must not make nodes and pods there.
    monkeypatch.delenv("KUBECONFIG_E2E", raising=False)
    with ExitStack() as stack:
        try:
            server = stack.enter_context(real_server(tmp_path / "api"))
        except NoControlPlane:  # the embedded one does not count requests
            server = stack.enter_context(embedded_server(tmp_path / "embedded"))
        figures = asyncio.run(measure(server, tmp_path, SMALL))
    assert figures.solves == 1, "25 jobs have the same inputs"
    assert figures.restart_solves == 0
    assert len(figures.edits_ms) == SMALL.jobs
    assert figures.rss_mib < 1024
    if figures.settle_requests is not None and figures.restart_requests is not None:
        # The profile, the frontier (read and stored), and a few statuses and events.
        assert figures.settle_requests <= 50 * SMALL.jobs
        assert figures.restart_requests <= 20 * SMALL.jobs
        assert figures.steady_requests_per_s is not None
        assert figures.steady_requests_per_s <= 12 + SMALL.jobs / 60, (
            "ten statuses a second, and a profile a minute per job"
        )
