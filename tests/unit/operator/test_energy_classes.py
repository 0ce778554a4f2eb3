"""EnergyClasses: when a PerseusJob is made and what of, what is said where none is, and what the status shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_core import keys
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.workload import Reference, ServerKind
from perseus_operator.classes.energy_classes import EnergyClasses
from perseus_operator.classes.pool_owners import MOST_OWNERS
from perseus_operator.clients.kube.pods import pod_of
from perseus_operator.controller.known_jobs import KnownJobs
from perseus_operator.errors import InvalidSpec, KubeConflict, KubeError, KubeUnavailable
from perseus_operator.objects.values import FIELD_MANAGER, MANAGED_BY, JobRef, Json, Now, Owner, Pod
from perseus_operator.servers.class_labels import label_pod

GRACE_S = 5.0
SPEC = {"objective": {"type": "MaxSlowdown", "maxSlowdown": "3%"}, "ttlSecondsAfterFinished": 60}
OWNER = Owner("batch/v1", "Job", "train", "u-job")


class Api:
    """One API server's objects, as far as classes need them."""

    def __init__(self) -> None:
        self.classes: list[Json] = []
        self.namespaces: dict[str, Mapping[str, str]] = {"team-a": {"tier": "batch"}}
        self.jobs: dict[tuple[str, str], tuple[str, Json, Owner]] = {}
        self.pools: dict[tuple[str, str], tuple[str, Json, Owner]] = {}
        self.owners: dict[tuple[str, str], list[Json]] = {}
        """``ownerReferences`` of pools."""
        self.version = "7"
        """Of every pool."""
        self.attempts = 0
        self.warnings: list[tuple[str, str, str]] = []
        """Kind and name of what each is about, and what it says."""
        self.statuses: list[Json] = []
        self.error: KubeError | None = None

    async def energy_classes(self) -> list[Json]:
        return self.classes

    async def write_class_status(self, name: str, uid: str, status: Json) -> str:
        if self.error:
            raise self.error
        self.statuses.append(status)
        return str(10 * len(self.statuses))

    async def namespace_labels(self, name: str) -> Mapping[str, str]:
        return self.namespaces[name]

    async def create_job(self, job: JobRef, energy_class: str, spec: Json, owner: Owner) -> None:
        self.attempts += 1
        if self.error:
            raise self.error
        made = self.pools if job.kind == keys.POOL_KIND else self.jobs
        if (job.namespace, job.name) in made:
            raise KubeConflict(job.name)
        made[job.namespace, job.name] = energy_class, spec, owner
        if job.kind == keys.POOL_KIND:
            self.owners[job.namespace, job.name] = [owner.reference()]

    async def set_owners(self, job: JobRef, owners: Sequence[Json], *, version: str) -> str:
        self.attempts += 1
        if self.error:
            raise self.error
        assert (job.kind, job.uid) == (keys.POOL_KIND, f"u-{job.name}")
        if version != self.version:
            raise KubeConflict(job.name)
        self.owners[job.namespace, job.name] = list(owners)
        return version

    async def warn(self, namespace: str, about: Owner, *, reason: str, message: str) -> None:
        assert namespace in {"team-a", "evil"}
        assert reason == "EnergyClassNotApplied"
        self.warnings.append((about.kind, about.name, message))


