"""The agent's settings: one frozen dataclass from which flags, environment and reference page are generated.

Each field says its effect, its unit and why its default is what it is. ``perseus-agent --help`` prints exactly this;
the chart's values name the same words. Environment: ``PERSEUS_AGENT_`` and the field's name in capitals; a flag wins
over it. Nothing is read here but argv and environ; whether files and sockets exist is preflight's business.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Final

from perseus_agent.errors import SettingsError
from perseus_proto import keys
from perseus_proto.addresses import parse_address

ENVIRONMENT_PREFIX: Final = "PERSEUS_AGENT_"


def _setting(default: Any, doc: str, *, minimum: float | None = None) -> Any:
    return field(default=default, metadata={"doc": doc, "minimum": minimum})


@dataclass(frozen=True)
class Settings:
    """Everything that may be chosen about one agent."""

    node_name: str = _setting("", "Name of the Kubernetes node, for DescribeNode and logs. Empty: the host's name.")
    devices: str = _setting(
        "nvml", "GPU driver: 'nvml', or 'module:factory[:argument]' for a double (simulation and tests only)."
    )
    socket: str = _setting(
        keys.DEFAULT_SOCKET_PATH,
        "Unix socket for training processes. Mount its directory, not the file, into training pods: a restart makes a "
        "new file.",
    )
    grpc_address: str = _setting(
        f"0.0.0.0:{keys.DEFAULT_GRPC_PORT}",
        "host:port or unix:path on which the operator reaches this agent; 0.0.0.0 and [::] are all addresses, of both "
        "families. Port 0: any free one, told by --ready-file.",
    )
    metrics_address: str = _setting(
        f"0.0.0.0:{keys.DEFAULT_AGENT_METRICS_PORT}",
        "host:port of /metrics, /healthz and /readyz; 0.0.0.0 and [::] are all addresses, of both families. Port 0: "
        "any free one. Empty: none of them is served.",
    )
    journal: str = _setting(
        "/var/lib/perseus/agent-journal.json",
        "File that remembers which GPUs this agent has locked. It must outlive the container (a hostPath), or a crash "
        "leaves clocks locked.",
    )
    proc_root: str = _setting("/proc", "Where the host's /proc is: peers of the socket are traced to pods through it.")
    pod_resources_socket: str = _setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "The kubelet's PodResources socket: which GPUs belong to which pod. Mount its directory, read-only.",
    )
    tls_cert: str = _setting("", "Certificate chain (PEM) of this agent. Read again when the file changes.")
    tls_key: str = _setting("", "Private key (PEM) of this agent.")
    tls_ca: str = _setting("", "Certificate authority (PEM) that signs the operator's certificate.")
    allowed_san: str = _setting(
        "perseus-operator",
        "Subject alternative names, separated by commas, one of which the caller's certificate must carry to command "
        "this agent.",
    )
    insecure: bool = _setting(
        False, "Serve gRPC without TLS: anyone who reaches the address may set clocks. Demonstrations only."
    )
    ready_file: str = _setting(
        "", "Written once the agent serves: JSON with the gRPC and metrics addresses really bound. Empty: none."
    )
    log_level: str = _setting("INFO", "DEBUG, INFO, WARNING or ERROR. Logs are one JSON object a line on stderr.")
    min_switch_interval_us: int = _setting(
        2_000,
        "Shortest time between two clock writes to one GPU, microseconds; requests in between coalesce to the latest. "
        "Bounds what a plan with very short instructions can cost the driver, whose calls slow collectives down.",
        minimum=0,
    )
    settle_ms: int = _setting(
        500,
        "How long after a clock write the clock read back may still be another, milliseconds. The slowest transitions "
        "published for current GPUs take about this long.",
        minimum=0,
    )
    sample_interval_ms: int = _setting(
        50,
        "How often energy is read while a rank runs, milliseconds; less often where that takes long.",
        minimum=1,
    )
    watch_interval_ms: int = _setting(
        500, "How often clock and event reasons of a GPU are read back, milliseconds.", minimum=1
    )
    hang_timeout_s: float = _setting(
        45.0,
        "A GPU whose driver call lasts longer is lost, seconds. A driver that waits for firmware gives up after about "
        "this time.",
        minimum=0.1,
    )
    drain_timeout_s: float = _setting(
        10.0,
        "Time within which SIGTERM restores every clock and stops, seconds. Keep it below the pod's "
        "terminationGracePeriodSeconds.",
        minimum=0.1,
    )
    telemetry_events: int = _setting(
        4_096, "Events kept for each telemetry reader; a slower one loses the oldest, counted.", minimum=1
    )

    def __post_init__(self) -> None:
        for setting in fields(self):
            minimum = setting.metadata["minimum"]
            if minimum is not None and getattr(self, setting.name) < minimum:
                raise SettingsError(f"{_flag(setting.name)}: must be at least {minimum}")
        if self.log_level not in {"DEBUG", "INFO", "WARNING", "ERROR"}:
            raise SettingsError("--log-level: must be DEBUG, INFO, WARNING or ERROR")
        tls = (self.tls_cert, self.tls_key, self.tls_ca)
        if self.insecure and any(tls):
            raise SettingsError("--insecure: excludes --tls-cert, --tls-key and --tls-ca")
        if not self.insecure and not all(tls):
            raise SettingsError(
                "--tls-cert, --tls-key, --tls-ca: all three are needed (or --insecure for a demonstration)"
            )
        if not self.insecure and not self.allowed_sans:
            raise SettingsError("--allowed-san: must name at least one subject alternative name")
        for name in ("socket", "grpc_address", "journal", "proc_root", "pod_resources_socket"):
            if not getattr(self, name):
                raise SettingsError(f"{_flag(name)}: must not be empty")
        for name in ("grpc_address", "metrics_address"):
            address = getattr(self, name)
            if address and not (name == "grpc_address" and address.startswith("unix:")):
                try:
                    parse_address(address)
                except ValueError as error:
                    raise SettingsError(f"{_flag(name)}: {error}") from None

    @property
    def allowed_sans(self) -> frozenset[str]:
        """The names in ``allowed_san``."""
        return frozenset(name.strip() for name in self.allowed_san.split(",") if name.strip())


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Settings from flags, then environment, then defaults.

    Raises:
        SettingsError: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).
    """
    values: dict[str, Any] = {}
    for setting in fields(Settings):
        name = ENVIRONMENT_PREFIX + setting.name.upper()
        if name in environment:
            values[setting.name] = _convert(setting.type, environment[name], name)
    for name, text in vars(_parser().parse_args(list(arguments))).items():
        if text is not None:
            kind = Settings.__dataclass_fields__[name].type
            values[name] = text if isinstance(text, bool) else _convert(kind, text, _flag(name))
    return Settings(**values)


