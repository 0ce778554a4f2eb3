"""The operator as a process on an API server, without agents: the status and events that users read, and its rights.

On a server with RBAC it runs under its own service account with only the chart's rules. Its requests to agents are
tested in tests/integration/operator_loop/.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import kubernetes.aio.client as aio_client
import kubernetes.aio.config as aio_config
import pytest
from kubernetes import client
from kubernetes.client.exceptions import ApiException
from tests.namespaces import own_namespace
from tests.rights import OF_POD_GROUPS

from perseus_core import keys
from perseus_operator.clients.kube.client import KubeClient
from perseus_operator.clients.kube.leases import EPOCH_LEASE
from perseus_operator.families.training.work.profile_versions import KEPT, store_profile
from perseus_sim.cluster import rbac
from perseus_sim.cluster.api_servers import Feature, Server
from perseus_sim.profiles import profile_csv

pytestmark = pytest.mark.e2e

SYSTEM = "perseus-system"
LIST_AUTOSCALERS = rbac.Permission("list", "autoscaling", "horizontalpodautoscalers")
STAGES = 2


@pytest.mark.on_both
def test_a_condition_reports_an_error_until_it_is_corrected(world: Any) -> None:
    generation = world.create()["metadata"]["generation"]
    message = world.until_condition("ProfileReady", "False", "ConfigMapNotFound")
    assert f"ConfigMap profile does not exist in namespace {world.namespace}" in message
    world.profile(other_csv="x")
    assert "has no key profile.csv; its keys: other.csv" in world.until_condition(
        "ProfileReady", "False", "KeyNotFound"
    )
    world.profile(profile_csv="stage,instruction,frequency,time\n0,forward,1410,1\n")
    assert "energy" in world.until_condition("ProfileReady", "False", "ProfileInvalid")
    assert world.conditions()["Ready"]["status"] == "False"
    world.profile(profile_csv=profile_csv(STAGES))
    world.until_condition("Ready", "True", "Ready")

    job = world.job()
    assert job["metadata"]["generation"] == generation, "only status was written"
    assert job["status"]["observedGeneration"] == generation
    assert {found["observedGeneration"] for found in job["status"]["conditions"]} == {generation}
    wrong = ["ConfigMapNotFound", "KeyNotFound", "ProfileInvalid"]
    world.until("reported in events", lambda: {*wrong, "Solved"} <= {event.reason for event in world.events()})
    assert {event.reason for event in world.events() if event.type == "Warning"} >= set(wrong)


def test_an_invalid_edit_is_refused_and_the_job_goes_on(world: Any, server: Server) -> None:
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    wrong = {"spec": {"objective": {"type": "PowerCap"}}}
    message = "powerCapWatts must be set if and only if type is PowerCap"
    if Feature.CEL in server.features:
        with pytest.raises(ApiException, match=message):
            world.patch(wrong)
    else:
        world.patch(wrong)
        assert message in world.until_condition("Accepted", "False", "SpecInvalid")
        world.patch({"spec": {"objective": {"type": "MinEnergy"}}})
        world.until_condition("Accepted", "True", "Accepted")
    world.patch({"metadata": {"annotations": {keys.ANNOTATION_STRAGGLER: "zero"}}})
    world.until_condition("Accepted", "False", "AnnotationInvalid")
    assert world.conditions()["FrontierReady"]["status"] == "True"


@pytest.mark.on_both
def test_a_restarted_operator_restores_the_state_of_the_last_one(world: Any) -> None:
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    world.until("reported in an event", lambda: "Solved" in {event.reason for event in world.events()})
    world.stop_operator()
    before = world.job()["status"]

    world.start_operator()
    assert "restored from PerseusFrontier gpt3" in world.until_condition("FrontierReady", "True", "Restored")
    world.until_condition("Ready", "True", "Ready")
    after = world.job()["status"]
    assert after["frontier"] == before["frontier"]
    since = {found["type"]: found["lastTransitionTime"] for found in before["conditions"]}
    assert {found["type"]: found["lastTransitionTime"] for found in after["conditions"]} == since

    # The job is edited while no operator runs: the next one solves the new spec.
    world.kill_operator()
    generation = world.patch({"spec": {"points": 30}})["metadata"]["generation"]
    world.start_operator()
    world.until("observed", lambda: world.job()["status"]["observedGeneration"] == generation)
    world.until_condition("FrontierReady", "True", "Solved")
    assert [event.reason for event in world.events()].count("ConfigMapNotFound") == 0


def test_a_deleted_job_deletes_its_frontier(world: Any) -> None:
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    job = world.job()
    stored = world.frontier()
    assert [owner["uid"] for owner in stored["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    world.delete()
    world.until("gone", world.gone)


def test_the_frontier_is_garbage_collected(world: Any) -> None:
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    assert not world.absent(world.frontier)
    world.delete()
    world.until("garbage collected", lambda: world.absent(world.frontier))
    assert not world.absent(lambda: world.core.read_namespaced_config_map("profile", world.namespace))


@pytest.mark.needs(Feature.FAULTS)
@pytest.mark.parametrize("victim", ["kube-apiserver", "etcd"])
def test_the_operator_survives_an_outage_of_the_control_plane(world: Any, server: Server, victim: str) -> None:
    assert server.plane is not None
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    server.plane.kill(victim)
    time.sleep(2)  # long enough for every watch to notice
    server.plane.start(victim)

    def patched() -> bool:
        try:
            world.patch({"spec": {"points": 25}})
        except ApiException as error:
            if error.status < 500:
                raise
            return False  # the API server reconnects to etcd
        return True

    world.until("patched", patched)
    world.until("observed", lambda: world.job()["status"]["frontier"]["points"] == 25)
    assert world.operator is not None
    assert world.operator.running


def test_a_profile_of_another_namespace_needs_an_administrators_grant(world: Any, api: Any) -> None:
    """A tenant's job that names one, and the class that it claims, are not enough."""
    with own_namespace(api) as shared:
        stored = {"csv": profile_csv(STAGES), "blockingPowerMilliwatts": 83640}
        group, version = world.place[:2]
        head = {"apiVersion": f"{group}/{version}", "kind": keys.PROFILE_KIND, "metadata": {"name": "gpt3-a100"}}
        where = (group, version, shared, keys.PROFILE_PLURAL)
        before = world.custom.create_namespaced_custom_object(*where, {**head, "spec": stored})
        name = f"shared-{world.namespace}"
        world.create(profile={"profileRef": {"name": "gpt3-a100"}})
        world.patch({"metadata": {"labels": {keys.LABEL_CLASS: name}}})
        message = world.until_condition("ProfileReady", "False", "ProfileNotFound")
        assert f"does not exist in namespace {world.namespace}" in message
        world.energy_class(
            name, profilesFrom={"namespace": shared}, namespaceSelector={"matchLabels": {"tier": "gold"}}
        )
        try:
            world.until("observed", lambda: "status" in world.custom.get_cluster_custom_object(*world.classes, name))
            time.sleep(1)  # several reads of the profile
            assert world.conditions()["ProfileReady"]["reason"] == "ProfileNotFound", "not in a namespace of the class"
            world.core.patch_namespace(world.namespace, {"metadata": {"labels": {"tier": "gold"}}})
            world.until_condition("ProfileReady", "True", "ProfileRead")
            world.until_condition("Ready", "True", "Ready")
            source = world.job()["status"]["advised"]["source"]
            assert source == f"PerseusProfile gpt3-a100 of namespace {shared}"
            assert world.custom.get_namespaced_custom_object(*where, "gpt3-a100") == before, "read, and never written"
        finally:
            world.delete_class(name)