class Site:
    """A namespace with pods, and an operator that has been up for longer than the grace period."""

    def __init__(self) -> None:
        self.api = Api()
        self.classes = EnergyClasses(self.api, grace_s=GRACE_S)
        self.pods: dict[tuple[str, str], dict[str, Pod]] = {}
        self.now_s = 0.0

    def define(self, spec: Any = SPEC, name: str = "frugal") -> None:
        self.classes.observe({"metadata": {"name": name, "uid": f"u-{name}", "generation": 2}, "spec": spec})

    def run(self, name: str = "t-0", job: str = "train", owner: Owner | None = OWNER, **changes: Any) -> None:
        labels = {keys.LABEL_JOB: job, keys.LABEL_CLASS: "frugal", "batch.kubernetes.io/job-name": "train"}
        pod = Pod(f"u-{name}", "team-a", name, "node", job, labels, owner=owner, **changes)
        self.pods.setdefault(("team-a", job), {})[pod.uid] = pod

    async def tick(self, seconds: float = 10.0) -> None:
        self.now_s += seconds
        jobs, pools = KnownJobs(100), KnownJobs(100)
        for (namespace, name), (energy_class, spec, _) in self.api.jobs.items():
            metadata = {"namespace": namespace, "name": name, "uid": f"u-{name}"}
            jobs.observe({"metadata": metadata | {"labels": {keys.LABEL_CLASS: energy_class}}, "spec": spec})
        for (namespace, name), (energy_class, spec, _) in self.api.pools.items():
            ours = {MANAGED_BY: FIELD_MANAGER, keys.LABEL_CLASS: energy_class} if energy_class else {}
            metadata = {"namespace": namespace, "name": name, "uid": f"u-{name}", "resourceVersion": "7"}
            about = metadata | {"labels": ours, "ownerReferences": self.api.owners[namespace, name]}
            pools.observe({"metadata": about, "spec": spec}, keys.POOL_KIND)
        now = Now(self.now_s, 1.9e9 + self.now_s)
        await self.classes.tick(now, self.pods, jobs.of_kind(keys.KIND), pools.of_kind(keys.POOL_KIND))


@pytest.fixture
async def site() -> Site:
    made = Site()
    await made.tick()
    return made


async def test_the_job_of_a_workload_is_made_once_and_goes_with_it(site: Site) -> None:
    site.define()
    site.run("t-0")
    site.run("t-1")
    await site.tick()
    energy_class, raw, owner = site.api.jobs["team-a", "train"]
    assert (energy_class, owner) == ("frugal", OWNER)
    spec = parse_spec(JobSpec, raw)
    assert spec.objective.max_slowdown_ratio == pytest.approx(0.03)
    assert (spec.mode, spec.ttl_seconds_after_finished, spec.shape_known) == (Mode.OBSERVE, 60, False)
    assert spec.profile.is_own
    assert spec.workload is not None
    assert spec.workload.reference is not None
    assert (spec.workload.reference.kind.value, spec.workload.reference.name) == ("Job", "train")
    await site.tick()
    assert site.api.attempts == 1
    assert site.api.statuses[-1]["jobs"] == 1
    assert [c["reason"] for c in site.api.statuses[-1]["conditions"]] == ["Accepted"]


async def test_right_after_a_start_jobs_may_exist_that_were_not_observed_yet() -> None:
    site = Site()
    site.define()
    site.run()
    await site.tick(1.0)
    await site.tick(GRACE_S - 1.0)
    assert site.api.attempts == 0
    await site.tick(1.0)
    assert site.api.attempts == 1


async def test_a_job_that_a_user_wrote_stays_as_it_is(site: Site) -> None:
    site.define()
    site.run()
    site.api.jobs["team-a", "train"] = "", {"mode": "Recommend"}, OWNER
    await site.tick()
    assert site.api.attempts == 0
    assert site.api.jobs["team-a", "train"][1] == {"mode": "Recommend"}


@pytest.mark.parametrize("changes", [{"succeeded": True}, {"failure": "exit code 1"}], ids=["succeeded", "failed"])
async def test_a_job_is_not_made_again_for_pods_that_have_ended(site: Site, changes: dict[str, Any]) -> None:
    site.define()
    site.run(**changes)
    await site.tick()
    assert site.api.attempts == 0


async def test_pods_without_a_controller_own_their_job(site: Site) -> None:
    site.define()
    site.run("solo", job="solo", owner=None)
    await site.tick()
    _, raw, owner = site.api.jobs["team-a", "solo"]
    assert owner == Owner("v1", "Pod", "solo", "u-solo")
    assert "workload" not in raw


