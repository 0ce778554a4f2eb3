"""The code broken on purpose, a line or two each: what the simulation must find.

``origin`` says where a mutant comes from: of the issue's lists, or of a promise. Those of which the simulation cannot
know anything, since their part of the system is not in it, are in ``NOT_IN_THE_WORLD`` with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Mutant:
    """Lines of one module, as they are and as they become."""

    name: str
    module: str
    changes: tuple[tuple[str, str], ...]
    origin: str
    needs: tuple[str, ...] = ()
    """Kinds of faults without which nothing can show: seeds that draw none of them are not tried."""


def _mutant(name: str, module: str, origin: str, *changes: tuple[str, str], needs: tuple[str, ...] = ()) -> Mutant:
    return Mutant(name, module, changes, origin, needs)


_SURVIVED: Final = "survived all suites"
_HOLE: Final = "hole of an attack"

MUTANTS: Final = {
    mutant.name: mutant
    for mutant in (
        _mutant(
            "keeper-waits-10-s",
            "perseus_agent.keeper.keeper",
            _SURVIVED,
            ("OVERDUE_TICKS: Final = 3", "OVERDUE_TICKS: Final = 200"),
            needs=("agent stopped",),
        ),
        _mutant(
            "agent-silent-7.5-s",
            "perseus_agent.lifecycle",
            _SURVIVED,
            ("SILENT_S: Final = 0.75", "SILENT_S: Final = 7.5"),
            needs=("agent stopped",),
        ),
        _mutant(
            "any-reason-excuses",
            "perseus_agent.clocks.read_back",
            _SURVIVED,
            ("if clock_mhz < highest and reasons:", "if reasons:"),
            needs=("foreign lock",),
        ),
        _mutant(
            "select-without-authorisation",
            "perseus_agent.servers.grpc_service",
            _SURVIVED,
            (
                "            self.authorise(context)\n            with self._selecting():",
                "            with self._selecting():",
            ),
            needs=("stranger calls",),
        ),
        _mutant(
            "period-of-nothing",
            "perseus_agent.clocks.timetable",
            _HOLE,
            ("for _ in range(AHEAD):", "while True:"),
            ("period_us < PERIOD_MIN_US * iterations", "period_us < 0"),
            needs=("rank forges",),
        ),
        _mutant(
            "iterations-kept-for-ever",
            "perseus_operator.nodes.iterations",
            _HOLE,
            ("        forget_oldest(self._open, report)\n", ""),
            needs=("rank forges",),
        ),
        _mutant(
            "lease-never-ends",
            "perseus_agent.node.leases",
            "promise 2",
            ("if lease.expires_s <= now_s]", "if lease.expires_s <= now_s - 60]"),
            needs=("link cut",),
        ),
        _mutant(
            "keeper-resets-nothing",
            "perseus_agent.keeper.keeper",
            "promise 2",
            ("self._devices[uuid].reset_clocks()", "pass"),
        ),
        _mutant(
            "keeper-learns-nothing",
            "perseus_agent.clocks.governor",
            "promise 2",
            (
                "                if not self._held:\n                    self._hold()",
                "                if False:\n                    self._hold()",
            ),
        ),
        _mutant(
            "process-leaves-and-keeps",
            "perseus_agent.node.node",
            "promise 2",
            ('            self._unbind(session, "the process has gone")\n', ""),
        ),
        _mutant(
            "release-of-clocks-forgotten",
            "perseus_agent.node.node",
            "promise 2",
            ("pending = self._lease_clocks.ended(lease.job_uid, reason)", "pending: dict[str, Future[bool]] = {}"),
        ),
        _mutant(
            "journal-is-not-read",
            "perseus_agent.node.node",
            "promise 2",
            ("in self._journal.locked & self.workers.keys():", "in ():"),
            needs=("node out of memory",),
        ),
        _mutant(
            "reset-tried-in-a-minute",
            "perseus_agent.clocks.governor",
            "promise 2",
            ("RESTORE_RETRY_S: Final = 0.5", "RESTORE_RETRY_S: Final = 60.0"),
            needs=("GPU fails",),
        ),
        _mutant(
            "suspended-job-goes-on",
            "perseus_operator.jobs.waiting",
            "promise 2",
            ("    if spec is not None and spec.suspend:", "    if False:"),
            needs=("job suspended",),
        ),
        _mutant(
            "foreign-lock-overwritten",
            "perseus_agent.clocks.governor",
            "promise 3",
            ("if self.standing is Standing.FOREIGN or (wanted == self.applied", "if (wanted == self.applied"),
            needs=("foreign lock",),
        ),
        _mutant(
            "foreign-lock-given-back",
            "perseus_agent.clocks.governor",
            "promise 3",
            ("if ours is not None and abs(clock_mhz - ours) > self._read_back.tolerance(ours):", "if ours is None:"),
            needs=("foreign lock",),
        ),
        _mutant(
            "gpus-of-a-pod-that-is-unknown",
            "perseus_agent.node.lease_clocks",
            "promise 3",
            (
                "given = allocation.gpu_uuids if allocation is not None else ()",
                "given = allocation.gpu_uuids if allocation is not None else tuple(self._workers)",
            ),
            needs=("pods deleted",),
        ),
        _mutant(
            "refused-edit-takes-away",
            "perseus_operator.jobs.job",
            "promise 9",
            ("        self.spec_fault = fault\n", "        self.spec, self.spec_fault = None, fault\n"),
            needs=("job misedited",),
        ),
        _mutant(
            "refused-edit-is-not-said",
            "perseus_operator.jobs.conditions",
            "promise 9",
            ("    if job.spec_fault is not None:\n", "    if job.spec_fault is not None and job.spec is None:\n"),
            needs=("job misedited",),
        ),
        _mutant(
            "kubelet-away-is-no-pod",
            "perseus_agent.node.lease_clocks",
            "promise 4",
            ("                if why:\n", "                if False:\n"),
            needs=("kubelet away",),
        ),
        _mutant(
            "no-renewal-while-one-fails",
            "perseus_operator.controller.node_session",
            "promise 4",
            ("retry_at_s=now_s + backoff_s(node.failures)", "retry_at_s=now_s + 30"),
            needs=("link blinks",),
        ),
        _mutant(
            "older-epoch-obeyed",
            "perseus_agent.node.leases",
            "promise 8",
            ("        if epoch < seen:\n", "        if False:\n"),
            needs=("operator stopped",),
        ),
        _mutant(
            "epoch-not-in-the-journal",
            "perseus_agent.clocks.journal",
            "promise 8",
            ("            epochs[job_uid] = epoch\n", ""),
            needs=("operator stopped",),
        ),
        _mutant(
            "lost-shard-still-served",
            "perseus_operator.replicas.shards",
            "promise 8",
            (
                "        self._held -= shards\n        if shards:\n            self._lost(shards)",
                "        self._held -= shards",
            ),
            needs=("operator stopped",),
        ),
        _mutant(
            "lost-lease-never-acquired-again",
            "perseus_operator.nodes.actions",
            "promise 6",
            (
                "    if not held or node.expires_at_s <= now_s:",
                "    if not held and node.leased_pods is not None:",
            ),
            needs=("link cut",),
        ),
        _mutant(
            "renewed-too-late",
            "perseus_operator.nodes.node",
            "promise 6",
            ("if coming else ttl_s / 3", "if coming else ttl_s * 1.1"),
        ),
        _mutant(
            "deleted-job-not-released",
            "perseus_operator.controller.operator",
            "promise 2",
            (
                "        for uid in uids - await self._kube.job_uids(",
                "        for uid in set() - await self._kube.job_uids(",
            ),
            needs=("watch silent",),
        ),
        _mutant(
            "recommend-sets-clocks",
            "perseus_operator.families.training.decide",
            "promise 3",
            ("return Intent(plans, wanted, spec.mode.sets_clocks, None)", "return Intent(plans, wanted, True, None)"),
            needs=("job recommends",),
        ),
        _mutant(
            "fixed-clock-in-every-mode",
            "perseus_operator.families.fixed_clock.clock",
            "promise 3",
            ("    if not spec.mode.sets_clocks:", "    if False:"),
            needs=("job recommends",),
        ),
        _mutant(
            "agent-that-is-lost-is-forgotten",
            "perseus_agent.clocks.lost_gpu",
            "promise 6",
            ("        if self._answers < self._needed:\n", "        if True:\n"),
            needs=("GPUs lost",),
        ),
        _mutant(
            "energy-of-one-rank",
            "perseus_operator.nodes.iterations",
            "promise 7",
            (
                "        energy_mj=_total(rank.energy_mj for rank in ranks),\n",
                "        energy_mj=_total(rank.energy_mj for rank in ranks[:1]),\n",
            ),
        ),
        _mutant(
            "energy-of-one-pipeline",
            "perseus_operator.nodes.iterations",
            "promise 7",
            (
                "            energy_mj=_total(part.energy_mj for part in parts.values()),\n",
                "            energy_mj=_total(part.energy_mj for part in [*parts.values()][:1]),\n",
            ),
        ),
        _mutant(
            "share-not-obeyed",
            "perseus_operator.families.training.features.power.plans",
            "promise 12",
            ("    if point <= frontier.lookup(target.time_us):", "    if True:"),
            needs=("power limited",),
        ),
        _mutant(
            "straggler-beyond-the-share",
            "perseus_operator.families.training.decide",
            "promise 12",
            ("least_us=aim.target.time_us if aim.limited_by_share else 0.0", "least_us=0.0"),
            needs=("power limited",),
        ),
        _mutant(
            "resting-clock-ends-with-its-lease",
            "perseus_agent.node.leases",
            "promise 12",
            ("if lease.lapsed or not lease.clock.keep_s:", "if True:"),
            needs=("power limited", "link cut"),
        ),
        _mutant(
            "highest-resting-clock",
            "perseus_operator.families.training.features.power.resting_clock",
            "promise 12",
            ("max(fitting, default=frontier.ceilings_mw[0][0])", "frontier.ceilings_mw[-1][0]"),
            needs=("power limited", "link cut"),
        ),
        _mutant(
            "overtaken-request-granted",
            "perseus_agent.node.leases",
            "hole of a seed",
            ("    if number and number < lease.number:\n", "    if False:\n"),
            needs=("disk slow",),
        ),
        _mutant(
            "lease-without-an-answer-forgotten",
            "perseus_operator.nodes.actions",
            "hole of a seed",
            (" and not node.lease_asked\n", "\n"),
            needs=("agent stopped", "job recommends"),
        ),
        _mutant(
            "silence-of-an-engine-unnoticed",
            "perseus_agent.serving.law",
            "promise 2",
            ("        if now_s - self._sampled_s > self._settings.silence_s:\n", "        if False:\n"),
            needs=("engine hangs",),
        ),
        _mutant(
            "lie-of-an-engine-believed",
            "perseus_agent.serving.law",
            "promise 2",
            (
                "self._sample = sample if sample.possible and sample.time_s >= self._engine_s else None",
                "self._sample = sample",
            ),
            needs=("engine lies",),
        ),
        _mutant(
            "counts-that-fall-believed",
            "perseus_agent.serving.samples",
            "promise 2",
            ("if not _grows(before.counts, reading.counts):", "if False:"),
            needs=("engine lies",),
        ),
        _mutant(
            "table-of-one-request",
            "perseus_agent.serving.law",
            "promise 6",
            ("self.table.clock_mhz(sample.running + sample.prefilling,", "self.table.clock_mhz(1,"),
        ),
        _mutant(
            "boost-for-ten-minutes",
            "perseus_agent.serving.law",
            "promise 6",
            ("if now_s - self._boosted_s >= self._settings.hold_s:", "if now_s - self._boosted_s >= 600.0:"),
        ),
        _mutant(
            "canary-of-all-replicas",
            "perseus_operator.families.serving.pool",
            "promise 3",
            (
                "return (spec.mode is Mode.ENFORCE and stage is not Stage.CANARY) or pod_uid == self.trials.canary",
                "return True",
            ),
            needs=("pool's canary",),
        ),
        _mutant(
            "pool-recommends-and-sets-clocks",
            "perseus_operator.api.serving.spec",
            "promise 3",
            ("return self.mode.sets_clocks and self.limited", "return self.limited"),
            needs=("pool recommends",),
        ),
        _mutant(
            "engines-of-other-models-follow",
            "perseus_operator.families.serving.features.signals.replicas",
            "promise 3",
            ("[one for one in replicas if one.fingerprint == chosen]", "replicas"),
            needs=("engines replaced",),
        ),
    )
}

NOT_IN_THE_WORLD: Final = {
    "unknown energy of a rank counts as 0": "no counter of a simulated GPU is missing for one rank alone",
    "a rank's share of its GPU's thread 0.95, or its burst 300 s": "threads take no processor time",
    "the page remembers rights for 30,000 s": "there is no page",
    "Student's t with one degree of freedom too many": "a mutant of statistics: no order of events shows it",
    "ClockLine.asked quadratic in a rank's times (H3)": "schedules are short, and a quadratic of six is nothing",
    "an answer of a solver worker parsed on the event loop (H4)": "the solver's workers are honest",
}
"""Of the lists of the issue, those that no seed can find yet, and why."""
