"""Engine sessions: what a serving engine calls after each step, in about ten microseconds, without a wait.

``EngineSession`` writes what the step did into the memory that the background thread (``perseus_client.connector``)
obtains from the agent. Between steps that thread says that the load is still as it was: for as long as there is none,
but of requests that are served only for ``STEP_S``, so that an engine that hangs becomes silent.

>>> from perseus_client.engine import EngineSession
>>> session = EngineSession("/run/perseus/agent.sock", EngineHello("mine", "1.0", "llama", "tp 1"))
>>> session.step(0.2, waiting=1, prefilling=0, running=7, step_s=0.02, generated_tokens=7)
>>> session.close()
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Sequence
from typing import Final

from perseus_client.connector import Connector, Introduction
from perseus_core.lengths import length_of, length_place
from perseus_core.serving import place_of
from perseus_proto.engine_channel import EngineWriter
from perseus_proto.engine_hello import EngineHello, encode_engine_hello
from perseus_proto.hello import Welcome

log = logging.getLogger("perseus_client")

STEP_S: Final = 0.3
"""How long a step may last before the engine is silent: what takes longer computes prompts, for which the clocks are
the default ones in any case."""


class EngineSession:
    """The connection of one engine to the agent of its node. Without an agent every call does nothing.

    One thread calls ``step``. No method raises or blocks.
    """

    __slots__ = ("__weakref__", "_busy_until_s", "_connector")

    def __init__(self, socket_path: str, hello: EngineHello) -> None:
        """Start the background thread that looks for the agent.

        Args:
            socket_path: of the agent's Unix socket.
            hello: who the engine is.

        Raises:
            ChannelError: the hello is too long as a whole.
        """
        self._busy_until_s = 0.0
        introduction = Introduction(encode_engine_hello(hello), str(hello), "engine", _open, self._beat)
        self._connector = Connector(socket_path, introduction)
        _live.add(self)
        self._connector.start()

    @property
    def connected(self) -> bool:
        """Whether an agent follows this engine now."""
        return self._connector.writer is not None

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until an agent follows this engine; False after the timeout."""
        return self._connector.wait(timeout_s)

    def step(
        self,
        kv_share: float,
        *,
        waiting: int,
        prefilling: int,
        running: int,
        step_s: float | None = None,
        computes_prompt: bool = False,
        prompt_tokens: int = 0,
        generated_tokens: int = 0,
        preempted: int = 0,
        first_tokens_s: Sequence[float] = (),
        tokens_s: Sequence[float] = (),
        requests: int = 0,
        lengths: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Say what a step did, and the load after it.

        Args:
            kv_share: of the memory for keys and values, how much is used: 0 to 1.
            waiting: requests of which no token of the prompt was computed yet.
            prefilling: requests of which a part of the prompt was computed.
            running: requests that decode.
            step_s: how long the step took, seconds; None: not known, as after a pause.
            computes_prompt: the step computed tokens of prompts.
            prompt_tokens: that were computed; those of a cached prefix are not.
            generated_tokens: that came out; with speculative decoding these may be several of one request.
            preempted: requests that gave their memory back.
            first_tokens_s: of each request that got its first token: the time since its arrival.
            tokens_s: of each request that ended: its mean time between tokens.
            requests: that ended.
            lengths: of each request that ended: tokens of its prompt, and of its answer.
        """
        try:
            writer = self._connector.writer
            if writer is None:
                return
            busy = waiting + prefilling + running > 0
            self._busy_until_s = time.monotonic() + STEP_S if busy else 0.0
            if first_tokens_s or tokens_s or lengths:
                length_places = [length_place(length_of(prompt), length_of(output)) for prompt, output in lengths]
                writer.count_times([*map(place_of, first_tokens_s)], [*map(place_of, tokens_s)], length_places)
            writer.step(
                waiting,
                prefilling,
                running,
                int(kv_share * 1e6),
                step_us=None if step_s is None else int(step_s * 1e6),
                computes_prompt=computes_prompt,
                prompt_tokens=prompt_tokens,
                generated_tokens=generated_tokens,
                preempted=preempted,
                requests=requests,
            )
        except Exception:
            log.exception("perseus_client: disabled for the rest of this process")
            self.close()

    def close(self) -> None:
        """Disconnect from the agent, which returns the GPUs to their default clocks. Further calls do nothing."""
        self._connector.stop()

    def _beat(self, writer: EngineWriter) -> None:
        if not 0.0 < self._busy_until_s <= time.monotonic():
            writer.beat()


def _open(welcome: Welcome) -> EngineWriter:
    return EngineWriter(welcome.memory_fd, welcome.event_fd)


_live: weakref.WeakSet[EngineSession] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked child: release what is the parent's."""
    for session in list(_live):
        session._connector.abandon()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