async def test_pods_name_a_profile_that_later_jobs_use_too(site: Site) -> None:
    site.define({"profiling": {"maxClocks": 8}})
    site.run(profile="gpt3-a100")
    await site.tick()
    profile = parse_spec(JobSpec, site.api.jobs["team-a", "train"][1]).profile
    assert profile.where == "PerseusProfile gpt3-a100"
    assert profile.online is not None
    assert profile.online.max_clocks == 8


async def test_a_fixed_clock_needs_no_profile(site: Site) -> None:
    site.define({"objective": {"type": "FixedClock", "clockMegahertz": 1200}})
    site.run()
    await site.tick()
    assert not parse_spec(JobSpec, site.api.jobs["team-a", "train"][1]).is_planned


@pytest.mark.parametrize(
    ("spec", "pod", "message"),
    [
        (None, {}, "it asks for EnergyClass frugal, which does not exist."),
        (
            {"mode": "Force"},
            {},
            "it asks for EnergyClass frugal, which is invalid: spec.mode: must be one of Enforce, Canary, Recommend,",
        ),
        (
            {"namespaceSelector": {"matchLabels": {"tier": "gold"}}},
            {},
            "it asks for EnergyClass frugal, which is not for namespace team-a: see its namespaceSelector.",
        ),
        (SPEC, {"profile": "No Name"}, "its annotation perseus.energy/profile must be the name of a PerseusProfile"),
    ],
    ids=["absent", "invalid", "not for the namespace", "profile"],
)
async def test_why_a_class_is_not_applied_is_said_once_on_the_pod_and_on_its_workload(
    site: Site, spec: Any, pod: dict[str, Any], message: str
) -> None:
    if spec is not None:
        site.define(spec)
    site.run(**pod)
    for _ in range(3):
        await site.tick()
    assert not site.api.jobs
    assert [(kind, name) for kind, name, _ in site.api.warnings] == [("Pod", "t-0"), ("Job", "train")]
    assert all(said.startswith(f"The pod trains at default clocks: {message}") for *_, said in site.api.warnings)
    site.define(SPEC)
    site.pods.clear()
    site.run()
    await site.tick()
    assert site.api.jobs, "what was wrong was mended"


async def test_a_namespace_that_is_selected_has_the_class(site: Site) -> None:
    site.define({"namespaceSelector": {"matchLabels": {"tier": "batch"}}})
    site.run()
    await site.tick()
    assert site.api.jobs


async def test_an_api_server_that_does_not_answer_is_asked_again_later(site: Site) -> None:
    site.define()
    site.run()
    site.api.error = KubeUnavailable("gone")
    await site.tick()
    await site.tick(1.0)
    assert site.api.attempts == 1
    site.api.error = None
    await site.tick(5.0)
    assert site.api.jobs
    assert site.api.statuses[-1]["jobs"] == 0
    await site.tick()
    assert site.api.statuses[-1]["jobs"] == 1


async def test_many_jobs_are_made_a_few_at_a_time(site: Site) -> None:
    site.define()
    for number in range(40):
        site.run(f"p-{number}", job=f"job-{number}")
    await site.tick()
    assert 0 < len(site.api.jobs) < 40
    for _ in range(3):
        await site.tick(1.0)
    assert len(site.api.jobs) == 40


async def test_an_invalid_edit_leaves_the_spec_that_was_accepted(site: Site) -> None:
    site.define()
    site.define({"objective": {"type": "Fast"}})
    await site.tick()
    (condition,) = site.api.statuses[-1]["conditions"]
    assert (condition["status"], condition["reason"]) == ("False", "SpecInvalid")
    assert "The spec accepted before stays in force." in condition["message"]
    site.run()
    await site.tick()
    assert parse_spec(JobSpec, site.api.jobs["team-a", "train"][1]).objective.max_slowdown == "3%"


