"""One running system for all tests of what people see: real operator, agents and training, simulated GPUs; and a real
Prometheus server that scrapes it."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_sim.cluster.live_engines import LiveEngines, start_engines
from perseus_sim.cluster.simulated_cluster import RunningJob, SimulatedCluster
from perseus_sim.gpus.model import MODELS
from perseus_sim.profiles import profile_csv
from perseus_sim.serving.load import Chat
from perseus_solver.model.problem import build_problem
from perseus_solver.model.profile import read_profile
from perseus_solver.schedules import build_schedule

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
PICTURES = ROOT / "out" / "observability"
"""What the browser has shown, for people to look at; `make pictures` takes those of the documentation from there."""
A100 = MODELS["a100"]
STAGES, MICROBATCHES, PIPELINES = 3, 6, 2
NAMESPACE, JOB, POOL = "default", "gpt3", "chat"
PLACE = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.PLURAL)
POOLS = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.POOL_PLURAL)
SERVING_NODE = "node-serving"
LOWEST_MHZ = 1200
"""Of the pool: low enough that prompts which wait need a higher one. Each clock takes some ten seconds to be tried."""
FOUND = {"energy": "31.20%", "low": "28.40%", "high": "33.90%", "blocks": 24, "millijoulesPerToken": 480}
"""Savings take hours to be known: an earlier operator is said to have stored these."""
VALUES = {
    "$__rate_interval": "5s",
    "$__range": "20s",
    "$__interval": "1s",
    "$job_namespace": NAMESPACE,
    "$job_name": JOB,
    "$pool_namespace": NAMESPACE,
    "$pool_name": POOL,
    "$node": ".*",
}
"""What Grafana would put in for its variables."""
_SIZE = 1240, 1500
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    f"--window-size={_SIZE[0]},{_SIZE[1]}",
)


def await_true(what: str, check: Callable[[], Any], timeout_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + timeout_s
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not after {timeout_s:g} s")
        time.sleep(0.1)


class World:
    """Two nodes and a job under a plan that saves energy, one of its pipelines said to be slow; and a third node with
    a pool of engines."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self.custom = client.CustomObjectsApi(cluster.api)
        csv = profile_csv(STAGES, imbalance=1.3)
        cluster.apply(ROOT / "deploy" / "crds")
        flags = ("--status-interval-s", "0.2", "--log-format", "text", "--calibrate-after", "28")
        for number in range(PIPELINES):
            cluster.add_node(f"node-{number}", STAGES, A100, agent_arguments=["--gpu-metrics"])
        self.engines = self._serve(flags)
        cluster.start_operator(*flags)
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
        await_true("clocks follow the load", lambda: self._of_pool("ClocksApplied"), 240)
        await_true("clocks are raised for prompts", self._raised)

    def _serve(self, flags: Sequence[str]) -> LiveEngines:
        """Start engines and their pool, which a first operator sees, and of which it leaves savings behind."""
        self.cluster.start_operator(*flags)
        node = self.cluster.add_node(SERVING_NODE, 2, MODELS["h100"], driver="h100")
        requests = [Chat(per_second=3.0).requests(1_800.0, seed=replica) for replica in range(2)]
        burst = Chat(per_second=60.0).requests(1.0, seed=99)
        engines = start_engines(self.cluster, node, POOL, requests, gpu="h100", model="llama-3.1-8b", burst=burst)
        limits = {"timeToFirstToken": {"limit": "250ms"}, "timePerOutputToken": {"limit": "25ms"}}
        spec = {"objective": limits, "clocks": {"minimumMegahertz": LOWEST_MHZ}, "mode": "Enforce"}
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        self.cluster.apply(
            {"apiVersion": api_version, "kind": keys.POOL_KIND, "metadata": {"name": POOL}, "spec": spec}
        )
        await_true("the engines are known", lambda: self._of_pool("SignalsReady"))
        self.cluster.stop_operator()
        self.custom.patch_namespaced_custom_object_status(*POOLS, POOL, {"status": {"savings": FOUND}})
        return engines

    def _raised(self) -> bool:
        """Have prompts come; a replica that stalls just now is at its default clocks, and raises none for them."""
        for pod in self.engines.pods:
            self.engines.signal(pod, signal.SIGUSR1)
        time.sleep(3)
        url = f"http://{self.cluster.nodes[SERVING_NODE].metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as page:
            return b"perseus_agent_boost_seconds{" in page.read()

    def _of_pool(self, condition: str) -> bool:
        status = self.custom.get_namespaced_custom_object(*POOLS, POOL).get("status", {})
        found = {each["type"]: each["status"] for each in status.get("conditions", ())}
        return found.get(condition) == "True"

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
        made = World(cluster)
        yield made
        made.engines.stop()


class Prometheus:
    """A running server, asked over its HTTP API."""

    def __init__(self, address: str) -> None:
        self.url = f"http://{address}"
        self.since_s = time.time()
        """When it began to scrape."""

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self.url}{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
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


@contextlib.contextmanager
def scraping(targets: Sequence[str], folder: Path, *, every_s: int = 1) -> Iterator[Prometheus]:
    """Run a server that scrapes these addresses, and evaluates the project's rules."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    # As in a cluster, where the target's labels would collide with careless ones of ours.
    labels = {"namespace": "perseus-system", "job": "perseus", "pod": "p", "container": "c", "endpoint": "metrics"}
    settings = {
        "global": {"scrape_interval": f"{every_s}s", "evaluation_interval": f"{500 * every_s}ms"},
        "rule_files": [str(RULES)],
        "scrape_configs": [
            {
                "job_name": "perseus",
                "scrape_timeout": f"{every_s}s",
                "static_configs": [{"targets": [*targets], "labels": labels}],
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
        await_true("all targets are up", lambda: asked.values("up") == [1.0] * len(targets), 60.0 * every_s)
        yield asked
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def prometheus(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    targets = [world.addresses()["metrics"], *(node.metrics_address for node in world.cluster.nodes.values())]
    with scraping(targets, tmp_path_factory.mktemp("prometheus")) as asked:
        time.sleep(17)  # real time: a range query of the dashboards looks every 15 s, and rates need several scrapes
        yield asked


class Browser:
    """Chromium at the operator's page."""

    def __init__(self, driver: webdriver.Chrome, base: str) -> None:
        self.driver = driver
        self.base = base

    def open(self, fragment: str = "") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{self.base}/#{fragment}")

    def text(self, selector: str) -> str:
        """The text of the first that is there; empty: none is yet."""
        while True:
            with contextlib.suppress(StaleElementReferenceException):  # the page has drawn it anew in between
                return next((found.text for found in self.driver.find_elements(By.CSS_SELECTOR, selector)), "")

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def picture(self, name: str, size: tuple[int, int] = _SIZE) -> None:
        """Save what is shown in a window of a size in pixels; without a height, all of it."""
        PICTURES.mkdir(parents=True, exist_ok=True)
        width, height = size
        self.driver.set_window_size(width, height or _SIZE[1])
        if not height:
            # What a window shows is less high than the window.
            script = "return document.documentElement.scrollHeight + outerHeight - innerHeight"
            self.driver.set_window_size(width, self.driver.execute_script(script))
        self.driver.save_screenshot(str(PICTURES / f"{name}.png"))
        self.driver.set_window_size(*_SIZE)

    def complaints(self) -> list[str]:
        """What the browser's console has: errors of scripts and breaches of the page's policy."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def browser(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    chromium, chromedriver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    profile: Path = tmp_path_factory.mktemp("chromium")
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    try:
        yield Browser(driver, f"http://{world.addresses()['web']}")
    finally:
        driver.quit()
