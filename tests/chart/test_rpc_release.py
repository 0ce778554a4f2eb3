"""The operator's RPC on a real API server, enabled by an upgrade: only the Secret that the chart makes gives access.

The upgrade renews no other certificate.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable
from typing import Any

import grpc
from kubernetes import client
from tests.chart.conftest import CHART, NAMESPACE, delete_definitions, secrets, until
from tests.doubles.process_node import ProcessNode
from tests.waiting import PATIENCE_S

from perseus_proto.v1alpha1 import operator_pb2, operator_pb2_grpc

CALLER = "perseus-infrastructure-tls"


def declare(node: ProcessNode, port: int, secret: dict[str, str]) -> grpc.StatusCode | None:
    """Declare a straggler on a GPU without training, with the certificate and the authority of a Secret.

    Returns:
        The status of the request; None if the operator has no pod.
    """
    pem = {key: b64decode(text) for key, text in secret.items()}
    credentials = grpc.ssl_channel_credentials(pem["ca.crt"], pem["tls.key"], pem["tls.crt"])
    options = [("grpc.ssl_target_name_override", "perseus-operator")]
    request = operator_pb2.SetStragglerRequest(id="GPU-nobody", slowdown=1.2)
    try:
        address = node.address_of("perseus-operator")
    except KeyError:
        return None
    with grpc.secure_channel(f"{address}:{port}", credentials, options) as channel:
        future = operator_pb2_grpc.OperatorStub(channel).SetStraggler.future(request, timeout=PATIENCE_S)
        future.exception()
        code: grpc.StatusCode = future.code()
        return code


def test_enabled_by_an_upgrade_it_serves_only_the_caller_of_the_secret(
    on_server: Callable[..., str], api: Any, node: ProcessNode, namespace: str
) -> None:
    on_server("install", "perseus", str(CHART), "--set", "agent.enabled=false")
    before = secrets(api)
    assert CALLER not in before
    core = client.CoreV1Api(api)

    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", "rpc.enabled=true,rpc.port=50073")
    now = secrets(api)
    assert {name: data for name, data in now.items() if name != CALLER} == before
    (port,) = core.read_namespaced_service("perseus-rpc", NAMESPACE).spec.ports
    until("it answers the caller", lambda: declare(node, port.port, now[CALLER]) is grpc.StatusCode.NOT_FOUND, 120)
    # An agent's certificate has another authority and another name.
    assert declare(node, port.port, now["perseus-agent-tls"]) is grpc.StatusCode.UNAVAILABLE

    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", "rpc.from=null")
    assert secrets(api)[CALLER] == now[CALLER], "an upgrade keeps it"
    renamed = "rpc.allowedNames={power,perseus-infrastructure}"
    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", renamed)
    power = secrets(api)[CALLER]
    assert power["tls.crt"] != now[CALLER]["tls.crt"]
    until("it answers under the other name", lambda: declare(node, port.port, power) is grpc.StatusCode.NOT_FOUND, 120)

    on_server("upgrade", "perseus", str(CHART), "--reset-then-reuse-values", "--set", "rpc.enabled=false")
    assert secrets(api) == before
    assert "perseus-rpc" not in {each.metadata.name for each in core.list_namespaced_service(NAMESPACE).items}
    on_server("uninstall", "perseus")
    delete_definitions(api)