async def test_a_deleted_class_makes_no_more_jobs(site: Site) -> None:
    site.define()
    site.classes.deleted({"metadata": {"name": "frugal", "uid": "u-another"}})
    site.classes.deleted({"metadata": {"name": "frugal", "uid": "u-frugal"}})
    site.run()
    await site.tick()
    assert not site.api.jobs


async def test_a_class_whose_deletion_the_watch_has_missed_makes_no_more_jobs(site: Site) -> None:
    site.define()
    await site.classes.restore()  # the list does not have it
    site.run()
    await site.tick()
    assert not site.api.jobs


async def test_classes_are_known_before_the_first_event() -> None:
    site = Site()
    site.api.classes = [{"metadata": {"name": "frugal", "uid": "u"}, "spec": SPEC}]
    await site.classes.restore()
    site.run()
    await site.tick()
    await site.tick()
    assert site.api.jobs


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (None, "spec: is required"),
        ({"pipeline": {}}, "spec.pipeline: unknown field"),
        ({"priority": "high"}, "spec.priority: must be an integer"),
        ({"namespaceSelector": {}}, "spec.namespaceSelector.matchLabels: is required"),
        ({"serving": {"mode": "Fast"}}, "spec.serving.mode: must be one of"),
        ({"serving": {"workload": {}}}, "spec.serving.workload: unknown field"),
        ({"serving": {"objective": {"timeToFirstToken": {"limit": "9999s"}}}}, "limit must be from 1ms to 3600s"),
        ({"ttlSecondsAfterFinished": -1}, "spec.ttlSecondsAfterFinished: must be an integer"),
    ],
    ids=str,
)
def test_a_bad_class_is_refused_with_field_and_rule(raw: Any, message: str) -> None:
    with pytest.raises(InvalidSpec, match=message):
        parse_spec(ClassSpec, raw)


async def test_profiles_of_another_namespace_are_shared_with_those_that_the_class_is_for(site: Site) -> None:
    shared = site.classes.shared_namespace
    selector = {"matchLabels": {"tier": "gold"}}
    site.define(SPEC | {"profilesFrom": {"namespace": "profiles"}, "namespaceSelector": selector})
    site.define({"objective": {"type": "MinEnergy"}}, name="plain")
    site.api.namespaces["team-a"] = {"tier": "gold"}
    assert await shared("frugal", "team-a") == "profiles"
    assert await shared("plain", "team-a") is None, "a class without the field grants nothing"
    assert await shared("absent", "team-a") is None
    assert await shared("", "team-a") is None
    site.api.namespaces["team-a"] = {"tier": "silver"}
    assert await shared("frugal", "team-a") is None, "the label of a job makes no grant"


# --------------------------------------------------------------------------------------------- turns between namespaces


def pod_of_namespace(namespace: str, number: int, energy_class: str = "frugal") -> Pod:
    name = f"t-{number}"
    labels = {keys.LABEL_JOB: name, keys.LABEL_CLASS: energy_class}
    return Pod(f"u-{namespace}-{name}", namespace, name, "node", name, labels)


async def test_a_namespace_is_served_beside_a_thousand_refused_pods_of_another(site: Site) -> None:
    """80 refused pods of one namespace took all turns for ever: another's job was not made within 45 s."""
    site.define()
    for number in range(1_000):
        site.pods["evil", f"t-{number}"] = {"u": pod_of_namespace("evil", number, "no-such-class")}
    for _ in range(30):
        await site.tick(1.0)
    site.api.namespaces["honest"] = {}
    site.pods["honest", "t-1"] = {"u": pod_of_namespace("honest", 1)}
    for _ in range(2):
        await site.tick(1.0)
    assert ("honest", "t-1") in site.api.jobs


