"""A real vLLM on CPU, as an image that serves runs it: our client is installed, and no flag names it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from tests.vllm.tiny_model import write_tiny_model

READY_S = 300.0
BATCHED_TOKENS = 64
"""Of a step: a longer prompt is computed in parts."""
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
_FLAGS = (
    "--load-format=dummy",
    "--enforce-eager",
    "--no-enable-prefix-caching",
    "--max-num-seqs=16",
    f"--max-num-batched-tokens={BATCHED_TOKENS}",
    "--host=127.0.0.1",
)


@dataclass(frozen=True)
class Ask:
    """A request: so many tokens of a prompt, and so many to be generated."""

    prompt: int
    generated: int


@dataclass
class VllmServer:
    """The process that serves requests; that of the engine is its child."""

    process: subprocess.Popen[bytes]
    port: int
    model: str
    log: Path

    @classmethod
    @contextmanager
    def open(
        cls, python: Path, folder: Path, script: Sequence[str] = (), flags: Sequence[str] = (), **environment: str
    ) -> Iterator[VllmServer]:
        """Start it, and end it with all its processes.

        Args:
            python: that has vLLM.
            folder: for the model and the log, made where they are not there; servers of one folder share the model.
            script: what runs instead of vLLM's server, with its flags.
            flags: further ones of the server.
            environment: further variables.
        """
        if not (folder / "model").is_dir():
            write_tiny_model(folder / "model")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["nice", str(python), *(script or ("-m", "vllm.entrypoints.openai.api_server")), *_FLAGS, *flags]
        command += [f"--port={port}", f"--model={folder / 'model'}"]
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("PERSEUS", "VLLM"))}
        log = folder / f"log-{port}"
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env={**kept, **_ENVIRONMENT, **environment},
                cwd=folder,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield cls(process, port, str(folder / "model"), log)
        finally:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def wait_ready(self) -> None:
        """Until it serves.

        Raises:
            AssertionError: it does not.
        """
        deadline_s = time.monotonic() + READY_S
        while True:
            try:
                self.get("/health")
            except OSError:
                tail = self.log.read_text(errors="replace")[-6000:]
                assert self.process.poll() is None, tail
                assert time.monotonic() < deadline_s, tail
                time.sleep(0.2)
            else:
                return

    def get(self, path: str) -> bytes:
        """A page of the server."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            content: bytes = answer.read()
        return content

    def ask(self, *asks: Ask) -> None:
        """Make these requests at the same time, and wait for all answers."""
        asyncio.run(self.load(asks, at_once=len(asks)))

    async def load(self, asks: Sequence[Ask], at_once: int) -> None:
        """Make these requests, never more than so many at the same time."""
        free = asyncio.Semaphore(at_once)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
            asyncio.TaskGroup() as group,
        ):
            for ask in asks:
                await free.acquire()
                group.create_task(self._complete(session, ask)).add_done_callback(lambda _: free.release())

    async def _complete(self, session: aiohttp.ClientSession, ask: Ask) -> None:
        usage = (await self.complete(session, prompt_of(ask.prompt), ask.generated))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (ask.prompt, ask.generated)

    async def complete(
        self, session: aiohttp.ClientSession, prompt: Sequence[int], generated: int, **more: Any
    ) -> dict[str, Any]:
        """Complete a prompt.

        Args:
            session: to ask by.
            prompt: its tokens.
            generated: how many tokens to generate.
            more: fields of the request.
        """
        request = {"model": self.model, "prompt": prompt, "max_tokens": generated, "ignore_eos": True, **more}
        async with session.post(f"http://127.0.0.1:{self.port}/v1/completions", json=request) as answer:
            assert answer.status == 200, await answer.text()
            content: dict[str, Any] = await answer.json()
        return content


def prompt_of(tokens: int) -> list[int]:
    """Return a prompt that no other one begins with."""
    return [random.randrange(256) for _ in range(tokens)]
