"""The operator's settings: one frozen dataclass from which flags, environment and ``--help`` are made.

Each field says its effect, its unit, and why its default is what it is; the chart's values use the same words.
Environment: ``PERSEUS_OPERATOR_`` and the field's name in capitals; a flag wins over it. Nothing is read here but argv
and environ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from perseus_operator.planning.planner import Limits
from perseus_proto import keys
from perseus_proto.addresses import parse_address

ENVIRONMENT_PREFIX: Final = "PERSEUS_OPERATOR_"


def _setting(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "minimum": minimum})


class InvalidSetting(ValueError):
    """A setting breaks a rule; the message names the flag."""


@dataclass(frozen=True)
class Settings:
    """Everything that may be chosen about one operator."""

    namespaces: str = _setting(
        "",
        "Namespaces to serve, separated by commas; the CRD must be there before. Empty: all of them, which needs"
        " cluster-wide rights.",
    )
    agent_namespace: str = _setting(
        "perseus-system", "Namespace of the agents' pods, and of the ConfigMap that counts epochs: the operator's own."
    )
    agent_poll_s: float = _setting(
        10.0, "How often the agents' pods are listed, seconds. A DaemonSet's pods change rarely.", minimum=0.1
    )
    tls_cert: str = _setting("", "Certificate chain (PEM) shown to agents.")
    tls_key: str = _setting("", "Private key (PEM) of that certificate.")
    tls_ca: str = _setting("", "Certificate authority (PEM) that signs the agents' certificates.")
    tls_server_name: str = _setting(
        "perseus-agent", "Name that every agent's certificate must carry: agents are reached by address, not by name."
    )
    insecure: bool = _setting(False, "Speak to agents without TLS. Demonstrations only.")
    agent_timeout_s: float = _setting(
        3.0,
        "Longest wait for one answer of an agent, seconds. Below a third of the lease, so that a renewal can be"
        " repeated before the lease runs out.",
        minimum=0.01,
    )
    lease_ttl_s: float = _setting(
        30.0,
        "GPUs return to default clocks this long after the operator was last heard, seconds; it renews at a third."
        " Longer survives longer operator restarts, shorter frees GPUs sooner.",
        minimum=0.1,
    )
    release_timeout_s: float = _setting(
        10.0,
        "When a PerseusJob is deleted, how long agents are asked to give clocks back before it goes, seconds. An agent"
        " that does not answer by then lets the lease run out.",
        minimum=0.1,
    )
    solve_workers: int = _setting(2, "Solver processes at a time.", minimum=1)
    solve_timeout_s: float = _setting(600.0, "A solve is stopped after this time, seconds.", minimum=0.1)
    solve_memory_mib: int = _setting(
        8192, "Address space of one solver process, MiB: a runaway solve must not take the operator along.", minimum=512
    )
    profile_retry_s: float = _setting(
        5.0, "How soon a missing or wrong profile is looked at again, seconds.", minimum=0.05
    )
    profile_refresh_s: float = _setting(
        60.0, "How soon a good profile is looked at again for changes, seconds.", minimum=0.05
    )
    calibrate_after: int = _setting(
        40,
        "Iterations of a job that are seen before its iteration times are calibrated; after that every 100. Fewer are"
        " told apart from noise less surely.",
        minimum=28,
    )
    status_interval_s: float = _setting(
        5.0,
        "Shortest time between two writes of measured figures to one PerseusJob, seconds. Conditions are written at"
        " once.",
        minimum=0.05,
    )
    metrics_address: str = _setting(
        f"0.0.0.0:{keys.DEFAULT_OPERATOR_METRICS_PORT}",
        "host:port of /metrics, /healthz and /readyz; 0.0.0.0 and [::] are all addresses, of both families. Port 0: any"
        " free one. Empty: none of them is served.",
    )
    web_address: str = _setting(
        f"127.0.0.1:{keys.DEFAULT_WEB_PORT}",
        "host:port of the read-only page that shows each job's frontier. It has no login: on loopback, only who may"
        " port-forward to the pod reaches it. Port 0: any free one. Empty: not served.",
    )
    webhook_address: str = _setting(
        "",
        "host:port of the admission webhook that gives labelled pods the agent's socket as they are created. Empty: not"
        " served.",
    )
    webhook_cert: str = _setting("", "Certificate chain (PEM) shown to the API server; renewed ones are taken up.")
    webhook_key: str = _setting("", "Private key (PEM) of that certificate.")
    agent_socket: str = _setting(
        keys.DEFAULT_SOCKET_PATH,
        "Path of the agents' socket on nodes, and in the containers that the webhook gives it.",
    )
    rpc_address: str = _setting(
        "",
        "host:port of the gRPC service by which infrastructure tells stragglers (set_straggler). Needs TLS. Port 0: any"
        " free one. Empty: not served.",
    )
    rpc_allowed_san: str = _setting(
        "perseus-infrastructure",
        "Names, separated by commas, of which a caller's certificate must carry one to be served there.",
    )
    rpc_ca: str = _setting("", "Certificate authority (PEM) that signs callers' certificates. Empty: that of --tls-ca.")
    ready_file: str = _setting(
        "", "Written once the operator serves: JSON with epoch and the addresses really bound. Empty: none."
    )
    log_level: str = _setting("INFO", "DEBUG, INFO, WARNING or ERROR.")
    log_format: str = _setting("json", "json: one object a line with the PerseusJob it is about. text: for people.")

    def __post_init__(self) -> None:
        for setting in fields(self):
            minimum = setting.metadata["minimum"]
            if minimum is not None and getattr(self, setting.name) < minimum:
                raise InvalidSetting(f"{_flag(setting.name)}: must be at least {minimum}")
        self._check_tls()
        if 3 * self.agent_timeout_s > self.lease_ttl_s:
            raise InvalidSetting("--agent-timeout-s: must be at most a third of --lease-ttl-s")
        if not self.agent_namespace:
            raise InvalidSetting("--agent-namespace: must not be empty")
        for name in ("metrics_address", "web_address", "webhook_address", "rpc_address"):
            if address := getattr(self, name):
                try:
                    parse_address(address)
                except ValueError as error:
                    raise InvalidSetting(f"{_flag(name)}: {error}") from None
        if self.webhook_address and not (self.webhook_cert and self.webhook_key):
            raise InvalidSetting("--webhook-cert, --webhook-key: both are needed with --webhook-address")
        if not self.agent_socket.startswith("/") or self.agent_socket.count("/") < 2:
            raise InvalidSetting("--agent-socket: must be an absolute path below a directory, which pods mount")
        if self.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise InvalidSetting("--log-level: must be DEBUG, INFO, WARNING or ERROR")
        if self.log_format not in {"json", "text"}:
            raise InvalidSetting("--log-format: must be json or text")

    def _check_tls(self) -> None:
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if self.insecure and any(tls):
            raise InvalidSetting("--insecure: excludes --tls-cert, --tls-key and --tls-ca")
        if not self.insecure and not all(tls):
            raise InvalidSetting(
                "--tls-cert, --tls-key, --tls-ca: all three are needed (or --insecure for a demonstration)"
            )
        if self.rpc_address and (self.insecure or not self.rpc_allowed_sans):
            raise InvalidSetting("--rpc-address: is served with TLS and to the names of --rpc-allowed-san alone")

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """The namespaces to serve; empty: all."""
        return tuple(name.strip() for name in self.namespaces.split(",") if name.strip())

    @property
    def rpc_allowed_sans(self) -> frozenset[str]:
        """The names in ``rpc_allowed_san``."""
        return frozenset(filter(None, (name.strip() for name in self.rpc_allowed_san.split(","))))

    @property
    def limits(self) -> Limits:
        """What the planner must know."""
        return Limits(self.lease_ttl_s, self.profile_retry_s, self.profile_refresh_s, self.calibrate_after)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings from flags, then environment, then defaults.

    Raises:
        InvalidSetting: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).
    """
    given: dict[str, tuple[str, str]] = {}
    for setting in fields(Settings):
        variable = ENVIRONMENT_PREFIX + setting.name.upper()
        if variable in environment:
            given[setting.name] = (variable, environment[variable])
    for name, text in vars(_parser().parse_args(list(arguments))).items():
        if text is not None:
            given[name] = (_flag(name), text)
    return Settings(**{name: _convert(name, text, source) for name, (source, text) in given.items()})


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perseus-operator",
        description="Plans GPU clocks of pipeline-parallel training jobs described by PerseusJobs.",
        epilog=f"Every flag can be given as {ENVIRONMENT_PREFIX}<NAME> in the environment; the flag wins.",
    )
    for setting in fields(Settings):
        doc = f"{setting.metadata['doc']} Default: {setting.default!r}.".replace("%", "%%")
        if isinstance(setting.default, bool):
            parser.add_argument(_flag(setting.name), action="store_const", const="true", help=doc)
        else:
            parser.add_argument(_flag(setting.name), metavar=type(setting.default).__name__.upper(), help=doc)
    return parser


def _convert(name: str, text: str, source: str) -> Any:
    kind: type[Any] = type(getattr(Settings, name))
    if kind is bool:
        if text.lower() not in {"true", "false"}:
            raise InvalidSetting(f"{source}: must be true or false, not {text!r}")
        return text.lower() == "true"
    try:
        return kind(text)
    except ValueError:
        raise InvalidSetting(f"{source}: must be a number, not {text!r}") from None


def settings_or_exit(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """``parse_settings``; one line on stderr and exit code 2 for bad input."""
    try:
        return parse_settings(arguments, environment)
    except InvalidSetting as error:
        sys.stderr.write(f"perseus-operator: {error}\n")
        sys.exit(2)
