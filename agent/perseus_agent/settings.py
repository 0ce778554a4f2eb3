"""The agent's settings, one field each.

Each field documents its effect, its unit and why its default is what it is. ``perseus-agent --help`` prints exactly
this; the chart's values use the same texts. Environment: ``PERSEUS_AGENT_`` and the field's name in capitals; a flag
wins over it. Whether files and sockets exist is checked by preflight, not here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perseus_agent.errors import SettingsError
from perseus_core import keys
from perseus_runtime.settings import LOG_LEVELS, BaseSettings, InvalidSetting, names_of, setting
from perseus_runtime.settings import parse_settings as parse


@dataclass(frozen=True)
class Settings(BaseSettings):
    """Everything that can be configured about one agent."""

    program = "perseus-agent"
    description = "Sets the clocks of one node's GPUs; the only program of Perseus with the right to."
    environment_prefix = "PERSEUS_AGENT_"

    node_name: str = setting("", "Name of the Kubernetes node, for DescribeNode and logs. Empty: the host's name.")
    devices: str = setting(
        "nvml", "GPU driver: 'nvml', or 'module:factory[:argument]' for a simulated one (simulation and tests only)."
    )
    socket: str = setting(
        keys.DEFAULT_SOCKET_PATH,
        "Unix socket for training processes. Mount its directory, not the file, into training pods: a restart makes a "
        "new file.",
    )
    socket_selinux_label: str = setting(
        "",
        "SELinux label to give that socket and its directory, such as system_u:object_r:container_file_t:s0, which "
        "every confined container may use. Empty: they keep the one that the node's policy gives them.",
    )
    grpc_address: str = setting(
        f"0.0.0.0:{keys.DEFAULT_GRPC_PORT}",
        "host:port or unix:path on which the operator reaches this agent; 0.0.0.0 and [::] are all addresses, of both "
        "families. Port 0: any free one, written to --ready-file.",
    )
    metrics_address: str = setting(
        f"0.0.0.0:{keys.DEFAULT_AGENT_METRICS_PORT}",
        "host:port of /metrics, /healthz and /readyz; 0.0.0.0 and [::] are all addresses, of both families. Port 0: "
        "any free one. Empty: none of them is served.",
    )
    gpu_metrics: bool = setting(
        False,
        "Serve series of each GPU on /metrics besides those of the node and of each job on it: about 23 more for each "
        "GPU, which is 2.3 million in a fleet of 100,000.",
    )
    journal: str = setting(
        "/var/lib/perseus/agent-journal.json",
        "File that remembers which GPUs this agent has locked. It must outlive the container (a hostPath), or a crash "
        "leaves clocks locked.",
    )
    keeper_socket: str = setting(
        "/run/perseus-keeper/keeper.sock",
        "Unix socket on which the clock keeper waits for the agent: `perseus-agent keep` with the agent's settings, a "
        "process that gives back what a killed or hung agent has locked. Without one no GPU is locked. Give its "
        "directory to these two alone.",
    )
    reader_socket: str = setting(
        "",
        "Unix socket on which `python -m perseus_reader` waits for the agent, to read the metrics pages of engines "
        "without the plugin. Give its directory to these two alone. Empty: no page is read.",
    )
    proc_root: str = setting("/proc", "Where the host's /proc is: peers of the socket are traced to pods through it.")
    pod_resources_socket: str = setting(
        "/var/lib/kubelet/pod-resources/kubelet.sock",
        "The kubelet's PodResources socket: which GPUs belong to which pod. Mount its directory, read-only.",
    )
    device_plugins: str = setting(
        "",
        "The kubelet's directory of device plugins, writable: the agent offers its socket there as the resource "
        f"{keys.RESOURCE_AGENT}, to pods that may mount no hostPath. Empty: it does not.",
    )
    tls_cert: str = setting("", "Certificate chain (PEM) of this agent. Read again when the file changes.")
    tls_key: str = setting("", "Private key (PEM) of this agent.")
    tls_ca: str = setting("", "Certificate authority (PEM) that signs the operator's certificate.")
    allowed_san: str = setting(
        "perseus-operator",
        "Subject alternative names, separated by commas, one of which the caller's certificate must carry to command "
        "this agent.",
    )
    insecure: bool = setting(
        False, "Serve gRPC without TLS: anyone who reaches the address may set clocks. Demonstrations only."
    )
    ready_file: str = setting(
        "", "Written once the agent serves: JSON with the gRPC and metrics addresses really bound. Empty: none."
    )
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR. Logs are one JSON object a line on stderr.")
    min_switch_interval_us: int = setting(
        2_000,
        "Shortest time between two clock writes to one GPU, microseconds; requests in between coalesce to the latest. "
        "Bounds what a plan with very short instructions can cost the driver, whose calls slow collectives down.",
        minimum=0,
    )
    settle_ms: int = setting(
        500,
        "How long after a clock write the clock read back may still be the old one, milliseconds; at least the 99th "
        "percentile of the latency measured on the GPU. The slowest transitions published for current GPUs take about "
        "this long.",
        minimum=0,
    )
    sample_interval_ms: int = setting(
        50,
        "How often energy is read while a rank runs, milliseconds; less often where that takes long.",
        minimum=1,
    )
    watch_interval_ms: int = setting(
        500, "How often clock and event reasons of a GPU are read back, milliseconds.", minimum=1
    )
    hang_timeout_s: float = setting(
        45.0,
        "A GPU whose driver call lasts longer is lost, seconds. A driver that waits for firmware gives up after about "
        "this time.",
        minimum=0.1,
    )
    idle_loss: float = setting(
        0.01,
        "Share of a wait by which the work after it may begin late. While a rank under a plan waits, without a mark and"
        " without a kernel, for so long that changing clocks is a smaller share, its GPU runs at its least clock. 0: "
        "always at the plan's.",
        minimum=0,
    )
    drain_timeout_s: float = setting(
        10.0,
        "Time within which SIGTERM restores every clock and stops, seconds. Keep it below the pod's "
        "terminationGracePeriodSeconds.",
        minimum=0.1,
    )
    telemetry_events: int = setting(
        4_096,
        "Events stored for each telemetry reader. A reader that is slower loses the oldest; the losses are counted.",
        minimum=1,
    )

    def check(self) -> None:
        """Check rules beyond minima."""
        self.check_choice("log_level", LOG_LEVELS)
        self.check_tls(insecure=self.insecure, cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca)
        if not self.insecure and not self.allowed_sans:
            raise InvalidSetting("--allowed-san: must name at least one subject alternative name")
        self.check_not_empty("socket", "grpc_address", "journal", "keeper_socket", "proc_root", "pod_resources_socket")
        unix = self.grpc_address.startswith("unix:")
        self.check_addresses(["metrics_address"] if unix else ["grpc_address", "metrics_address"])

    @property
    def allowed_sans(self) -> frozenset[str]:
        """The names in ``allowed_san``."""
        return frozenset(names_of(self.allowed_san))


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read the agent's settings from flags, then environment, then defaults.

    Args:
        arguments: of the command line, without the program's name.
        environment: variables such as ``PERSEUS_AGENT_LOG_LEVEL``.

    Returns:
        The settings; every value keeps its rule.

    Raises:
        SettingsError: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).

    >>> parse_settings(["--insecure"], {"PERSEUS_AGENT_LOG_LEVEL": "DEBUG"}).log_level
    'DEBUG'
    >>> parse_settings(["--insecure", "--log-level", "LOUD"], {})
    Traceback (most recent call last):
    perseus_agent.errors.SettingsError: --log-level: must be DEBUG, INFO, WARNING or ERROR
    """
    try:
        return parse(Settings, arguments, environment)
    except InvalidSetting as error:
        raise SettingsError(str(error)) from None