async def test_what_is_refused_is_tried_more_seldom_until_a_class_changes(site: Site) -> None:
    site.define(name="other")
    site.run()
    asked = list[float]()
    refusal = site.classes._refusal

    async def counted(pod: Pod) -> str:
        asked.append(site.now_s)
        return await refusal(pod)

    site.classes._refusal = counted  # type: ignore[method-assign]
    for _ in range(600):
        await site.tick(1.0)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] == 5.0
    assert pauses[-1] == 60.0
    assert [kind for kind, _, _ in site.api.warnings] == ["Pod", "Job"], "once each"
    site.define()
    await site.tick(1.0)
    assert ("team-a", "train") in site.api.jobs


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 40)), max_size=80))
async def test_every_namespace_gets_its_turn_in_each_round(asked: list[tuple[str, int]]) -> None:
    site = Site()
    await site.tick()
    for namespace, number in asked:
        site.pods[namespace, f"t-{number}"] = {"u": pod_of_namespace(namespace, number, "no-such-class")}
    chosen = await site.classes._due(Now(1e6, 1e6), site.pods, {}, {})
    first = [key[0] for key, _ in chosen][: len({namespace for namespace, _ in asked})]
    assert len(chosen) == min(16, len(site.pods))
    assert len(set(first)) == len(first)


async def test_nothing_is_kept_of_pods_that_are_gone(site: Site) -> None:
    site.define(name="other")
    for number in range(200):
        site.pods = {("evil", f"t-{number}"): {"u": pod_of_namespace("evil", number)}}
        await site.tick(1.0)
    site.pods = {}
    await site.tick(1.0)
    assert not site.classes._attempts
    assert not site.classes._turns


# ---------------------------------------------------------------------------------------------------------- servers

SERVING = {
    "objective": {"timePerOutputToken": {"limit": "50ms", "attainment": "99%"}},
    "mode": "Canary",
    "clocks": {"minimumMegahertz": 900},
    "engine": {"port": 9000},
}
CHAT = ("team-a", "chat")


def replica(revision: str, number: int, kind: str = "ReplicaSet", *, serves: bool = True) -> Pod:
    """A pod of the server ``chat``, labelled by the webhook, and bound to a node."""
    owner = f"chat-{revision}" if kind == "ReplicaSet" else "chat"
    reference = {"apiVersion": "apps/v1", "kind": kind, "name": owner, "uid": f"u-{revision}", "controller": True}
    metadata: Json = {"namespace": "team-a", "name": f"{owner}-{number}", "ownerReferences": [reference]}
    metadata["labels"] = {"pod-template-hash": revision} if kind == "ReplicaSet" else {"app": "chat"}
    container = {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
    raw = label_pod({"metadata": metadata, "spec": {"containers": [container]}}, "frugal", lambda _: serves).pod
    raw["metadata"] |= {"uid": f"u-{owner}-{number}", "creationTimestamp": f"2026-01-01T00:{number:02}:00Z"}
    raw["spec"]["nodeName"] = "node"
    made = pod_of(raw)
    assert made is not None, "the webhook has left it out"
    return made


def serve(site: Site, *pods: Pod) -> None:
    site.pods[CHAT] = {pod.uid: pod for pod in pods}


def owners(site: Site) -> list[str]:
    return [owner["uid"] for owner in site.api.owners[CHAT]]


@pytest.mark.parametrize(
    ("kind", "made_by"), [("Deployment", "ReplicaSet"), ("StatefulSet", "StatefulSet")], ids=["Deployment", "Set"]
)
async def test_a_pool_is_made_of_a_server_once_and_goes_with_it(site: Site, kind: str, made_by: str) -> None:
    site.define(SPEC | {"serving": SERVING, "priority": 7})
    serve(site, replica("a", 0, made_by), replica("a", 1, made_by))
    await site.tick()
    assert not site.api.jobs
    energy_class, raw, owner = site.api.pools[CHAT]
    assert (energy_class, owner.kind, owner.uid) == ("frugal", made_by, "u-a")
    spec = parse_spec(PoolSpec, raw)
    assert (spec.mode, spec.priority, spec.clocks.minimum_megahertz, spec.engine.port) == (Mode.CANARY, 7, 900, 9000)
    assert spec.limits is not None
    assert spec.limits.per_token_s == 0.05
    assert spec.pods is not None
    assert spec.pods.reference == Reference(kind=ServerKind(kind), name="chat")
    assert raw["workload"]["apiVersion"] == "apps/v1"
    await site.tick()
    await site.tick()
    assert site.api.attempts == 1
    assert (site.api.statuses[-1]["jobs"], site.api.statuses[-1]["pools"]) == (0, 1)


async def test_in_a_rollout_the_pool_goes_with_the_later_replica_set_too(site: Site) -> None:
    site.define({"serving": SERVING})
    serve(site, replica("a", 0))
    await site.tick()
    serve(site, replica("a", 0), replica("b", 1))
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]
    serve(site, replica("b", 1), replica("a", 2))  # rolled back
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]
    assert site.api.attempts == 2


