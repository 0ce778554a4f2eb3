"""What a collector gets by OTLP from a running operator: a trace from each edit to the plan in force."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from kubernetes import client
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from tests.e2e.world import absent, train_two_stages
from tests.waiting import eventually

from perseus_core import keys
from perseus_sim.cluster.simulated_cluster import SimulatedCluster

pytestmark = pytest.mark.e2e

CRDS = Path(__file__).resolve().parents[2] / "deploy" / "crds"
JOBS = (keys.API_GROUP, keys.API_VERSION, "default", keys.PLURAL)
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(services.TraceServiceServicer):  # type: ignore[misc]
    """What an OpenTelemetry collector does: it takes spans by OTLP."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[Any] = []
        self._server = grpc.server(ThreadPoolExecutor(2))
        services.add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    def Export(self, request: Any, context: Any) -> Any:
        with self._lock:
            for resource in request.resource_spans:
                service = {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"]
                assert service == "perseus-operator"
                self._spans += [span for scope in resource.scope_spans for span in scope.spans]
        return messages.ExportTraceServiceResponse()

    def traces(self) -> dict[str, dict[str, list[Any]]]:
        """The spans by name, of each trace by its id."""
        with self._lock:
            found: dict[str, dict[str, list[Any]]] = {}
            for span in self._spans:
                found.setdefault(span.trace_id.hex(), {}).setdefault(span.name, []).append(span)
            return found

    def close(self) -> None:
        self._server.stop(None).wait()


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    yield running
    running.close()


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in span.attributes}


def test_a_trace_leads_from_the_edit_to_the_plan_in_force(cluster: SimulatedCluster, collector: Collector) -> None:
    custom = client.CustomObjectsApi(cluster.api)
    cluster.apply(CRDS)
    eventually(lambda: not absent(lambda: custom.list_namespaced_custom_object(*JOBS)), "PerseusJob is not served")
    flags = "--otlp-endpoint", f"http://127.0.0.1:{collector.port}", "--status-interval-s", "0.2"
    cluster.start_operator(*flags)
    spec = train_two_stages(cluster)
    metadata = {"name": "gpt3", "annotations": {keys.ANNOTATION_TRACE: f"00-{TRACE}-{PARENT}-01"}}
    job = {"apiVersion": f"{keys.API_GROUP}/{keys.API_VERSION}", "kind": keys.KIND, "metadata": metadata}
    cluster.apply({**job, "spec": spec})

    spans = eventually(
        lambda: (found := collector.traces().get(TRACE, {})).get("plan in force") and found,
        "the trace of the user who applied the job does not lead to a plan",
        every_s=0.2,
    )
    assert {"edit", "read inputs", "solve", "acquire", "push", "select", "plan in force"} <= set(spans)
    [edit], [in_force] = spans["edit"], spans["plan in force"]
    assert edit.parent_span_id.hex() == PARENT
    assert attributes(edit).items() >= {"k8s.namespace.name": "default", "perseus.job.name": "gpt3"}.items()
    steps = [span for name, named in spans.items() if name != "edit" for span in named]
    assert {span.parent_span_id for span in steps} == {edit.span_id}
    assert all(edit.start_time_unix_nano <= span.start_time_unix_nano for span in steps)
    assert all(span.end_time_unix_nano <= in_force.end_time_unix_nano for span in spans["select"])
    assert {attributes(span)["k8s.node.name"] for span in spans["select"]} == {"node-0"}
    assert "Point" in attributes(in_force)["perseus.plan"]

    def edited(objective: dict[str, Any]) -> int:
        patch = {"metadata": {"annotations": {keys.ANNOTATION_TRACE: None}}, "spec": {"objective": objective}}
        kind = "application/merge-patch+json"
        changed = custom.patch_namespaced_custom_object(*JOBS, "gpt3", patch, _content_type=kind)
        return int(changed["metadata"]["generation"])

    generation = edited({"type": "MinEnergy"})

    def second() -> Any:
        return [
            spans
            for trace, spans in collector.traces().items()
            if trace != TRACE and attributes(spans["edit"][0])["perseus.job.generation"] == generation
            if "plan in force" in spans
        ]

    [spans] = eventually(second, "the second edit has no trace of its own", every_s=0.2)
    assert not spans["edit"][0].parent_span_id
    assert "select" in spans
    assert "acquire" not in spans, "the lease was there"

    # A collector that has gone takes no plan with it.
    collector.close()
    generation = edited({"type": "MaxThroughput"})

    def followed() -> bool:
        conditions = custom.get_namespaced_custom_object(*JOBS, "gpt3")["status"]["conditions"]
        [applied] = [c for c in conditions if c["type"] == "PlanApplied"]
        return bool(applied["status"] == "True" and applied["observedGeneration"] == generation)

    eventually(followed, "the third edit is not followed", every_s=0.2)
    cluster.stop_operator()
