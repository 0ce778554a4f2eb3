"""vLLM's plugin: an installed package that vLLM finds by its entry point, without a flag and without a change.

vLLM makes a ``PerseusStatLogger`` in the process that serves requests and calls ``record`` after each engine step. That
becomes a step of an ``EngineSession``; without the agent's socket it does nothing. A version whose statistics have
another shape is logged once, and then left alone.

What vLLM counts and what is meant here are not the same:

- A request that runs and had no output in a step has a part of its prompt computed: it is prefilling.
- Prompt tokens are those that were computed: not those that the prefix cache or another engine had. A step that gives a
  request its first token and computed none of its prompt, since another engine did, is one that decodes.
- A step takes the time since the one before it, if there was something to do in between.
- A request that vLLM defers waits for keys and values of another engine, where there is a connector for them; no clock
  makes it come sooner, so it is not one of those that wait.
- With speculative decoding a request has several tokens of one step: its time between tokens is the mean that vLLM
  takes when it ends, and not a step's.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from typing import Any, Final

from perseus_client.engine import EngineSession
from perseus_core.keys import ENV_SOCKET
from perseus_proto.engine_hello import MAX_FLAG_VALUE, MAX_MODEL, EngineHello

log = logging.getLogger("perseus_client")

try:
    from vllm.v1.metrics.loggers import StatLoggerBase
except Exception:  # noqa: BLE001 - no vLLM, or one without this interface, whatever its import raises
    StatLoggerBase = object

_FLAGS: Final = (
    ("model_config", ("dtype", "quantization", "max_model_len", "enforce_eager")),
    ("cache_config", ("block_size", "cache_dtype", "enable_prefix_caching", "gpu_memory_utilization")),
    ("scheduler_config", ("max_num_seqs", "max_num_batched_tokens", "enable_chunked_prefill", "async_scheduling")),
    ("parallel_config", ("enable_expert_parallel", "enable_eplb", "distributed_executor_backend")),
    ("speculative_config", ("method", "num_speculative_tokens", "model")),
    ("kv_transfer_config", ("kv_connector", "kv_role")),
)
"""Of vLLM's configuration, what changes how long a step takes; a version that has one of them not leaves it out."""


