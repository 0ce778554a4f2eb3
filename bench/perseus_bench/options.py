"""Options of ``perseus-bench``. ``--help`` prints exactly this; variables are the agent's, PERSEUS_AGENT_*."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perseus_agent.errors import SettingsError
from perseus_agent.settings import Settings as AgentSettings
from perseus_runtime.settings import BaseSettings, InvalidSetting, names_of, setting
from perseus_runtime.settings import parse_settings as parse

_AGENT = {field.name: field for field in AgentSettings.__dataclass_fields__.values()}


@dataclass(frozen=True)
class AcceptOptions(BaseSettings):
    """Everything that can be chosen about one acceptance run."""

    program = "perseus-bench"
    description = (
        "Measures on one free GPU how fast its clocks change, which clocks it reaches, whether they are given back "
        "after kill -9, and whether a planned pipeline runs as predicted; writes a report. Sets clocks; always "
        "returns them."
    )
    environment_prefix = "PERSEUS_AGENT_"

    gpu: str = setting(
        "",
        "UUID or index of the GPU. It must be free: no process may compute on it. Empty: the one that "
        "NVIDIA_VISIBLE_DEVICES names, or the only one there is.",
    )
    other_gpus: str = setting(
        "",
        "Further free GPUs, UUIDs or indices separated by commas. They are only locked, to find out whether the GPUs "
        "of a node share one driver lock. Empty: that is not measured.",
    )
    devices: str = setting(_AGENT["devices"].default, _AGENT["devices"].metadata["doc"])
    minutes: float = setting(
        10.0, "About how long the run takes, minutes. Less gives fewer samples, and coarser tails.", minimum=0.05
    )
    workload: str = setting(
        "auto",
        "What computes: 'cuda' (PyTorch), 'none', or 'module:factory[:argument]' for simulated GPUs. 'auto': PyTorch "
        "where it can be had, else none: then speed, power limit and pipeline are not measured.",
    )
    python: str = setting("", "The Python interpreter that has PyTorch with CUDA. Empty: this one.")
    json: str = setting("", "File for the report in JSON; '-': stdout. Empty: none.")
    markdown: str = setting("-", "File for the report in Markdown; '-': stdout. Empty: none.")
    hardware: str = setting("", "File for the measured latency, as `perseus plan --hardware` reads it. Empty: none.")
    with_identity: bool = setting(False, "Add the GPU's UUID and the node's name to the report.")
    node_name: str = setting(_AGENT["node_name"].default, "Name of the node, used with --with-identity alone.")
    journal: str = setting(
        _AGENT["journal"].default,
        "The journal of the node's agent. It lists the GPU while the run lasts, and its lock keeps agents away.",
    )

    def check(self) -> None:
        """Check rules beyond minima."""
        self.check_not_empty("devices", "workload", "journal")
        if self.json == self.markdown == "-":
            raise InvalidSetting("--json, --markdown: only one of them can go to stdout")

    @property
    def interpreter(self) -> str:
        """The Python of the workload."""
        return self.python or sys.executable

    @property
    def others(self) -> tuple[str, ...]:
        """The names in ``other_gpus``."""
        return names_of(self.other_gpus)


def parse_options(arguments: Sequence[str], environment: Mapping[str, str]) -> AcceptOptions:
    """Read the options from flags, then environment, then defaults.

    Args:
        arguments: of the command line.
        environment: variables such as ``PERSEUS_AGENT_GPU``.

    Returns:
        The options; every value keeps its rule.

    Raises:
        SettingsError: a value breaks a rule. ``--help`` and unknown flags leave through argparse (SystemExit).
    """
    try:
        return parse(AcceptOptions, arguments, environment)
    except InvalidSetting as error:
        raise SettingsError(str(error)) from None
