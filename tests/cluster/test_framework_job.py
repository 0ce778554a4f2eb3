"""A framework's real training, from one manifest of ``examples/steps`` to a measured saving.

Accelerate trains a small model for real on two ranks, one on each node, beside simulated GPUs. Nothing but
it is applied. The chapters depend on one another.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from installation import PATIENCE_S
from journey import AGENTS, Journey
from training import TRAINING, Training

from perseus_core import keys

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "examples" / "steps" / "training-job.yaml"
JOB = Training("steps-example", stages=1, pipelines=2, microbatches=1)
[PERSEUS_JOB] = [each for each in yaml.safe_load_all(MANIFEST.read_text()) if each["kind"] == keys.KIND]
BOUND = float(PERSEUS_JOB["spec"]["objective"]["maxSlowdown"].rstrip("%"))
BUSY = 2.0
"""Percentage points that iterations may be slower by because this machine, on which training is real, is busy."""
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,agent.settings.gpuMetrics=true"),
)


@pytest.fixture(scope="module")
def training_image(cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The image that every node has: PyTorch makes it large, so that other tests do without."""
    archive = tmp_path_factory.mktemp("images") / "steps-example.tar"
    command = [sys.executable, str(ROOT / "deploy" / "images" / "build.py"), "--archive", str(archive), "steps-example"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    cluster.load(archive)
    archive.unlink()


@pytest.fixture(scope="module")
def journey(training_image: None, cleared_journey: Journey) -> Journey:
    cleared_journey.install(*INSTALL)
    return cleared_journey


def test_one_manifest_makes_a_job_that_trains_profiles_itself_and_is_planned(journey: Journey) -> None:
    applied = journey.kubectl("-n", TRAINING, "apply", "-f", str(MANIFEST))
    journey.show(f"kubectl apply -f {MANIFEST.name}", applied)
    journey.follow(JOB, "PlanApplied")
    profile = journey.read("-n", TRAINING, "get", keys.PROFILE_PLURAL, JOB.name)["spec"]["csv"]
    assert {line.split(",")[1] for line in profile.splitlines()[1:]} == {"step"}
    nodes = {pod.spec.node_name for pod in journey.training_pods(JOB)}
    assert len(nodes) == min(2, len(journey.cluster.nodes)), "ranks exchange gradients between nodes"


def test_every_gpu_runs_at_a_clock_below_its_highest(journey: Journey) -> None:
    def planned() -> bool:
        gpus = journey.gpus()
        clocks = {uuid: gpus[uuid]["locked_mhz"] for uuid in journey.ranks_by_gpu()}
        assert len(clocks) == JOB.ranks
        return all(0 < clock < gpus[uuid]["max_mhz"] for uuid, clock in clocks.items())

    journey.eventually("both GPUs are at the plan's clock", planned, PATIENCE_S)


def test_it_keeps_its_bound_and_says_how_sure_its_saving_is(journey: Journey) -> None:
    def compared() -> bool:
        return len(journey.status(JOB).get("comparison", {}).get("pairs", ())) >= 3

    journey.eventually("savings are measured while it trains", compared, PATIENCE_S)
    journey.plugin("explain", JOB.name)
    status = journey.status(JOB)
    assert float(status["plan"]["plannedSlowdown"].rstrip("%")) <= BOUND
    assert journey.condition(JOB, "BoundKept")[0] != "False", journey.condition(JOB, "BoundKept")
    savings = status["savings"]
    assert savings["against"] == "Comparisons"
    found = {what: float(savings[what].rstrip("%")) for what in ("energyLow", "energy", "energyHigh", "slowdown")}
    journey.say(f"savings: {found}")
    assert 0 < found["energyLow"] <= found["energy"] <= found["energyHigh"]
    assert found["slowdown"] < BOUND + BUSY


def test_it_has_learned(journey: Journey) -> None:
    losses = [float(text) for text in re.findall(r"loss (\S+)", journey.log(JOB))]
    journey.say(f"losses: {losses}")
    assert losses[-1] < 0.8 * losses[0]


def test_its_clocks_go_back_when_it_is_deleted(journey: Journey) -> None:
    journey.kubectl("-n", TRAINING, "delete", "job", JOB.name)
    journey.eventually("no GPU is locked", lambda: journey.locked() == [], PATIENCE_S)
