"""The operator's settings, one field each.

Each field says its effect, its unit, and why its default is what it is; the chart's values use the same words.
Environment: ``PERSEUS_OPERATOR_`` and the field's name in capitals; a flag wins over it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perseus_core import keys
from perseus_operator.jobs.limits import Limits
from perseus_runtime.addresses import on_loopback, parse_url
from perseus_runtime.settings import LOG_LEVELS, BaseSettings, InvalidSetting, names_of, setting
from perseus_runtime.settings import parse_settings as parse

__all__ = ["InvalidSetting", "Settings", "parse_settings"]


@dataclass(frozen=True)
class Settings(BaseSettings):
    """Everything that can be configured about one operator."""

    program = "perseus-operator"
    description = "Plans GPU clocks of pipeline-parallel training jobs described by PerseusJobs."
    environment_prefix = "PERSEUS_OPERATOR_"

    namespaces: str = setting(
        "",
        "Namespaces to serve, separated by commas; the CRD must be there before. Empty: all of them, which needs"
        " cluster-wide rights.",
    )
    agent_namespace: str = setting(
        "perseus-system", "Namespace of the agents' pods, and of the Leases of epochs, replicas and shards."
    )
    replica: str = setting(
        "",
        "Name of this replica of the operator, under which it holds shards of the jobs. A process that starts under the"
        " name of another takes its place at once. Empty: the host's name, which is the pod's.",
    )
    agent_poll_s: float = setting(
        10.0, "How soon the agents' pods are listed and watched again after the watch has broken, seconds.", minimum=0.1
    )
    tls_cert: str = setting("", "Certificate chain (PEM) shown to agents.")
    tls_key: str = setting("", "Private key (PEM) of that certificate.")
    tls_ca: str = setting("", "Certificate authority (PEM) that signs the agents' certificates.")
    tls_server_name: str = setting(
        "perseus-agent", "Name that every agent's certificate must carry: agents are reached by address, not by name."
    )
    insecure: bool = setting(False, "Speak to agents without TLS. Demonstrations only.")
    agent_timeout_s: float = setting(
        3.0,
        "Longest wait for one answer of an agent, seconds. Below a third of the lease, so that a renewal can be"
        " repeated before the lease runs out.",
        minimum=0.01,
    )
    lease_ttl_s: float = setting(
        30.0,
        "GPUs return to default clocks this long after the operator's last renewal, seconds; it renews at a third."
        " Longer survives longer operator restarts, shorter frees GPUs sooner.",
        minimum=0.1,
    )
    release_timeout_s: float = setting(
        10.0,
        "When a PerseusJob is deleted, how long agents are asked to restore default clocks before it goes, seconds. An"
        " agent that does not answer by then lets the lease run out.",
        minimum=0.1,
    )
    solve_workers: int = setting(2, "Solver processes at a time.", minimum=1)
    solve_timeout_s: float = setting(600.0, "A solve is stopped after this time, seconds.", minimum=0.1)
    solve_memory_mib: int = setting(
        8192,
        "Address space of one solver process, MiB: a solve that grows without bound must not end the operator. Less"
        " where the container's memory limit leaves less: three quarters of it are for all solver processes together.",
        minimum=512,
    )
    solver_address: str = setting(
        "",
        "host:port of the solver service: each address of the host is a worker that solves and calibrates instead of"
        " --solve-workers in this pod. Needs TLS. Empty: none.",
    )
    solver_ca: str = setting(
        "", "Certificate authority (PEM) that signs the workers' certificates. Empty: that of --tls-ca."
    )
    solver_name: str = setting(
        "", "Name that every worker's certificate must carry. Empty: the host of --solver-address."
    )
    profile_retry_s: float = setting(5.0, "How soon a missing or wrong profile is read again, seconds.", minimum=0.05)
    profile_refresh_s: float = setting(60.0, "How soon a good profile is checked for changes, seconds.", minimum=0.05)
    calibrate_after: int = setting(
        40,
        "Iterations of a job that are observed before its iteration times are calibrated; after that every 100. With"
        " fewer, delays are harder to tell from noise.",
        minimum=28,
    )
    jobs_per_namespace: int = setting(
        500,
        "PerseusJobs and ServingPools of one namespace that are served, the oldest of them; an event on each other one"
        " says so. A ResourceQuota on count/perseusjobs.perseus.energy refuses them before they are stored. Each that"
        " is served takes some hundred KiB, and its share of the reconciliations.",
        minimum=1,
    )
    resource_slices: bool = setting(
        False,
        "Read the ResourceSlices of nodes on which pods have GPUs by claims (DRA), and tell their agents which GPU a"
        " name is. Needed where NVML's indices and minor numbers differ: there GPUs of such pods are not driven"
        " otherwise. Needs the right to list ResourceSlices, of Kubernetes 1.34 or later.",
    )
    status_interval_s: float = setting(
        5.0,
        "Shortest time between two writes of measured figures to one PerseusJob, seconds. Conditions are written at"
        " once.",
        minimum=0.05,
    )
    metrics_address: str = setting(
        f"0.0.0.0:{keys.DEFAULT_OPERATOR_METRICS_PORT}",
        "host:port of /metrics, /healthz and /readyz; 0.0.0.0 and [::] are all addresses, of both families. Port 0: any"
        " free one. Empty: none of them is served.",
    )
    web_address: str = setting(
        f"127.0.0.1:{keys.DEFAULT_WEB_PORT}",
        "host:port of the read-only page that shows each job's frontier. On loopback it has no login: only users who"
        " may port-forward to the pod reach it. Elsewhere it is served by TLS, to bearer tokens of users, who see the"
        " jobs whose PerseusJobs they may get. Port 0: any free one. Empty: not served.",
    )
    web_cert: str = setting(
        "", "Certificate chain (PEM) that the page shows to browsers. It is read again when the file changes."
    )
    web_key: str = setting("", "Private key (PEM) of that certificate.")
    webhook_address: str = setting(
        "",
        "host:port of the admission webhook that gives labelled pods the agent's socket as they are created. Empty: not"
        " served.",
    )
    webhook_cert: str = setting(
        "", "Certificate chain (PEM) shown to the API server. It is read again when the file changes."
    )
    webhook_key: str = setting("", "Private key (PEM) of that certificate.")
    webhook_resource: bool = setting(
        False,
        f"Let the webhook give pods the socket as the resource {keys.RESOURCE_AGENT}, too, while every GPU node offers "
        "it. Needs the right to list and watch nodes.",
    )
    agent_socket: str = setting(
        keys.DEFAULT_SOCKET_PATH,
        "Path of the agents' socket on nodes, and in the containers that the webhook gives it.",
    )
    rpc_address: str = setting(
        "",
        "host:port of the gRPC service by which infrastructure declares stragglers (set_straggler). Needs TLS. Port 0:"
        " any free one. Empty: not served.",
    )
    rpc_allowed_san: str = setting(
        "perseus-infrastructure",
        "Names, separated by commas, one of which the caller's certificate must carry.",
    )
    rpc_ca: str = setting("", "Certificate authority (PEM) that signs callers' certificates. Empty: that of --tls-ca.")
    scaler_address: str = setting(
        "",
        "host:port at which KEDA asks how many replicas pools need (an external scaler, by gRPC). Needs TLS. Port 0:"
        " any free one. Empty: not served.",
    )
    scaler_cert: str = setting(
        "",
        "Certificate chain (PEM) shown to KEDA, with the name of the Service that it asks. It is read again when the"
        " file changes.",
    )
    scaler_key: str = setting("", "Private key (PEM) of that certificate.")
    scaler_ca: str = setting("", "Certificate authority (PEM) that signs KEDA's certificate.")
    scaler_allowed_san: str = setting(
        "perseus-keda", "Names, separated by commas, one of which KEDA's certificate must carry."
    )
    peer_address: str = setting(
        "",
        "host:port at which other replicas ask this one about jobs that it serves. Needs TLS. Port 0: any free one."
        " Empty: not served. Then the page shows jobs of other replicas without their frontiers, and set_straggler"
        " answers for this replica's jobs alone.",
    )
    peer_host: str = setting(
        "", "Name or address by which other replicas reach this one, such as the pod's. Empty: that of --peer-address."
    )
    peer_name: str = setting("perseus-operator", "Name that the certificate of every replica must carry.")
    otlp_endpoint: str = setting(
        "",
        "http:// or https:// address of an OpenTelemetry collector that takes OTLP over gRPC: it gets a trace of each"
        " edit of a PerseusJob, from the edit until its plan is in force. Empty: nothing is sent.",
    )
    ready_file: str = setting(
        "", "Written once the operator serves: JSON with epoch and the addresses really bound. Empty: none."
    )
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR.")
    log_format: str = setting("json", "json: one object a line with the PerseusJob it is about. text: for people.")

    def check(self) -> None:
        """Check rules beyond minima."""
        self.check_tls(insecure=self.insecure, cert=self.tls_cert, key=self.tls_key, ca=self.tls_ca)
        if self.rpc_address and (self.insecure or not self.rpc_allowed_sans):
            raise InvalidSetting("--rpc-address: is served with TLS and to the names of --rpc-allowed-san alone")
        if self.peer_address and self.insecure:
            raise InvalidSetting("--peer-address: is served with TLS alone")
        if self.solver_address and self.insecure:
            raise InvalidSetting("--solver-address: is asked with TLS alone")
        if 3 * self.agent_timeout_s > self.lease_ttl_s:
            raise InvalidSetting("--agent-timeout-s: must be at most a third of --lease-ttl-s")
        self.check_not_empty("agent_namespace")
        if not re.fullmatch(r"[A-Za-z0-9.-]{0,200}", self.replica):
            raise InvalidSetting("--replica: must be at most 200 letters, digits, dots and dashes")
        self.check_addresses(
            (
                *("metrics_address", "web_address", "webhook_address"),
                *("rpc_address", "scaler_address", "peer_address", "solver_address"),
            )
        )
        if self.web_address and not on_loopback(self.web_address) and not (self.web_cert and self.web_key):
            raise InvalidSetting("--web-cert, --web-key: both are needed with a --web-address that is not loopback")
        self._check_otlp_endpoint()
        if self.scaler_address and not (self.scaler_cert and self.scaler_key and self.scaler_ca):
            raise InvalidSetting("--scaler-cert, --scaler-key, --scaler-ca: all are needed with --scaler-address")
        if self.webhook_address and not (self.webhook_cert and self.webhook_key):
            raise InvalidSetting("--webhook-cert, --webhook-key: both are needed with --webhook-address")
        if not self.agent_socket.startswith("/") or self.agent_socket.count("/") < 2:
            raise InvalidSetting("--agent-socket: must be an absolute path below a directory, which pods mount")
        self.check_choice("log_level", LOG_LEVELS)
        self.check_choice("log_format", ("json", "text"))

    def _check_otlp_endpoint(self) -> None:
        if not self.otlp_endpoint:
            return
        try:
            url = parse_url(self.otlp_endpoint)
        except ValueError as error:
            raise InvalidSetting(f"--otlp-endpoint: {error}") from None
        if url.port is None or url.path:
            raise InvalidSetting("--otlp-endpoint: must be http://host:port or https://host:port")

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """The namespaces to serve; empty: all."""
        return names_of(self.namespaces)

    @property
    def rpc_allowed_sans(self) -> frozenset[str]:
        """The names in ``rpc_allowed_san``."""
        return frozenset(names_of(self.rpc_allowed_san))

    @property
    def scaler_allowed_sans(self) -> frozenset[str]:
        """The names in ``scaler_allowed_san``."""
        return frozenset(names_of(self.scaler_allowed_san))

    @property
    def limits(self) -> Limits:
        """The settings that the planner needs."""
        return Limits(self.lease_ttl_s, self.profile_retry_s, self.profile_refresh_s, self.calibrate_after)


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """Read the operator's settings from flags, then environment, then defaults.

    Raises:
        InvalidSetting: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).
    """
    return parse(Settings, arguments, environment)