def test_a_server_of_a_class_has_a_pool_that_goes_with_all_of_its_replica_sets(
    world: Any, api: Any, server: Server
) -> None:
    name = f"serving-{world.namespace}"
    world.energy_class(name, serving={"mode": "Recommend"})
    try:
        world.replica("a", name, server)
        world.until("made", lambda: world.pool_owners("chat") == ["chat-a"])
        world.replica("b", name, server)
        world.until("rolled out", lambda: world.pool_owners("chat") == ["chat-a", "chat-b"])
        [pool] = world.custom.list_namespaced_custom_object(*world.place[:3], keys.POOL_PLURAL)["items"]
        workload = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "chat"}
        assert (pool["spec"]["workload"], pool["spec"]["mode"]) == (workload, "Recommend")
        read = (*world.classes, name)
        world.until(
            "counted", lambda: world.custom.get_cluster_custom_object(*read).get("status", {}).get("pools") == 1
        )
        if Feature.CONTROLLERS in server.features:
            sets = client.AppsV1Api(api)
            sets.delete_namespaced_replica_set("chat-a", world.namespace)
            world.until("the first has gone", lambda: world.pool_owners("chat") == ["chat-b"])
            sets.delete_namespaced_replica_set("chat-b", world.namespace)
            world.until("the pool has gone with the last", lambda: world.pool_owners("chat") == [])
    finally:
        world.delete_class(name)


async def connect(world: Any) -> KubeClient:
    """As the operator does it."""
    configuration = aio_client.Configuration()
    await aio_config.load_kube_config(str(world.kubeconfig), client_configuration=configuration)
    return KubeClient(aio_client.ApiClient(configuration))


def test_jobs_whose_end_a_watch_has_missed_are_missed_in_the_list_though_none_is_left(world: Any) -> None:
    async def uids() -> set[str]:
        kube = await connect(world)
        try:
            return await kube.job_uids([world.namespace])
        finally:
            await kube.close()

    uid = world.create()["metadata"]["uid"]
    assert asyncio.run(uids()) == {uid}
    world.delete()
    world.until("gone", world.gone)
    assert asyncio.run(uids()) == set()


