"""EnergyClasses: when a PerseusJob is made and what of, what is said where none is, and what the status shows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.class_site import (
    GRACE_S,
    OWNER,
    SPEC,
    Site,
)

from perseus_core import keys
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import JobSpec, Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.classes import energy_classes
from perseus_operator.errors import InvalidSpec, KubeUnavailable
from perseus_operator.objects.values import Now, Owner, Pod, PodGroup


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


async def test_a_job_has_the_model_of_its_pods_by_which_reports_add_up(site: Site) -> None:
    site.define()
    site.run(labels={keys.LABEL_MODEL: "gpt3", "team": "vision"})
    site.run("u-0", job="other")
    await site.tick()
    assert site.api.labels == {
        ("team-a", "train"): {keys.LABEL_CLASS: "frugal", keys.LABEL_MODEL: "gpt3"},
        ("team-a", "other"): {keys.LABEL_CLASS: "frugal"},
    }


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


@pytest.mark.parametrize("api_group", ["scheduling.k8s.io", "scheduling.x-k8s.io"])
async def test_pods_that_are_scheduled_together_without_a_known_workload_have_a_job_that_goes_with_their_group(
    site: Site, api_group: str
) -> None:
    site.define()
    group = PodGroup(api_group, "ranks")
    site.api.groups = {group}
    other = Owner("example.com/v1", "Trainer", "ranks-a", "u-a")
    site.run("a", job="ranks", owner=other, group=group)
    site.run("b", job="alone", owner=None, group=PodGroup(api_group, "gone"))
    site.run("c", job="train", group=group)
    await site.tick()
    owners = {name: (owner.kind, owner.uid) for (_, name), (_, _, owner) in site.api.jobs.items()}
    assert owners["ranks"] == ("PodGroup", "u-ranks")
    assert owners["alone"] == ("Pod", "u-b"), "a group that is not there owns nothing"
    assert owners["train"] == (OWNER.kind, OWNER.uid), "a workload that is known goes first: its groups follow it"


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
    for _ in range(10):
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
    assert len(chosen) == min(energy_classes._AT_ONCE, len(site.pods))
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
