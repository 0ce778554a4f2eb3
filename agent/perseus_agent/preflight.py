"""Checks of the node before anything is served: all findings at once, each with its fix.

Only what the settings name is checked. A missing kubelet or GPU does not prevent the start: it is reported, and the
agent waits for it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from perseus_agent.settings import Settings


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong."""

    fatal: bool
    message: str
    """What is wrong and how to put it right."""


def preflight(settings: Settings) -> list[Finding]:
    """Everything found, fatal first."""
    findings = [
        *_tls(settings),
        *_directory("--journal", Path(settings.journal).parent, "mount a writable hostPath there"),
        *_directory(
            "--socket", Path(settings.socket).parent, "mount a writable hostPath there, shared with training pods"
        ),
        *_proc(Path(settings.proc_root)),
        *_kubelet(Path(settings.pod_resources_socket)),
        *_device_plugins(settings.device_plugins),
    ]
    return sorted(findings, key=lambda finding: not finding.fatal)


def _tls(settings: Settings) -> list[Finding]:
    if settings.insecure:
        return [Finding(False, "--insecure: anyone who reaches --grpc-address may set clocks; for demonstrations only")]
    return [
        Finding(True, f"{flag}: cannot read {path}; mount the agent's certificate Secret (a directory, not a subPath)")
        for flag, path in (
            ("--tls-cert", settings.tls_cert),
            ("--tls-key", settings.tls_key),
            ("--tls-ca", settings.tls_ca),
        )
        if not os.access(path, os.R_OK)
    ]


def _directory(flag: str, directory: Path, fix: str) -> list[Finding]:
    existing = next(folder for folder in (directory, *directory.absolute().parents) if folder.exists())
    if existing.is_dir() and os.access(existing, os.W_OK):
        return []
    return [Finding(True, f"{flag}: {existing} is not a directory that can be written; {fix}")]


def _proc(root: Path) -> list[Finding]:
    if (root / "self" / "cgroup").exists() or (root.is_dir() and any(root.glob("[0-9]*/cgroup"))):
        return []
    return [
        Finding(False, f"--proc-root: {root} shows no processes; set hostPID: true on the pod, or no rank can join")
    ]


def _kubelet(socket: Path) -> list[Finding]:
    try:
        if stat.S_ISSOCK(socket.stat().st_mode):
            return []
        problem = "is not a socket"
    except OSError as error:
        problem = error.strerror or "cannot be reached"
    fix = "mount its directory (/var/lib/kubelet/pod-resources) read-only; no rank can join until it answers"
    return [Finding(False, f"--pod-resources-socket: {socket} {problem}; {fix}")]


def _device_plugins(directory: str) -> list[Finding]:
    if not directory or (Path(directory).is_dir() and os.access(directory, os.W_OK)):
        return []
    fix = "mount the kubelet's (/var/lib/kubelet/device-plugins); until then pods get the socket by hostPath alone"
    return [Finding(False, f"--device-plugins: {directory} is not a directory that can be written; {fix}")]