async def measure(world: Any) -> None:
    """Store what a job has measured, and measured again: no rank runs here."""
    kube = await connect(world)
    times = KEPT + 3
    for number in range(times):
        await store_profile(kube, world.namespace, "measured", {"csv": f"measured {number}"})
    await kube.write_calibrations(world.namespace, "measured", {"a": "b"}, None)
    stored = await kube.read_profile(world.namespace, "measured")
    newest = {"csv": f"measured {times - 1}", "version": times}
    assert (stored.spec, stored.status) == (newest, {"calibrations": {"a": "b"}})
    left = {profile.name async for profile in kube.list_profiles(world.namespace, 100)}
    assert left == {"measured", *(f"measured-v{number}" for number in range(times - KEPT, times))}
    await kube.close()


@pytest.mark.needs(Feature.RBAC, Feature.FAULTS)
def test_the_operator_needs_exactly_its_rights(world: Any, api: Any, server: Server) -> None:
    assert server.plane is not None
    world.stop_operator()
    client.CoordinationV1Api(api).delete_namespaced_lease(EPOCH_LEASE, SYSTEM)
    since = server.plane.audit_log.stat().st_size

    def asked() -> list[rbac.Request]:
        assert server.plane is not None
        operator = rbac.user_name(SYSTEM, "perseus-operator")
        return list(rbac.requests(server.plane.audit_log, operator, since=since))

    world.start_operator()  # draws an epoch from a new counter
    world.stop_operator()
    world.start_operator()  # and from one that is there
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    world.patch({"spec": {"points": 30}})
    world.until("solved again", lambda: world.job()["status"]["frontier"]["points"] == 30)
    world.patch({"metadata": {"finalizers": [keys.FINALIZER]}})  # as an early version left it
    world.until("it has no finalizer", lambda: "finalizers" not in world.job()["metadata"])
    world.budget("exact", 1000)
    world.until("shared", lambda: "conditions" in world.read_budget("exact").get("status", {}))
    world.delete_budget("exact")
    world.energy_class("exact")
    world.pod("of-a-class", "Running", {keys.LABEL_JOB: "made", keys.LABEL_CLASS: "exact"})
    made = (*world.place, "made")
    world.until("made", lambda: not world.absent(lambda: world.custom.get_namespaced_custom_object(*made)))
    world.until(
        "counted",
        lambda: world.custom.get_cluster_custom_object(*world.classes, "exact").get("status", {}).get("jobs") == 1,
    )
    world.delete_class("exact")
    world.custom.delete_namespaced_custom_object(*made)
    world.energy_class("serving", serving={"mode": "Enforce", "objective": {"maxSlowdown": "20%"}})
    for revision in ("a", "b"):  # a rollout
        world.replica(revision, "serving", server)
        world.until(f"{revision} owns the pool", lambda name=f"chat-{revision}": name in world.pool_owners("chat"))
    world.until("autoscalers beside it are read", lambda: LIST_AUTOSCALERS in {each.permission for each in asked()})
    world.delete_class("serving")
    world.finish_pod()
    world.patch({"spec": {"ttlSecondsAfterFinished": 0}})
    world.until("deleted, since it has finished", world.gone)
    asyncio.run(measure(world))

    requests = asked()
    refused = {(str(request.permission), request.path) for request in requests if request.code in (401, 403)}
    assert not refused
    used, allowed = {request.permission for request in requests}, rbac.granted(rbac.operator_manifest(SYSTEM))
    assert sorted(map(str, allowed - used - OF_POD_GROUPS)) == [], "granted and never used"
    assert sorted(map(str, used - allowed)) == [], "allowed by another role"


@pytest.mark.needs(Feature.RBAC)
def test_one_namespace_is_served_without_rights_anywhere_else(
    world: Any, api: Any, server: Server, tmp_path: Path
) -> None:
    """The same rules, but granted only in the job's and in the operator's namespace."""
    before = len(world.operator.log.read_text())  # of one with all rights, as the namespaces of other tests end
    world.stop_operator()
    account = f"only-{world.namespace}"
    world.core.create_namespaced_service_account(SYSTEM, {"metadata": {"name": account}})
    subject = {"kind": "ServiceAccount", "name": account, "namespace": SYSTEM}
    for namespace, kind in ((world.namespace, "ClusterRole"), (SYSTEM, "ClusterRole"), (SYSTEM, "Role")):
        role = {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": "perseus-operator"}
        metadata = {"name": f"{account}-{kind.lower()}"}
        binding: Any = {"metadata": metadata, "roleRef": role, "subjects": [subject]}
        client.RbacAuthorizationV1Api(api).create_namespaced_role_binding(namespace, binding)
    world.kubeconfig = rbac.log_in(server.kubeconfig, SYSTEM, account, tmp_path / "kubeconfig")
    world.start_operator("--namespaces", world.namespace)
    assert world.operator is not None
    world.profile(profile_csv=profile_csv(STAGES))
    world.create()
    world.until_condition("Ready", "True", "Ready")
    assert "Forbidden" not in world.operator.log.read_text()[before:]
    world.delete()
    world.until("gone", world.gone)
