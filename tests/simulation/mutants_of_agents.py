"""Agents, and their keepers, broken on purpose: see ``mutants``."""

from __future__ import annotations

from typing import Final

from tests.simulation.mutant import HOLE, SURVIVED, Mutant, mutant, within

MUTANTS_OF_AGENTS: Final[tuple[Mutant, ...]] = (
    mutant(
        "keeper-waits-10-s",
        "perseus_agent.keeper.keeper",
        SURVIVED,
        ("OVERDUE_TICKS: Final = 3", "OVERDUE_TICKS: Final = 200"),
        needs=("agent stopped",),
    ),
    mutant(
        "agent-silent-7.5-s",
        "perseus_agent.lifecycle",
        SURVIVED,
        ("SILENT_S: Final = 0.75", "SILENT_S: Final = 7.5"),
        needs=("agent stopped",),
    ),
    mutant(
        "any-reason-excuses",
        "perseus_agent.clocks.read_back",
        SURVIVED,
        ("if clock_mhz < highest and reasons:", "if reasons:"),
        needs=("foreign lock",),
    ),
    mutant(
        "select-without-authorisation",
        "perseus_agent.servers.grpc_service",
        SURVIVED,
        (
            "            self.authorise(context)\n            with self._selecting():",
            "            with self._selecting():",
        ),
        needs=("stranger calls",),
    ),
    mutant(
        "period-of-nothing",
        "perseus_agent.clocks.timetable",
        HOLE,
        ("for _ in range(AHEAD):", "while True:"),
        ("period_us < PERIOD_MIN_US * iterations", "period_us < 0"),
        needs=("rank forges",),
    ),
    mutant(
        "lease-never-ends",
        "perseus_agent.node.leases",
        "promise 2",
        ("if lease.expires_s <= now_s]", "if lease.expires_s <= now_s - 60]"),
        needs=("link cut",),
    ),
    mutant(
        "keeper-resets-nothing",
        "perseus_agent.keeper.keeper",
        "promise 2",
        ("self._devices[uuid].reset_clocks()", "pass"),
    ),
    mutant(
        "keeper-learns-nothing",
        "perseus_agent.clocks.governor",
        "promise 2",
        (
            "                if not self._held:\n                    self._hold()",
            "                if False:\n                    self._hold()",
        ),
    ),
    mutant(
        "process-leaves-and-keeps",
        "perseus_agent.node.node",
        "promise 2",
        ('            self._unbind(session, "the process has gone")\n', ""),
    ),
    mutant(
        "release-of-clocks-forgotten",
        "perseus_agent.node.node",
        "promise 2",
        ("pending = self._lease_clocks.ended(lease.job_uid, reason)", "pending: dict[str, Future[bool]] = {}"),
    ),
    mutant(
        "journal-is-not-read",
        "perseus_agent.node.node",
        "promise 2",
        ("in self._journal.locked & self.workers.keys():", "in ():"),
        needs=("node out of memory",),
    ),
    mutant(
        "reset-tried-in-a-minute",
        "perseus_agent.clocks.governor",
        "promise 2",
        ("RESTORE_RETRY_S: Final = 0.5", "RESTORE_RETRY_S: Final = 60.0"),
        needs=("GPU fails",),
    ),
    mutant(
        "foreign-lock-overwritten",
        "perseus_agent.clocks.governor",
        "promise 3",
        ("if self.standing is Standing.FOREIGN or (wanted == self.applied", "if (wanted == self.applied"),
        needs=("foreign lock",),
    ),
    mutant(
        "foreign-lock-given-back",
        "perseus_agent.clocks.governor",
        "promise 3",
        ("if ours is not None and abs(clock_mhz - ours) > self._read_back.tolerance(ours):", "if ours is None:"),
        needs=("foreign lock",),
    ),
    mutant(
        "gpus-of-a-pod-that-is-unknown",
        "perseus_agent.node.lease_clocks",
        "promise 3",
        (
            "given = allocation.gpu_uuids if allocation is not None else ()",
            "given = allocation.gpu_uuids if allocation is not None else tuple(self._workers)",
        ),
        needs=("pods deleted",),
    ),
    mutant(
        "kubelet-away-is-no-pod",
        "perseus_agent.node.lease_clocks",
        "promise 4",
        ("                if why:\n", "                if False:\n"),
        needs=("kubelet away",),
    ),
    mutant(
        "older-epoch-obeyed",
        "perseus_agent.node.leases",
        "promise 8",
        ("        if epoch < seen:\n", "        if False:\n"),
        needs=("operator stopped",),
    ),
    mutant(
        "epoch-not-in-the-journal",
        "perseus_agent.clocks.journal",
        "promise 8",
        ("            epochs[job_uid] = epoch\n", ""),
        needs=("operator stopped",),
    ),
    mutant(
        "agent-that-is-lost-is-forgotten",
        "perseus_agent.clocks.lost_gpu",
        "promise 6",
        ("        if self._answers < self._needed:\n", "        if True:\n"),
        needs=("GPUs lost",),
    ),
    mutant(
        "resting-clock-ends-with-its-lease",
        "perseus_agent.node.leases",
        "promise 12",
        ("if lease.lapsed or not lease.clock.keep_s:", "if True:"),
        needs=within("power limited", "operators gone", 8.0),
    ),
    mutant(
        "overtaken-request-granted",
        "perseus_agent.node.leases",
        "hole of a seed",
        ("    if number and number < lease.number:\n", "    if False:\n"),
        needs=("messages held",),
    ),
    mutant(
        "silence-of-an-engine-unnoticed",
        "perseus_agent.serving.law",
        "promise 2",
        ("        if now_s - self._sampled_s > self._settings.silence_s:\n", "        if False:\n"),
        needs=("engine hangs",),
    ),
    mutant(
        "lie-of-an-engine-believed",
        "perseus_agent.serving.law",
        "promise 2",
        (
            "self._sample = sample if sample.possible and sample.time_s >= self._engine_s else None",
            "self._sample = sample",
        ),
        needs=("engine lies",),
    ),
    mutant(
        "counts-that-fall-believed",
        "perseus_agent.serving.samples",
        "promise 2",
        ("if not _grows(before.counts, reading.counts):", "if False:"),
        needs=("engine lies",),
    ),
    mutant(
        "table-of-one-request",
        "perseus_agent.serving.law",
        "promise 6",
        ("self.table.clock_mhz(sample.running + sample.prefilling,", "self.table.clock_mhz(1,"),
    ),
    mutant(
        "boost-for-ten-minutes",
        "perseus_agent.serving.law",
        "promise 6",
        ("if now_s - self._boosted_s >= self._settings.hold_s:", "if now_s - self._boosted_s >= 600.0:"),
    ),
    mutant(
        "rank-takes-the-thread",
        "perseus_agent.clocks.rank_budget",
        "promise 10",
        ("SHARE: Final = 0.1\n", "SHARE: Final = 0.95\n"),
        needs=("rank rings",),
    ),
    mutant(
        "rank-takes-five-minutes",
        "perseus_agent.clocks.rank_budget",
        "promise 10",
        ("BURST_S: Final = 0.3\n", "BURST_S: Final = 300.0\n"),
        needs=("rank rings",),
    ),
)
