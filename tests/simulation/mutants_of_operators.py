"""Operators broken on purpose: see ``mutants``."""

from __future__ import annotations

from typing import Final

from tests.simulation.mutant import HOLE, Mutant, mutant, overlap, within

MUTANTS_OF_OPERATORS: Final[tuple[Mutant, ...]] = (
    mutant(
        "iterations-kept-for-ever",
        "perseus_operator.nodes.iterations",
        HOLE,
        ("        forget_oldest(self._open, report)\n", ""),
        needs=("rank forges",),
    ),
    mutant(
        "suspended-job-goes-on",
        "perseus_operator.jobs.waiting",
        "promise 2",
        ("    if spec is not None and spec.suspend:", "    if False:"),
        needs=("job suspended",),
    ),
    mutant(
        "refused-edit-takes-away",
        "perseus_operator.jobs.job",
        "promise 9",
        ("        self.spec_fault = fault\n", "        self.spec, self.spec_fault = None, fault\n"),
        needs=("job misedited",),
    ),
    mutant(
        "refused-edit-is-not-said",
        "perseus_operator.jobs.conditions",
        "promise 9",
        ("    if job.spec_fault is not None:\n", "    if job.spec_fault is not None and job.spec is None:\n"),
        needs=("job misedited",),
    ),
    mutant(
        "no-renewal-while-one-fails",
        "perseus_operator.controller.node_session",
        "promise 4",
        ("retry_at_s=now_s + backoff_s(node.failures)", "retry_at_s=now_s + 30"),
        needs=("link blinks",),
    ),
    mutant(
        "lost-shard-still-served",
        "perseus_operator.replicas.shards",
        "promise 8",
        (
            "        self._held -= shards\n        if shards:\n            self._lost(shards)",
            "        self._held -= shards",
        ),
        needs=("operator stopped",),
    ),
    mutant(
        "lost-lease-never-acquired-again",
        "perseus_operator.nodes.actions",
        "promise 6",
        (
            "    if not held or node.expires_at_s <= now_s:",
            "    if not held and node.leased_pods is not None:",
        ),
        needs=("link cut",),
    ),
    mutant(
        "renewed-too-late",
        "perseus_operator.nodes.node",
        "promise 6",
        ("if coming else ttl_s / 3", "if coming else ttl_s * 1.1"),
    ),
    mutant(
        "deleted-job-not-released",
        "perseus_operator.controller.operator",
        "promise 2",
        (
            "        for uid in uids - await self._kube.job_uids(",
            "        for uid in set() - await self._kube.job_uids(",
        ),
        needs=("watch silent",),
    ),
    mutant(
        "recommend-sets-clocks",
        "perseus_operator.families.training.decide",
        "promise 3",
        ("    if not spec.mode.sets_clocks:\n        return no_clocks(spec.mode)\n", ""),
        ("return Intent(plans, wanted, spec.mode.sets_clocks, None)", "return Intent(plans, wanted, True, None)"),
        needs=("job recommends",),
    ),
    mutant(
        "fixed-clock-in-every-mode",
        "perseus_operator.families.fixed_clock.clock",
        "promise 3",
        ("    if not spec.mode.sets_clocks:", "    if False:"),
        needs=("job recommends",),
    ),
    mutant(
        "energy-of-one-rank",
        "perseus_operator.nodes.iterations",
        "promise 7",
        (
            "        energy_mj=_total(rank.energy_mj for rank in ranks),\n",
            "        energy_mj=_total(rank.energy_mj for rank in ranks[:1]),\n",
        ),
    ),
    mutant(
        "energy-of-one-pipeline",
        "perseus_operator.nodes.iterations",
        "promise 7",
        (
            "            energy_mj=_total(part.energy_mj for part in parts.values()),\n",
            "            energy_mj=_total(part.energy_mj for part in [*parts.values()][:1]),\n",
        ),
    ),
    mutant(
        "share-not-obeyed",
        "perseus_operator.families.training.features.power.plans",
        "promise 12",
        ("    if point <= frontier.lookup(target.time_us):", "    if True:"),
        needs=("power limited",),
    ),
    mutant(
        "straggler-beyond-the-share",
        "perseus_operator.families.training.decide",
        "promise 12",
        ("least_us=aim.target.time_us if aim.limited_by_share else 0.0", "least_us=0.0"),
        needs=within("power limited", "operators gone", 8.0),
    ),
    mutant(
        "highest-resting-clock",
        "perseus_operator.families.training.features.power.resting_clock",
        "promise 12",
        ("max(fitting, default=frontier.ceilings_mw[0][0])", "frontier.ceilings_mw[-1][0]"),
        needs=("power limited",),
    ),
    mutant(
        "unknown-gpus-draw-nothing",
        "perseus_operator.families.fixed_clock.family",
        "hole of a seed",
        ("_says_all(node.clock, node.pods)", "True"),
        needs=within("power limited", "operators gone", 8.0),
    ),
    mutant(
        "unknown-draw-is-nothing",
        "perseus_operator.budgets.budget",
        "hole of a seed",
        ("reserved_w = max(reserved_w, before.reserved_w)", "pass"),
        needs=within("power limited", "operators gone", 8.0),
    ),
    mutant(
        "lease-without-an-answer-forgotten",
        "perseus_operator.nodes.actions",
        "hole of a seed",
        (" and not node.lease_asked\n", "\n"),
        needs=overlap(("messages held", "messages lost", "link cut", "agent stopped"), "job wavers"),
    ),
    mutant(
        "canary-of-all-replicas",
        "perseus_operator.families.serving.pool",
        "promise 3",
        (
            "return (spec.mode is Mode.ENFORCE and stage is not Stage.CANARY) or pod_uid == self.trials.canary",
            "return True",
        ),
        needs=("pool's canary",),
    ),
    mutant(
        "pool-recommends-and-sets-clocks",
        "perseus_operator.api.serving.spec",
        "promise 3",
        ("return self.mode.sets_clocks and self.limited", "return self.limited"),
        needs=("pool recommends",),
    ),
    mutant(
        "unknown-energy-is-none",
        "perseus_operator.nodes.iterations",
        "promise 4",
        ("    return None if None in energies else sum(", "    return sum("),
        needs=lambda faults: any(f["kind"] == "counter stops" and f["place"] % 11 < 4 for f in faults),  # of job-0
    ),
    mutant(
        "page-remembers-rights",
        "perseus_operator.servers.web.access",
        "promise 10",
        ("REMEMBERED_S: Final = 30.0\n", "REMEMBERED_S: Final = 30_000.0\n"),
        needs=("right taken away",),
    ),
    mutant(
        "answer-read-on-the-event-loop",
        "perseus_operator.families.training.work.frontier_loader",
        HOLE,
        (
            "        return await asyncio.to_thread(\n            open_frontier, data, request, digest",
            "        return open_frontier(\n            data, request, digest",
        ),
    ),
    mutant(
        "bound-of-twice-the-slowdown",
        "perseus_operator.api.objective",
        "promise 5",
        ("else ratio_from_percent(self.max_slowdown)", "else 2 * ratio_from_percent(self.max_slowdown)"),
    ),
    mutant(
        "saved-of-more-than-was-drawn",
        "perseus_operator.families.training.status.status",
        "promise 11",
        (
            "energy=percent(1 - measured.energy_mj / baseline.energy_mj)",
            "energy=percent(1 - 0.95 * measured.energy_mj / baseline.energy_mj)",
        ),
    ),
    mutant(
        "engines-of-other-models-follow",
        "perseus_operator.families.serving.features.signals.replicas",
        "promise 3",
        ("[one for one in replicas if one.fingerprint == chosen]", "replicas"),
        needs=("engines replaced",),
    ),
)
