"""Two engines of vLLM itself, one that computes prompts and one that generates tokens, with a connector of vLLM's own
between them: what the plugin and the page say of each.

`ExampleConnector` writes keys and values to files, within a step, all but the last block of a prompt. NIXL sends them
over a network, between steps, with all of the prompt; vLLM lets the request wait until they are there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from tests.vllm.conftest import Vllm, vllm_python
from tests.vllm.server import Ask, prompt_of
from tests.vllm.watched import Watched

from perseus_operator.api.serving.spec import Role
from perseus_operator.families.serving.features.signals.replicas import said_role

EXAMPLE, NIXL = "ExampleConnector", "NixlConnector"
ROLES = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE}
BLOCK = 32
"""Tokens; the smallest that vLLM has on a CPU."""
ASKS = [Ask(BLOCK + 1 + k, 40) for k in range(12)]
"""Prompts of one step, since `ExampleConnector` stores no more."""
COMING, SENT = "external_kv_transfer", "local_compute"


@dataclass
class Split:
    """Both engines."""

    connector: str
    prefill: Watched
    decode: Watched

    def ask(self, asks: Sequence[Ask]) -> None:
        """Make these requests, one after another, while one keeps the decode engine busy."""
        asyncio.run(self._ask(asks))

    async def _ask(self, asks: Sequence[Ask]) -> None:
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as group:
            busy = Ask(4, 800)
            group.create_task(self.decode.server.complete(session, prompt_of(busy.prompt), busy.generated))
            self.decode.asked.append(busy)
            for ask in asks:
                await self._one(session, ask)

    async def _one(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        prompt = prompt_of(ask.prompt)
        sends: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        sends = {"kv_transfer_params": sends} if self.connector == NIXL else {}
        first = await self.prefill.server.complete(session, prompt, 1, return_token_ids=True, **sends)
        receives = {"kv_transfer_params": first["kv_transfer_params"]} if sends else {}
        # The example takes the first token for a part of the prompt.
        prompt += [] if sends else first["choices"][0]["token_ids"]
        await self.decode.server.complete(session, prompt, ask.generated, **receives)
        self.prefill.asked.append(Ask(ask.prompt, 1))
        self.decode.asked.append(Ask(len(prompt), ask.generated))


@pytest.fixture(scope="module", params=[EXAMPLE, NIXL])
def split(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Split]:
    python = vllm_python()
    if python is None:
        pytest.skip("no vLLM in .venv-vllm: make vllm installs it")
    if request.param == NIXL and subprocess.run([python, "-c", "import nixl._api"], check=False).returncode:
        pytest.skip("no NIXL in .venv-vllm: its pip installs nixl and nixl-cu13")
    folder, engines = tmp_path_factory.mktemp("vllm"), {}
    with ExitStack() as stack:
        for role in ROLES:
            transfer = {
                "kv_connector": request.param,
                "kv_role": role,
                "kv_buffer_device": "cpu",
                "kv_connector_extra_config": {"shared_storage_path": str(folder / "kv")},
            }
            flags = [f"--block-size={BLOCK}", f"--kv-transfer-config={json.dumps(transfer)}"]
            network = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()),
                "UCX_TLS": "tcp,self",
            }
            opened = Watched.open(Vllm(python, ""), folder, tmp_path_factory.mktemp("node"), flags, **network)
            engines[role] = stack.enter_context(opened)
        for engine in engines.values():
            engine.wait_ready()
        yield Split(request.param, *engines.values())


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def test_what_each_engine_does_its_own_configuration_says(split: Split) -> None:
    for engine, role in zip((split.prefill, split.decode), ROLES.values(), strict=True):
        flags = {flag.name: flag.value for flag in engine.engines[0].flags}
        assert flags["kv_transfer.kv_connector"] == split.connector
        assert said_role(flags.items(), {}) is role


def test_what_came_from_the_other_engine_is_no_prompt_that_was_computed(split: Split) -> None:
    split.ask(ASKS)
    for engine in (split.prefill, split.decode):
        engine.settle()
        page = engine.page()
        by_source = sources(engine)
        assert engine.total("prompt_tokens") == page.prompt_tokens == by_source[SENT]
        assert by_source[SENT] + by_source[COMING] == engine.prompt
        assert engine.total("generated_tokens") == page.generated_tokens == engine.generated
        assert engine.total("requests") == engine.times("first_tokens") == page.first_tokens.count == len(engine.asked)
        assert (page.waiting, page.running) == (0, 0)
        # A step that computed no token of a prompt is one that decodes, whichever request got its first token of it.
        assert all(window.prompt_tokens for window in engine.windows if window.prompt_steps)
    assert sources(split.prefill)[COMING] == 0
    assert sources(split.decode)[COMING] >= BLOCK * len(ASKS)


def sources(engine: Watched) -> dict[str, int]:
    """Tokens of prompts by where they came from, as vLLM's page says."""
    found = {}
    for line in engine.server.get("/metrics").decode().splitlines():
        if line.startswith("vllm:prompt_tokens_by_source_total{"):
            found[line.partition('source="')[2].partition('"')[0]] = int(float(line.rpartition(" ")[2]))
    return found
