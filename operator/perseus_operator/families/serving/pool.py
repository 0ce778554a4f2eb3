"""All that is known of one pool: its parts, and the events that concern several of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace

from perseus_core.serving import DEFAULT_CLOCKS, FOLLOW_TABLE, ServingLimits
from perseus_operator.api.job import Mode
from perseus_operator.api.serving.spec import PoolSpec, Role, Scaling
from perseus_operator.families.serving.features.advice.advice import Adviser, Situation
from perseus_operator.families.serving.features.advice.arrivals import Arrivals
from perseus_operator.families.serving.features.autoscaler.restraint import Restraint
from perseus_operator.families.serving.features.comparison.switchback import (
    BLOCK_S,
    SETTLES_S,
    Saved,
    Switchback,
    block_at,
    switched_back,
)
from perseus_operator.families.serving.features.exploration.trials import Missed, Trials, ladder_of
from perseus_operator.families.serving.features.groups.clocks import Groups, carrying_mhz
from perseus_operator.families.serving.features.inheritance.inheritance import Inheritance, Stage, StoredWindows
from perseus_operator.families.serving.features.model.state import NO_LIMIT_S, Model, window_of
from perseus_operator.families.serving.features.objective.baseline import SHARE as RELATIVE
from perseus_operator.families.serving.features.objective.baseline import Baseline, BaselineTimes
from perseus_operator.families.serving.features.objective.requests import LEAST_REQUESTS, RequestTimes, worst_share
from perseus_operator.families.serving.features.overload.overload import Overload
from perseus_operator.families.serving.features.power.ceiling import (
    PoolCeiling,
    PoolCeilings,
    ceiling_within,
    ceilings_of_pool,
)
from perseus_operator.families.serving.features.power.demand import Demand
from perseus_operator.families.serving.features.signals.replicas import Replica, Signals, signals_of
from perseus_operator.families.serving.features.split.lengths import Lengths
from perseus_operator.families.serving.features.split.planning import Planning
from perseus_operator.jobs.job import Job
from perseus_operator.nodes.engines import EngineWindow
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import Now
from perseus_solver.serving import SHARE, Ceiling, Window

logger = logging.getLogger(__name__)


class ServingPool:
    """One ServingPool. Parts are changed by their own named methods, and by those below."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.signals = Signals()
        self.requests = RequestTimes()
        self.model = Model()
        self.inheritance = Inheritance()
        self._before = self.model
        """What was known without the profile that is compared."""
        self.trials = Trials()
        self.switchback = Switchback()
        self.demand = Demand()
        self.groups = Groups()
        self.arrivals = Arrivals()
        self.adviser = Adviser()
        self.overload, self.restraint = Overload(), Restraint()
        self.lengths = Lengths()
        self.planning = Planning()
        self.claimed: PoolCeilings | None = None
        """What the pool has said to PowerBudgets that it may do; None: nothing that they could limit."""
        self._back: tuple[int, Signals, PoolSpec | None, str] = -1, self.signals, None, ""
        self.baseline = Baseline()
        self._restored: tuple[str, Mapping[int, Missed], Saved | None] = "", {}, None
        """Of which fingerprint an earlier operator has stored missed clocks and savings, and which."""

    @property
    def spec(self) -> PoolSpec | None:
        """Of the pool."""
        spec = self.job.spec
        assert spec is None or isinstance(spec, PoolSpec)
        return spec

    @property
    def limits(self) -> ServingLimits | None:
        """Of its requests, where the spec allows clocks to be set, or says limits; None: there are none, or not yet."""
        spec = self.spec
        if spec is None:
            return None
        first_token, per_token = self.role is not Role.DECODE, self.role is not Role.PREFILL
        slowdown = spec.max_slowdown_ratio
        if slowdown is None:
            return None if spec.limits is None else spec.limits.of(first_token=first_token, per_token=per_token)
        if self.by_page:
            return None
        return self.baseline.limits(slowdown, first_token=first_token, per_token=per_token)

    @property
    def role(self) -> Role:
        """What its engines do of each request: as the spec says, otherwise as they have said last themselves."""
        return self._said if self.spec is None or self.spec.role is Role.AUTO else self.spec.role

    @property
    def by_page(self) -> str:
        """A replica whose page is read: a share of its times is less than the width of its buckets; empty: none is."""
        return next((replica.pod for replica in self.signals.replicas if replica.engine.by_page), "")

    def restored(
        self,
        fingerprint: str,
        missed: Mapping[int, Missed],
        saved: Saved | None,
        baseline: BaselineTimes | None = None,
    ) -> None:
        """An earlier operator has stored this of an engine.

        Args:
            fingerprint: of the engine.
            missed: which clocks have missed a limit.
            saved: what is saved.
            baseline: what requests take at default clocks.
        """
        self._restored = fingerprint, missed, saved
        self._restored_baseline = baseline

    def looked(self, wall_s: float) -> None:
        """Take in what has changed on the nodes: which replicas there are, and with which clocks they can run."""
        self.groups.looked(self.signals.replicas, self.job.nodes, wall_s)
        before = self.signals.fingerprint
        self.signals = signals_of(self.job.nodes, before, self.groups.faults)
        if self.signals.replicas:
            self._said = self.signals.replicas[0].role
        if self.signals.fingerprint and self.signals.fingerprint != self._known:
            self.model, self.inheritance = Model(), Inheritance()
            self.trials, self.switchback, self.baseline = Trials(), Switchback(), Baseline()
            self.demand = Demand()
            if self._known:  # an earlier operator's advice was for this one
                self.adviser = Adviser(self.adviser.forecast)
            self._known = self.signals.fingerprint
            if self._restored[0] == self._known:
                self.baseline.restored(self._restored_baseline)
                self.switchback.restored(self._restored[2])
        uids = {pod.uid for node in self.job.nodes.values() for pod in node.pods}
        self.requests.pods_observed(uids)
        self.groups.pods_observed(uids)
        self.arrivals.pods_observed(uids)
        self.switchback.pods_observed(uids)
        self.overload.pods_observed(uids)
        spec = self.spec
        limits = self.limits if spec is not None and spec.sets_clocks else None
        if limits is not None and spec is not None and self.signals.replicas:
            self._begin(limits, spec.clocks.minimum_megahertz)
        self._choose_canary()
        if self.inheritance.confirming and self.model.table is None and not (self.model.fitting or self.model.wanted):
            self._drop("no table of clocks follows from its windows")

    _said = Role.MIXED
    _known = ""
    """The fingerprint that model and trials are of; they outlive a moment without replicas."""
    _restored_baseline: BaselineTimes | None = None
    _begun: tuple[tuple[int, ...], ServingLimits] | None = None

    def _begin(self, limits: ServingLimits, minimum_mhz: int) -> None:
        """Begin to try clocks, anew if there are others, or other limits."""
        ladder_mhz = self.ladder_mhz(minimum_mhz)
        wanted = (ladder_mhz, limits)
        if not ladder_mhz or (self._begun == wanted and self.trials.exploration is not None):
            return
        limit_s = limits.per_token_s or limits.first_token_s or NO_LIMIT_S
        if self.trials.exploration is not None:
            self.model.limits_changed()
            if self._begun is not None and self._begun[0] == ladder_mhz and self._moves_with_baseline:
                self._begun = wanted
                self.trials.limit_moved(limit_s)
                return
        fingerprint, missed, _ = self._restored
        clocks = (*ladder_mhz, self.signals.replicas[0].highest_mhz)
        missed = missed if fingerprint == self.signals.fingerprint else {}
        self.trials.began(clocks, limit_s, missed, RELATIVE if self._moves_with_baseline else SHARE)
        self._restored, self._begun = ("", {}, None), wanted

    def ladder_mhz(self, minimum_mhz: int) -> tuple[int, ...]:
        """The clocks below the highest that replicas may be locked at, ascending; empty: none."""
        return ladder_of(self.signals.replicas[0].clocks_mhz, minimum_mhz) if self.signals.replicas else ()

    def _choose_canary(self) -> None:
        replicas = self.signals.replicas
        if self.signals.of_pod(self.trials.canary) is None:
            self.trials.canary_chosen(replicas[0].pod_uid if replicas else "")

    def advised(self, now: Now) -> None:
        """It is this time now: say how many replicas the load needs."""
        spec, limits, adviser = self.spec, self.limits, self.adviser
        pods = [pod for node in self.job.nodes.values() for pod in node.pods]
        adviser.starts.looked(pods, [one.pod_uid for one in self.signals.replicas], now.wall_s)
        if limits != self._advised_for:
            self._advised_for = limits
            adviser.limits_changed()
        if spec is None or spec.scaling is not Scaling.ADVISE:
            adviser.refused("spec.scaling is Off.", now.wall_s)
        elif limits is None:
            adviser.refused("It is not known what the requests were promised: spec.objective.", now.wall_s)
        elif not self.signals.replicas:
            adviser.refused("No engine of the pool says what it does.", now.wall_s)
        elif (per_s := self.arrivals.per_s(now.wall_s)) is None:
            adviser.refused("Requests are counted for a minute first.", now.wall_s)
        else:
            adviser.looked(per_s, Situation(len(self.signals.replicas), self._unsure(limits)), now)

    _advised_for: ServingLimits | None = None

    def _unsure(self, limits: ServingLimits) -> str:
        """Why fewer replicas must not be advised: of some it is not known what they do, or all are too slow as it is.

        Empty: there is no reason.
        """
        signals = self.signals
        others = len(signals.silent) + len(signals.unknown)
        if others:
            return f"{counted(others, 'pod')} do not say what they do"
        if any(node.leased_pods is None for node in self.job.nodes.occupied):
            return "not all agents are heard"
        lately = self.requests.of_all()
        share = worst_share(lately, limits) if lately.requests >= LEAST_REQUESTS else None
        return "requests miss their limits" if share is not None and share < limits.attainment else ""

    def budget_asked(self, wall_s: float) -> PoolCeilings | None:
        """A PowerBudget asks what the pool may do; decisions rest on this answer until the next."""
        self.demand.time_passed(wall_s)
        signals = self.signals
        self.claimed = ceilings_of_pool(self.spec, self._ceilings, signals.replicas, self.job.nodes, self.demand)
        return self.claimed

    @property
    def granted(self) -> PoolCeiling | None:
        """What its share of a PowerBudget allows; None: no budget limits the pool."""
        return ceiling_within(self.job.share, self.claimed) if self._ceilings else None

    @property
    def _ceilings(self) -> tuple[Ceiling, ...]:
        """What a replica carries under each ceiling; of a stored profile it counts once that is confirmed."""
        return () if self.inheritance.confirming else self.model.ceilings

    @property
    def ceiling_mhz(self) -> int:
        """Above which no clock may go; `DEFAULT_CLOCKS`: there is none."""
        return DEFAULT_CLOCKS if (granted := self.granted) is None else granted.ceiling_mhz

    def trying(self, wall_s: float) -> bool:
        """Whether the canary holds a clock that is tried; none above the ceiling is."""
        ceiling_mhz, clock_mhz = self.ceiling_mhz, self.trials.clock_mhz
        permitted = ceiling_mhz == DEFAULT_CLOCKS or DEFAULT_CLOCKS < clock_mhz <= ceiling_mhz
        return permitted and self.trials.under_way(wall_s) and not (self.inheritance.confirming or self.restraint.near)

    def window_reported(self, window: EngineWindow, ceiling_mhz: int, now: Now) -> bool:
        """An engine did this in about a second; whether it changes what is to be ordered or fitted.

        Args:
            window: of any pod of the pool.
            ceiling_mhz: above which its agent lets no clock go; `DEFAULT_CLOCKS`: there is none.
            now: the time.
        """
        wall_s = now.wall_s
        self.requests.window_seen(window.pod_uid, window)
        started = window.requests if self.role is Role.DECODE else sum(window.first_tokens.values())
        self.arrivals.window_seen(window, started, wall_s)
        self.lengths.window_seen(window, wall_s)
        replica, spec = self.signals.of_pod(window.pod_uid), self.spec
        default = self._compared(window.pod_uid, wall_s)
        whole = replace(window, energy_mj=None) if window.pod_uid in self.signals.divided else window
        together = self.groups.arrived(replica, whole, self.job.nodes, now, default=default)
        if replica is None or spec is None:
            return False
        table = self.model.table
        highest_mhz = ceiling_mhz or (DEFAULT_CLOCKS if table is None else table.boost_mhz[-1])
        self.overload.window_seen(window, self.limits, highest_mhz)
        self.model.requests_seen(window)
        self.demand.window_seen(window, ceiling_mhz, wall_s)
        if not together:
            return False
        fitted = window_of(window, replica.highest_mhz)
        limits = self.limits if spec.sets_clocks else None
        if ceiling_mhz == DEFAULT_CLOCKS:
            self._measure_baseline(window, wall_s)
        if self.inheritance.confirming:
            return limits is not None and not self.restraint.near and self._confirm(window.pod_uid, fitted, wall_s)
        if fitted is not None:
            self.model.window_taken(fitted)
        if limits is None or window.pod_uid != self.trials.canary or not self.trying(wall_s):
            return False
        left = self.trials.window_seen(window, limits, scatter=self.model.scatter, wall_s=wall_s)
        if left:
            self.model.fit_requested()
        return left

    def group_mhz(self, replica: Replica, mhz: int, wall_s: float) -> int:
        """The clock of all GPUs of a group over nodes: a clock that is tried, or the least that carries its load.

        Args:
            replica: the group.
            mhz: what one replica on one node would be ordered.
            wall_s: the time.
        """
        if mhz == FOLLOW_TABLE:
            mhz, ceiling_mhz = carrying_mhz(self.model.ceilings, self.demand), self.ceiling_mhz
            mhz = mhz if ceiling_mhz == DEFAULT_CLOCKS or mhz <= ceiling_mhz else DEFAULT_CLOCKS
        return self.groups.wanted_mhz(replica, mhz, self.job.nodes, wall_s)

    # ------------------------------------------------------------------------------------------------ a stored profile

    def profile_read(self, stored: StoredWindows | None) -> None:
        """A profile of the engine was looked for; None: there is none."""
        if stored is None or self.model.table is not None:
            self.inheritance.absent()
            return
        self._before, self.model = self.model, Model()
        self.model.inherited(stored.windows, stored.prompt_tokens)
        self.inheritance.begun(stored.source)

    def _confirm(self, pod_uid: str, fitted: Window | None, wall_s: float) -> bool:
        """A replica did this while a profile is compared; whether that changes what is to be ordered."""
        inheritance, model = self.inheritance, self.model
        follows = inheritance.stage is Stage.CANARY
        if model.table is None or model.result is None or (follows and pod_uid != self.trials.canary):
            return False
        if not inheritance.window_seen(fitted, model.result):
            return False
        if not inheritance.source:
            self._drop()
        elif not inheritance.confirming:
            for window in inheritance.windows:
                model.window_taken(window)
            model.store_ended(inheritance.source)
            if model.result.seen is not None:
                self.trials.inherited(model.result.seen.lowest_mhz, wall_s)
        return True

    def _drop(self, why: str = "") -> None:
        """Begin as if there had been no profile, with what was seen meanwhile."""
        if why:
            self.inheritance.dropped(why)
        logger.warning("%s: %s", self.job.ref, self.inheritance.refusal)
        self.model = self._before
        for window in self.inheritance.windows:
            self.model.window_taken(window)

    # ------------------------------------------------------------------------------------------------------ comparison

    @property
    def _moves_with_baseline(self) -> bool:
        return self.spec is not None and self.spec.objective.max_slowdown is not None

    def _measure_baseline(self, window: EngineWindow, wall_s: float) -> None:
        """Count what requests of a replica take that is at default clocks by order."""
        uid = window.pod_uid
        if self.model.table is not None and self.follows(uid):
            settled = wall_s - block_at(wall_s) * BLOCK_S >= SETTLES_S
            by_order = uid == self.switched_back(wall_s) and settled
        else:
            by_order = uid != self.trials.canary or not self.trying(wall_s)
        if by_order:
            self.baseline.window_seen(window)

    def _compared(self, pod_uid: str, wall_s: float) -> bool | None:
        """Whether a replica is to be at default clocks for comparison; None: it is not compared now."""
        tried = pod_uid == self.trials.canary and self.trying(wall_s)
        if tried or self.model.table is None or not self.follows(pod_uid) or self.ceiling_mhz != DEFAULT_CLOCKS:
            return None
        return self.switched_back(wall_s) == pod_uid

    def measured(self, pod_uid: str) -> Iterator[EngineWindow]:
        """Yield the windows of a pod of which the joules of all GPUs have become known, and compare them."""
        for one in self.groups.energies.known(pod_uid):
            window = one.window
            if one.default is None:
                self.switchback.interrupted(pod_uid)
            else:
                tokens = window.prompt_tokens if self.role is Role.PREFILL else window.generated_tokens
                self.switchback.window_seen(window, tokens, default=one.default, wall_s=one.wall_s)
            yield window

    def follows(self, pod_uid: str) -> bool:
        """Whether the mode lets a replica follow a table."""
        spec, stage = self.spec, self.inheritance.stage
        if spec is None or not spec.sets_clocks or stage is Stage.DEFAULT or self.restraint.near:
            return False
        return (spec.mode is Mode.ENFORCE and stage is not Stage.CANARY) or pod_uid == self.trials.canary

    def switched_back(self, wall_s: float) -> str:
        """UID of the replica's pod that is to run at default clocks now, for comparison; empty: none is.

        A ceiling does not permit them, and a profile that is compared needs the windows of all.
        """
        if self.inheritance.confirming or self.ceiling_mhz != DEFAULT_CLOCKS:
            return ""
        block = block_at(wall_s)
        if self._back[:3] != (block, self.signals, self.spec):  # asked for each window
            uids = [one.pod_uid for one in self.signals.replicas if self.follows(one.pod_uid)]
            self._back = block, self.signals, self.spec, switched_back(self.job.ref.uid, block, uids)
        return self._back[3]
