"""Every error class of the agent, its gRPC status, and the operator's error for it, which says whether to retry."""

from __future__ import annotations

import grpc
import grpc.aio
import pytest

from perseus_agent import errors as agent
from perseus_agent.servers.grpc_service import ERROR_METADATA, STATUS, status_of
from perseus_operator.clients.agents.client import _translate
from perseus_operator.errors import AgentError, AgentFenced, AgentRefused, AgentUnavailable

EXPECTED: dict[type[agent.AgentError], type[AgentError]] = {
    agent.InvalidRequest: AgentRefused,
    agent.NotAuthorised: AgentRefused,
    agent.StaleEpoch: AgentFenced,
    agent.NoLease: AgentRefused,
    agent.UnknownPlan: AgentRefused,
    agent.PodTaken: AgentRefused,
    agent.TooMuch: AgentUnavailable,
    agent.Draining: AgentUnavailable,
    agent.KubeletUnavailable: AgentUnavailable,
    agent.DeviceError: AgentUnavailable,
    agent.JournalError: AgentUnavailable,
    agent.PeerRefused: AgentUnavailable,
    agent.SettingsError: AgentUnavailable,
}


def test_the_table_is_complete() -> None:
    assert EXPECTED.keys() == STATUS.keys()


@pytest.mark.parametrize("kind", EXPECTED, ids=lambda kind: kind.__name__)
def test_the_operator_translates_every_error(kind: type[agent.AgentError]) -> None:
    error = kind("the message")
    answered = grpc.aio.AioRpcError(
        status_of(error),
        initial_metadata=grpc.aio.Metadata(),
        trailing_metadata=grpc.aio.Metadata((ERROR_METADATA, kind.__name__)),
        details=str(error),
    )
    translated = _translate(answered)
    assert type(translated) is EXPECTED[kind]
    assert "the message" in str(translated)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_missing_answer_is_retried(code: grpc.StatusCode) -> None:
    answered = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert type(_translate(answered)) is AgentUnavailable
