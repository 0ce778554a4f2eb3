"""One namespace with a training job on two nodes, and the operator processes that serve it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import urllib.request
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import kubernetes.aio.client as k8s
import kubernetes.aio.config as k8s_config
import pytest
from tests.integration.operator_loop.fake_agent import GROUP, PIPELINES, STAGES, FakeAgent
from tests.waiting import PATIENCE_S

from perseus_core import keys
from perseus_sim.processes import Processes

NUMBERS = itertools.count()


class Operator:
    """One operator process, serving some namespaces."""

    def __init__(
        self, processes: Processes, folder: Path, kubeconfig: Path, namespaces: list[str], system: str
    ) -> None:
        number = next(NUMBERS)
        ready = folder / f"ready-{number}.json"
        command = [
            *(sys.executable, "-m", "perseus_operator", "--insecure", "--log-format", "text"),
            *("--namespaces", ",".join(namespaces), "--agent-namespace", system),
            *("--metrics-address", "127.0.0.1:0", "--ready-file", str(ready)),
            *("--agent-poll-s", "0.3", "--profile-retry-s", "0.2", "--profile-refresh-s", "1"),
            *("--lease-ttl-s", "15", "--agent-timeout-s", "5"),
            *("--status-interval-s", "0.2", "--release-timeout-s", "2"),
            *("--calibrate-after", "28"),
        ]
        self.child = processes.start(f"operator-{number}", command, environment={"KUBECONFIG": str(kubeconfig)})
        self.child.wait_until(lambda: ready.exists() and ready.read_text() != "")
        told = json.loads(ready.read_text())
        self.epoch, self._metrics = told["epoch"], told["metrics"]

    @property
    def log(self) -> str:
        return self.child.log.read_text()

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a metric's series, or of those with a label of this value."""
        with urllib.request.urlopen(f"http://{self._metrics}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if not label or f'="{label}"' in line)


class World:
    """One namespace with a training job on two nodes, and the operators that serve it."""

    def __init__(self, namespace: str, system: str, kubeconfig: Path) -> None:
        self.namespace, self.system, self.kubeconfig = namespace, system, kubeconfig
        self.agents = [FakeAgent(f"{namespace}-{p}", p) for p in range(PIPELINES)]
        self.slowdowns = [1.0] * PIPELINES
        self.overhead_us = 0
        """Of every iteration: what no model of the pipeline knows."""
        self.iteration = 0
        self.operators: list[Operator] = []
        self.start: Callable[[], None] = lambda: None

    async def connect(self) -> None:
        configuration = k8s.Configuration()
        await k8s_config.load_kube_config(str(self.kubeconfig), client_configuration=configuration)  # type: ignore[no-untyped-call]
        self.api = k8s.ApiClient(configuration)
        self.core, self.custom = k8s.CoreV1Api(self.api), k8s.CustomObjectsApi(self.api)
        for agent in self.agents:
            await agent.serve()
            await self._pod(
                self.system,
                f"agent-{agent.node}",
                agent.node,
                {keys.LABEL_COMPONENT: keys.COMPONENT_AGENT},
                ports=[{"name": "grpc", "containerPort": agent.port}],
            )
            pod = await self._pod(self.namespace, f"trainer-{agent.pipeline}", agent.node, {keys.LABEL_JOB: "gpt3"})
            for rank in agent.ranks:
                rank.pod_uid = pod.metadata.uid

    async def _pod(self, namespace: str, name: str, node: str, labels: dict[str, str], ports: Any = None) -> Any:
        body = {
            "metadata": {"name": name, "labels": labels},
            "spec": {"nodeName": node, "containers": [{"name": "c", "image": "i", "ports": ports or []}]},
        }
        pod = await self.core.create_namespaced_pod(namespace, body)
        status = {"status": {"phase": "Running", "podIP": "127.0.0.1"}}
        await self.core.patch_namespaced_pod_status(
            name, namespace, status, _content_type="application/merge-patch+json"
        )
        return pod

    async def profile(self, data: dict[str, str]) -> None:
        await self.core.create_namespaced_config_map(self.namespace, {"metadata": {"name": "profile"}, "data": data})

    async def stored(self, plural: str, name: str) -> Any:
        """A PerseusProfile or a PerseusFrontier."""
        return await self.custom.get_namespaced_custom_object(*GROUP, self.namespace, plural, name)

    async def apply(self, name: str = "gpt3", **changes: Any) -> None:
        """Create a planned PerseusJob, or one with other fields; a field that is None is left out."""
        spec = {
            "pipeline": {"schedule": "1F1B", "stages": STAGES, "microbatches": 4, "dataParallel": PIPELINES},
            "profile": {"configMapRef": {"name": "profile"}, "blockingPowerMilliwatts": 83640},
            "straggler": {"confirmIterations": 2},
            "points": 30,
            **changes,
        }
        body = {
            "apiVersion": "/".join(GROUP),
            "kind": keys.KIND,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {field: value for field, value in spec.items() if value is not None},
        }
        await self.custom.create_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, body)

    async def patch(self, body: dict[str, Any]) -> None:
        await self.custom.patch_namespaced_custom_object(
            *GROUP, self.namespace, keys.PLURAL, "gpt3", body, _content_type="application/merge-patch+json"
        )

    async def job(self, name: str = "gpt3") -> Any:
        return await self.custom.get_namespaced_custom_object(*GROUP, self.namespace, keys.PLURAL, name)

    async def condition(self, kind: str) -> tuple[str, str, str]:
        said = (await self.job()).get("status", {}).get("conditions", [])
        found = next((c for c in said if c["type"] == kind), {})
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    async def reasons(self) -> list[str]:
        events = await self.core.list_namespaced_event(self.namespace)
        return [event.reason for event in sorted(events.items, key=lambda e: int(e.metadata.resource_version))]

    async def step(self, iterations: int = 1) -> None:
        """All pipelines train on; the faster wait for the slowest."""
        for _ in range(iterations):
            spans = [round(a.time_us * s) for a, s in zip(self.agents, self.slowdowns, strict=True)]
            for agent, span in zip(self.agents, spans, strict=True):
                agent.report(self.iteration, span_us=span, time_us=max(spans) + self.overhead_us)
            self.iteration += 1
            await asyncio.sleep(0.03)

    async def until(self, what: str, check: Callable[[], Awaitable[bool]], timeout_s: float = PATIENCE_S) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while not await check():
                    await asyncio.sleep(0.03)
        except TimeoutError:
            status = json.dumps((await self.job()).get("status", {}), indent=1)
            pytest.fail(f"not {what} after {timeout_s} s:\n{status}\n{self.operators[-1].child.tail(40)}")

    async def until_condition(self, kind: str, status: str, reason: str) -> str:
        async def check() -> bool:
            return (await self.condition(kind))[:2] == (status, reason)

        await self.until(f"{kind}={status}, {reason}", check)
        return (await self.condition(kind))[2]

    async def train_until_applied(self) -> None:
        """From the profile to a plan in force."""

        async def measuring() -> bool:
            return (await self.condition("PlanApplied"))[1] in {"MeasuringBaseline", "PlanInForce"}

        await self.until("measuring the baseline", measuring)
        await self.step(5)
        await self.until_condition("PlanApplied", "True", "PlanInForce")