def describe_settings() -> str:
    """The reference page: a Markdown table of every setting."""
    rows = ["| flag | environment | default | effect |", "|---|---|---|---|"]
    for setting in fields(Settings):
        default = repr(setting.default) if setting.default != "" else "empty"
        flag, variable = _flag(setting.name), ENVIRONMENT_PREFIX + setting.name.upper()
        rows.append(f"| `{flag}` | `{variable}` | {default} | {setting.metadata['doc']} |")
    return "\n".join(rows) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="perseus-agent",
        description="The privileged hand on one node: the only writer of its GPUs' clocks.",
        epilog=f"Every flag can be given as {ENVIRONMENT_PREFIX}<NAME> in the environment; a flag wins.",
    )
    for setting in fields(Settings):
        assert setting.default is not MISSING
        shown = f" [default: {setting.default}]" if setting.default not in ("", False) else ""
        text = (setting.metadata["doc"] + shown).replace("%", "%%")
        if setting.type == "bool":
            parser.add_argument(_flag(setting.name), action="store_true", default=None, help=text)
        else:
            parser.add_argument(_flag(setting.name), metavar="VALUE", default=None, help=text)
    return parser


def _convert(kind: object, text: str, source: str) -> str | int | float | bool:
    try:
        match kind:
            case "int":
                return int(text)
            case "float":
                return float(text)
            case "bool":
                return {"true": True, "1": True, "false": False, "0": False, "": False}[text.lower()]
            case _:
                return text
    except (ValueError, KeyError):
        raise SettingsError(f"{source}: {text!r} is not a value of type {kind}") from None


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
