"""The command ``perseus-bench``: refuse a GPU that is not free, run the trials, write the reports.

Exit codes: 0: all trials were run, clocks are back. 1: some GPU could not be reset; the journal lists it for the next
agent. 2: an option or the environment is wrong. 4: refused, nothing was changed; the sentence on stderr says why.
5: clocks are back, but a trial failed or the run was interrupted; the report has what was measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from perseus_agent.clocks.journal import Journal, JournalLock, boot_id
from perseus_agent.devices.base import Controllability, Device, DeviceSet, ListsProcesses, open_device_set
from perseus_agent.errors import AgentError, DeviceError, JournalError, SettingsError
from perseus_agent.process import shorten_timer_slack, stop_on_signals
from perseus_bench.bench import Bench
from perseus_bench.kit import accept
from perseus_bench.markdown import render
from perseus_bench.options import AcceptOptions, parse_options
from perseus_bench.report import AcceptanceReport, report_json
from perseus_bench.restoration import AgentProcesses
from perseus_bench.workload import WorkloadFailed
from perseus_bench.workload_choice import open_workload

DONE: Final = 0
NOT_RETURNED: Final = 1
WRONG: Final = 2
REFUSED: Final = 4
INCOMPLETE: Final = 5
VISIBLE: Final = "NVIDIA_VISIBLE_DEVICES"


class RunRefused(AgentError):
    """The run would disturb somebody, or can change nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. SIGTERM and SIGINT end the run, and clocks are returned.

    Args:
        arguments: of the command line, without the program's name; None: those of this process.

    Returns:
        The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    stop = threading.Event()
    stop_on_signals(stop)
    shorten_timer_slack()
    try:
        options = parse_options(arguments, os.environ)
        report = _run(options, stop)
        _write(options, report)
    except RunRefused as error:
        _say(str(error))
        return REFUSED
    except (SettingsError, JournalError, DeviceError, WorkloadFailed) as error:
        _say(str(error))
        return WRONG
    if not report.clocks_returned:
        _say("clocks could not be returned: the journal lists the GPU, and the next agent on this node resets it")
        return NOT_RETURNED
    return DONE if report.complete else INCOMPLETE


def _run(options: AcceptOptions, stop: threading.Event) -> AcceptanceReport:
    lock = JournalLock(Path(options.journal))
    if not lock.take():
        raise RunRefused(
            f"an agent runs on this node (it holds {lock.path}): stop it, or take it off the node, and try again"
        )
    try:
        device_set = open_device_set(options.devices)
        try:
            return _accept(options, stop, device_set)
        finally:
            device_set.close()
    finally:
        lock.release()


def _accept(options: AcceptOptions, stop: threading.Event, device_set: DeviceSet) -> AcceptanceReport:
    chosen = options.gpu or _given_to_container(device_set)
    devices = [_choose(device_set, name) for name in (chosen, *options.others)]
    if len({device.identity.uuid for device in devices}) < len(devices):
        raise SettingsError("--gpu, --other-gpus: a GPU is named twice")
    for device in devices:
        _check_free(device)
    journal, damage = Journal.open(Path(options.journal), boot_id())
    workload, why_none = open_workload(options.workload, devices[0], options.interpreter)
    notes = [note for note in (why_none, str(damage) if damage else "") if note]
    try:
        with tempfile.TemporaryDirectory(prefix="perseus-accept-") as folder:
            report = accept(
                Bench(devices[0], workload, stop.wait),
                journal,
                AgentProcesses(options.devices, devices[0].identity.uuid, Path(folder)),
                minutes=options.minutes,
                driver_version=device_set.driver_version,
                simulated=options.devices != "nvml" or ":" in options.workload,
                others=devices[1:],
                notes=notes,
                say=_say,
            )
    finally:
        if workload is not None:
            workload.close()
    if not options.with_identity:
        return report
    return replace(report, gpu_uuid=devices[0].identity.uuid, node_name=options.node_name or os.uname().nodename)


def _given_to_container(device_set: DeviceSet) -> str:
    """The GPU that a device plugin has given to this container, or the only one."""
    uuids = [device.identity.uuid for device in device_set.devices]
    given = os.environ.get(VISIBLE, "")
    if given in uuids:
        return given
    if len(uuids) == 1:
        return uuids[0]
    raise SettingsError(f"--gpu: must name one of {len(uuids)} GPUs by its UUID or index")


def _choose(device_set: DeviceSet, name: str) -> Device:
    by_uuid = {device.identity.uuid: device for device in device_set.devices}
    if name in by_uuid:
        return by_uuid[name]
    if name.isdecimal() and int(name) < len(device_set.devices):
        return device_set.devices[int(name)]
    raise SettingsError(f"--gpu: {name!r} is neither the UUID nor the index of one of {len(by_uuid)} GPUs")


def _check_free(device: Device) -> None:
    """Raise ``RunRefused`` if the GPU's clocks may not be set, or somebody computes on it."""
    state, why = device.controllability()
    if state is not Controllability.YES:
        raise RunRefused(f"{device.identity.uuid}: its clocks cannot be set: {why or state.value}")
    if len(device.identity.supported_clocks_mhz) < 2:
        raise RunRefused(f"{device.identity.uuid}: it has fewer than two clocks")
    before_us = device.now_us()
    time.sleep(0.01)
    if device.now_us() == before_us:
        raise RunRefused(f"{device.identity.uuid}: its time stands still: a simulated GPU that only a trainer moves")
    users = device.compute_processes() if isinstance(device, ListsProcesses) else None
    if users:
        raise RunRefused(
            f"{device.identity.uuid}: in use by {users} process{'es' if users > 1 else ''}; it must be free"
        )


def _write(options: AcceptOptions, report: AcceptanceReport) -> None:
    texts = {
        options.json: json.dumps(report_json(report), indent=1, ensure_ascii=False) + "\n",
        options.markdown: render(report),
        options.hardware: _hardware_text(report) if options.hardware else "",
    }
    for place, text in texts.items():
        if place == "-":
            print(text, end="")  # noqa: T201
        elif place and text:
            try:
                Path(place).write_text(text, encoding="utf-8")
            except OSError as error:
                _say(f"cannot write {place}: {error.strerror}; the report follows on stdout")
                print(text, end="")  # noqa: T201


def _hardware_text(report: AcceptanceReport) -> str:
    try:
        hardware = report.hardware()
    except ValueError as error:  # changes that took more than a minute, for one
        _say(f"--hardware: not written: {error}")
        return ""
    return hardware.to_json() + "\n" if hardware else ""


def _say(line: str) -> None:
    print(f"perseus-bench: {line}", file=sys.stderr, flush=True)  # noqa: T201