class PerseusStatLogger(StatLoggerBase):  # type: ignore[misc]  # vLLM's, or object
    """Tells the agent of the node what each step of one engine did."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        """``vllm_config``: of the engine; ``engine_index``: of the engine within this process."""
        self._session: EngineSession | None = None
        self._stepped_s = 0.0
        self._load = (0, 0, 0, 0.0)
        self._cached_tokens = 0
        self._receives = getattr(getattr(vllm_config, "kv_transfer_config", None), "kv_connector", None) is not None
        path = os.environ.get(ENV_SOCKET)
        if not path:
            return
        try:
            why = _not_followed(vllm_config, engine_index)
            if why:
                log.warning("perseus_client: this engine runs at default clocks: %s", why)
                return
            self._session = EngineSession(path, hello_of(vllm_config))
        except Exception as error:  # noqa: BLE001 - nothing may reach the engine
            log.error("perseus_client: this engine runs at default clocks: %s", error)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        *more: Any,  # noqa: ARG002 - of newer versions, which pass statistics of caches
        **named: Any,  # noqa: ARG002
    ) -> None:
        """Take a step; vLLM calls it. Either may be None: no load, or no output."""
        session = self._session
        if session is None:
            return
        try:
            self._step(session, scheduler_stats, iteration_stats)
        except Exception as error:  # noqa: BLE001 - nothing may reach the engine
            log.error("perseus_client: this version of vLLM is not known, so it runs at default clocks: %r", error)
            self._session = None
            session.close()

    def log_engine_initialized(self) -> None:
        """Do nothing: vLLM asks for it."""

    def log(self) -> None:
        """Do nothing: vLLM asks for it."""

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        """Do nothing: an engine that sleeps has no requests."""

    def _step(self, session: EngineSession, scheduler: Any, iteration: Any) -> None:
        now_s = time.monotonic()
        waiting, prefilling, running, kv_share = self._load
        step_s = now_s - self._stepped_s if waiting + prefilling + running else None
        self._stepped_s = now_s
        first_tokens_s: Sequence[float] = ()
        tokens_s: Sequence[float] = ()
        lengths: Sequence[tuple[int, int]] = ()
        prompt_tokens = generated_tokens = preempted = requests = outputs = 0
        if iteration is not None:
            first_tokens_s = iteration.time_to_first_tokens_iter
            finished = iteration.finished_requests
            requests = len(finished)
            outputs = len(first_tokens_s) + len(iteration.inter_token_latencies_iter) - requests
            if finished:
                tokens_s = [one.mean_time_per_output_token for one in finished if one.num_generation_tokens > 1]
                lengths = [(one.num_prompt_tokens, one.num_generation_tokens) for one in finished]
            prompt_tokens = self._computed(iteration, scheduler)
            generated_tokens = iteration.num_generation_tokens
            preempted = iteration.num_preempted_reqs
        if scheduler is not None:
            all_running = scheduler.num_running_reqs
            # Those that ended had output and run no more. Of a step in which none had any, as with one long prompt
            # alone, vLLM gives no statistics.
            prefilling = max(0, all_running - outputs)
            running = all_running - prefilling
            deferred = 0 if self._receives else getattr(scheduler, "num_skipped_waiting_reqs", 0)
            waiting = scheduler.num_waiting_reqs + deferred
            kv_share = scheduler.kv_cache_usage
            self._load = waiting, prefilling, running, kv_share
        session.step(
            kv_share,
            waiting=waiting,
            prefilling=prefilling,
            running=running,
            step_s=step_s,
            computes_prompt=prefilling > 0 or prompt_tokens > 0,
            prompt_tokens=prompt_tokens,
            generated_tokens=generated_tokens,
            preempted=preempted,
            first_tokens_s=first_tokens_s,
            tokens_s=tokens_s,
            requests=requests,
            lengths=lengths,
        )

    def _computed(self, iteration: Any, scheduler: Any) -> int:
        """Tokens of prompts that were computed. Older versions count them together with those of cached prefixes, which
        they have said when the prompt was scheduled."""
        stats = getattr(iteration, "prompt_token_stats", None)
        if stats is not None:
            return int(stats.computed)
        if scheduler is not None:
            self._cached_tokens += scheduler.prefix_cache_stats.hits if scheduler.prefix_cache_stats else 0
        cached = min(self._cached_tokens, iteration.num_prompt_tokens)
        self._cached_tokens -= cached
        return int(iteration.num_prompt_tokens - cached)


def hello_of(config: Any) -> EngineHello:
    """What vLLM's configuration says of an engine.

    Raises:
        AttributeError: it has another shape.
        ChannelError: a text of it breaks a rule.
    """
    model, parallel = config.model_config, config.parallel_config
    flags: dict[str, str] = {}
    for part, names in _FLAGS:
        values = getattr(config, part, None)
        for name in names:
            value = getattr(values, name, None)
            if value is not None:
                flags[f"{part.removesuffix('_config')}.{name}"] = _printable(value, MAX_FLAG_VALUE)
    revision = getattr(model, "revision", None)
    split = f"tp {parallel.tensor_parallel_size}, pp {parallel.pipeline_parallel_size}"
    return EngineHello(
        name="vllm",
        version=_version(),
        model=_printable(f"{model.model}@{revision}" if revision else model.model, MAX_MODEL),
        parallelism=f"{split}, dp {getattr(parallel, 'data_parallel_size', 1)}",
        flags=tuple(sorted(flags.items())),
    )


def _not_followed(config: Any, engine_index: int) -> str:
    """Why an engine has no clock of its own; empty: it has."""
    parallel = config.parallel_config
    local = getattr(parallel, "data_parallel_size_local", 1)
    if local > 1 or (engine_index and getattr(parallel, "data_parallel_size", 1) == 1):
        return f"{local} engines share this container's GPUs; give each a pod of its own"
    servers = getattr(parallel, "_api_process_count", 1)
    if servers > 1:
        return f"{servers} API servers share the engine, so none sees all of its requests; use --api-server-count 1"
    return ""


def _version() -> str:
    module = sys.modules.get("vllm")
    return str(getattr(module, "__version__", None) or metadata.version("vllm"))


def _printable(value: object, most: int) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))[:most]
