"""One running system for all tests of what people see: real operator, agents and training, simulated GPUs; and a real
Prometheus server that scrapes it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from perseus_proto import keys
from perseus_sim.cluster.simulated_cluster import RunningJob, SimulatedCluster
from perseus_sim.gpus.model import MODELS, profile_csv
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
A100 = MODELS["a100"]
STAGES, MICROBATCHES, PIPELINES = 3, 6, 2
NAMESPACE, JOB = "default", "gpt3"
PLACE = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.PLURAL)


def await_true(what: str, check: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not after {timeout_s:g} s")
        time.sleep(0.1)


class World:
    """Two nodes and a job under a plan that saves energy, one of its pipelines said to be slow."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.custom = client.CustomObjectsApi(cluster.api)
        csv = profile_csv(STAGES, imbalance=1.3)
        cluster.apply(ROOT / "deploy" / "crds")
        cluster.start_operator("--status-interval-s", "0.2", "--log-format", "text", "--calibrate-after", "28")
        for number in range(PIPELINES):
            cluster.add_node(f"node-{number}", STAGES, A100)
        schedule = build_schedule("1f1b", stages=STAGES, microbatches=MICROBATCHES)
        problem = build_problem(read_profile(csv, stages=STAGES), schedule, blocking_power_w=A100.blocking_power_w)
        self.training: RunningJob = cluster.start_job(
            JOB, problem, pipelines=PIPELINES, speed=5.0, noise=0.0, wait_for_agent_s=20.0
        )
        data = {"profile.csv": csv}
        cluster.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "profile"}, "data": data})
        self.apply_job(JOB)
        budget = {"metadata": {"name": "ample"}, "spec": {"watts": 1_000_000}}
        cluster.apply({"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.BUDGET_KIND, **budget})
        await_true("savings are measured", lambda: "savings" in self.status())
        await_true("the model is judged", lambda: "calibration" in self.status(), 90)

    def apply_job(self, name: str, **changes: Any) -> None:
        pipeline = {
            "schedule": "1F1B", "stages": STAGES, "microbatches": MICROBATCHES, "dataParallel": PIPELINES
        }  # fmt: skip
        profile = {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": round(1000 * A100.blocking_power_w)}
        spec = {"pipeline": pipeline, "profile": profile, "points": 30, "objective": {"type": "MinEnergy"}, **changes}
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        metadata = {"name": name, "labels": {keys.LABEL_CLASS: "frugal"}}
        self.cluster.apply({"apiVersion": api_version, "kind": keys.KIND, "metadata": metadata, "spec": spec})

    def status(self, name: str = JOB) -> dict[str, Any]:
        found: dict[str, Any] = self.custom.get_namespaced_custom_object(*PLACE, name).get("status", {})
        return found

    def addresses(self) -> dict[str, str]:
        """Where the operator serves."""
        found: dict[str, str] = json.loads((self.cluster.folder / "operator.ready").read_text())
        return found


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with SimulatedCluster() as cluster:
        yield World(cluster)


class Prometheus:
    """A running server, asked over its HTTP API."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{parameters}: {json.load(error)['error']}")

    def values(self, expression: str) -> list[float]:
        """What a query answers now; NaN is no answer."""
        result = self.get("/api/v1/query", query=expression)["result"]
        found = [float(series["value"][1]) for series in result]
        return [value for value in found if value == value]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def prometheus(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [world.addresses()["metrics"], *(node.metrics_address for node in world.cluster.nodes.values())]
    # As in a cluster, where the target's labels would collide with careless ones of ours.
    labels = {"namespace": "perseus-system", "job": "perseus", "pod": "p", "container": "c", "endpoint": "metrics"}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "500ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "perseus",
                "scrape_timeout": "1s",
                "static_configs": [{"targets": targets, "labels": labels}],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))
    address = f"127.0.0.1:{_free_port()}"
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [
                binary,
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=warn",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        asked = Prometheus(address)

        def ready() -> bool:
            assert server.poll() is None, (folder / "log").read_text()
            try:
                return urllib.request.urlopen(f"http://{address}/-/ready", timeout=2).status == 200
            except OSError:
                return False

        await_true("Prometheus is ready", ready)
        await_true("all targets are up", lambda: asked.values("up") == [1.0] * len(targets))
        time.sleep(17)  # real time: a range query of the dashboards looks every 15 s, and rates need several scrapes
        yield asked
    finally:
        server.terminate()
        server.wait(60)