async def test_an_owner_that_could_not_be_added_is_added_later(site: Site) -> None:
    site.define({"serving": SERVING})
    serve(site, replica("a", 0))
    await site.tick()
    serve(site, replica("b", 1))
    site.api.version = "8"  # the watch is late
    await site.tick()
    await site.tick(1.0)
    assert (owners(site), site.api.attempts) == (["u-a"], 2)
    site.api.version = "7"
    await site.tick()
    assert owners(site) == ["u-a", "u-b"]


async def test_owners_are_few_however_many_there_were_and_no_write_is_repeated(site: Site) -> None:
    site.define({"serving": SERVING})
    for number in range(2 * MOST_OWNERS):
        serve(site, replica(f"r{number}", number))
        await site.tick()
    assert owners(site) == [f"u-r{number}" for number in range(MOST_OWNERS, 2 * MOST_OWNERS)]
    attempts = site.api.attempts
    serve(
        site, *(replica(f"r{number}", number) for number in range(2 * MOST_OWNERS))
    )  # a namespace that makes up owners
    for _ in range(5):
        await site.tick()
    assert site.api.attempts == attempts


async def test_a_pool_that_a_user_wrote_stays_as_it_is(site: Site) -> None:
    site.define({"serving": SERVING})
    site.api.pools[CHAT] = "", {"mode": "Recommend", "workload": {"kind": "Deployment", "name": "chat"}}, OWNER
    site.api.owners[CHAT] = []
    serve(site, replica("a", 0), replica("b", 1))
    await site.tick()
    assert site.api.attempts == 0
    assert owners(site) == []


async def test_a_job_of_the_same_name_goes_before_a_pool(site: Site) -> None:
    site.define({"serving": SERVING})
    site.api.jobs[CHAT] = "", {"mode": "Recommend"}, OWNER
    serve(site, replica("a", 0))
    await site.tick()
    assert site.api.attempts == 0


async def test_a_server_is_never_given_a_job_though_its_class_has_no_serving_any_more(site: Site) -> None:
    """A class of a fixed clock would set it on the server's GPUs."""
    site.define({"objective": {"type": "FixedClock", "clockMegahertz": 1200}})
    serve(site, replica("a", 0))
    for _ in range(3):
        await site.tick()
    assert not site.api.jobs
    assert not site.api.pools
    said = "The pod serves at default clocks: EnergyClass frugal has no spec.serving."
    assert site.api.warnings == [("Pod", "chat-a-0", said), ("ReplicaSet", "chat-a", said)]
    site.define({"serving": {}})
    await site.tick()
    assert site.api.pools, "it has again"


def test_only_a_class_with_serving_serves() -> None:
    site = Site()
    site.define()
    site.define({"serving": {}}, "serving")
    site.define({"serving": {"mode": "Fast"}}, "invalid")
    assert [site.classes.serves(name) for name in ("serving", "frugal", "invalid", "absent", "")] == [True] + 4 * [
        False
    ]
