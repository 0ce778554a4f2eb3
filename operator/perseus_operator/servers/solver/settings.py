"""The settings of one worker of the solver service, one field each.

Environment: ``PERSEUS_SOLVER_`` and the field's name in capitals; a flag wins over it.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_core import keys
from perseus_runtime.settings import LOG_LEVELS, BaseSettings, InvalidSetting, names_of, setting


@dataclass(frozen=True)
class SolverSettings(BaseSettings):
    """Everything that can be configured about one worker."""

    program = "perseus-solver"
    description = "Solves time-energy frontiers for Perseus operators."
    environment_prefix = "PERSEUS_SOLVER_"

    address: str = setting(
        f"0.0.0.0:{keys.DEFAULT_SOLVER_PORT}", "host:port at which operators ask for work. Port 0: any free one."
    )
    tls_cert: str = setting("", "Certificate chain (PEM) shown to operators.")
    tls_key: str = setting("", "Private key (PEM) of that certificate.")
    tls_ca: str = setting("", "Certificate authority (PEM) that signs the operators' certificates.")
    allowed_san: str = setting(
        "perseus-operator", "Names, separated by commas, one of which the caller's certificate must carry."
    )
    solve_timeout_s: float = setting(
        600.0,
        "A solve is stopped after this time, seconds. It is also how long a worker that is to stop may still need.",
        minimum=0.1,
    )
    solve_memory_mib: int = setting(
        8192,
        "Address space of the solver process, MiB. Less where the container's memory limit leaves less: three quarters"
        " of it.",
        minimum=512,
    )
    exit_when_idle_s: float = setting(
        0.0,
        "The worker ends, with exit code 0, once it has had no work for this time, seconds: for a batch of solves in a"
        " Job. 0: it never does.",
        minimum=0.0,
    )
    metrics_address: str = setting(
        f"0.0.0.0:{keys.DEFAULT_SOLVER_METRICS_PORT}",
        "host:port of /metrics, /healthz and /readyz. Port 0: any free one. Empty: none of them is served.",
    )
    ready_file: str = setting("", "Written once the worker serves: JSON with the addresses really bound. Empty: none.")
    log_level: str = setting("INFO", "DEBUG, INFO, WARNING or ERROR.")
    log_format: str = setting("json", "json: one object a line. text: for people.")

    def check(self) -> None:
        """Check rules beyond minima."""
        self.check_not_empty("address", "tls_cert", "tls_key", "tls_ca")
        if not self.allowed_sans:
            raise InvalidSetting("--allowed-san: must not be empty")
        self.check_addresses(("address", "metrics_address"))
        self.check_choice("log_level", LOG_LEVELS)
        self.check_choice("log_format", ("json", "text"))

    @property
    def allowed_sans(self) -> frozenset[str]:
        """The names in ``allowed_san``."""
        return frozenset(names_of(self.allowed_san))
