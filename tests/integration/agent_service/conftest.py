"""A real agent process, and a stub of its gRPC service."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.doubles.agent_calls import freed
from tests.doubles.recording_node import RecordingNode

from perseus_proto.v1alpha1 import agent_pb2_grpc as stubs


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RecordingNode]:
    with RecordingNode.open(tmp_path_factory.mktemp("node"), gpus=3) as node:
        node.start_agent("--telemetry-events=64")
        yield node


@pytest.fixture
def stub(node: RecordingNode) -> Iterator[stubs.AgentStub]:
    with freed(node) as stub:
        yield stub
