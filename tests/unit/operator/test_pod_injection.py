"""What the webhook makes of a pod: what it lacked and nothing else, once, and never anything that could stop it."""

from __future__ import annotations

import copy
from typing import Any

import jsonpatch
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perseus_core import keys
from perseus_operator.servers.pod_injection import VOLUME, Injected, inject, request

SOCKET = "/run/perseus/agent.sock"
DIRECTORY = "/run/perseus"
HOST = {"name": VOLUME, "hostPath": {"path": DIRECTORY, "type": "DirectoryOrCreate"}}
MOUNT = {"name": VOLUME, "mountPath": DIRECTORY, "readOnly": True}
ENV = {"name": keys.ENV_SOCKET, "value": SOCKET}


def pod(*containers: dict[str, Any], annotations: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
    named = [{"name": f"c{i}", "image": "x"} | container for i, container in enumerate(containers or ({},))]
    metadata = {"generateName": "t-", "labels": {keys.LABEL_JOB: "gpt3"}}
    return {
        "metadata": metadata | ({"annotations": annotations} if annotations else {}),
        "spec": {"containers": named, **spec},
    }


def test_a_bare_pod_gets_the_socket_and_nothing_else() -> None:
    before = pod(
        {},
        {"env": [{"name": "A", "value": "1"}], "volumeMounts": [{"name": "d", "mountPath": "/data"}]},
        volumes=[{"name": "d", "emptyDir": {}}],
    )
    untouched = copy.deepcopy(before)
    after = inject(before, SOCKET)
    assert before == untouched, "the argument is not changed"
    expected = copy.deepcopy(before)
    expected["spec"]["volumes"].append(HOST)
    expected["spec"]["containers"][0] |= {"env": [ENV], "volumeMounts": [MOUNT]}
    expected["spec"]["containers"][1]["env"].append(ENV)
    expected["spec"]["containers"][1]["volumeMounts"].append(MOUNT)
    assert after.pod == expected
    assert after.warnings == ()


def test_it_waits_for_no_agent() -> None:
    (volume,) = inject(pod(), SOCKET).pod["spec"]["volumes"]
    assert volume["hostPath"]["type"] == "DirectoryOrCreate", "a pod must start on a node without an agent"


def test_another_socket_is_another_directory() -> None:
    after = inject(pod(), "/var/run/other/x.sock").pod["spec"]
    assert after["volumes"][0]["hostPath"]["path"] == "/var/run/other"
    assert after["containers"][0]["env"] == [{"name": keys.ENV_SOCKET, "value": "/var/run/other/x.sock"}]


def test_the_annotation_chooses_containers() -> None:
    two = ({}, {})
    after = inject(pod(*two, annotations={keys.ANNOTATION_CONTAINERS: " c1 ,"}), SOCKET)
    assert "env" not in after.pod["spec"]["containers"][0]
    assert after.pod["spec"]["containers"][1]["env"] == [ENV]
    none = pod(*two, annotations={keys.ANNOTATION_CONTAINERS: ""})
    assert inject(none, SOCKET).pod == none
    wrong = inject(pod(*two, annotations={keys.ANNOTATION_CONTAINERS: "c0,sidecar"}), SOCKET)
    assert wrong.pod["spec"]["containers"][0]["env"] == [ENV]
    assert wrong.warnings == ("perseus.energy/containers: there is no container sidecar",)


BY_HAND = {"name": "mine", "hostPath": {"path": "/run/perseus/", "type": "Directory"}}


def test_what_was_done_by_hand_stays() -> None:
    complete = pod({"env": [ENV], "volumeMounts": [{"name": "mine", "mountPath": DIRECTORY}]}, volumes=[BY_HAND])
    assert inject(complete, SOCKET).pod == complete
    half = pod({"volumeMounts": [{"name": "mine", "mountPath": "/run/perseus/"}]}, {}, volumes=[BY_HAND])
    after = inject(half, SOCKET)
    assert after.pod["spec"]["volumes"] == [BY_HAND], "the volume that is there serves the other container, too"
    assert after.pod["spec"]["containers"][0] == half["spec"]["containers"][0] | {"env": [ENV]}
    assert after.pod["spec"]["containers"][1]["volumeMounts"] == [MOUNT | {"name": "mine"}]
    assert after.warnings == ()


@pytest.mark.parametrize(
    ("container", "volumes", "warning"),
    [
        ({"env": [{"name": keys.ENV_SOCKET, "value": "/elsewhere"}]}, [], "PERSEUS_SOCKET is set to something other"),
        (
            {"env": [{"name": keys.ENV_SOCKET, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]},
            [],
            "PERSEUS_SOCKET is set to something other",
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": DIRECTORY}]},
            [{"name": "v", "emptyDir": {}}],
            "mounts another volume at",
        ),
        (
            {"volumeMounts": [{"name": "v", "mountPath": "/run"}]},
            [{"name": "v", "configMap": {}}],
            "mounts a volume at /run, above",
        ),
        *(
            (
                {"volumeMounts": [{"name": "v", "mountPath": path, "readOnly": True}]},
                [{"name": "v", "configMap": {}}],
                said,
            )
            for path, said in (
                # obot-platform/obot issue 5969, kubernetes/kubernetes issue 72261: images link /var/run to /run
                ("/var/run", "mounts a volume at /var/run, above /run/perseus"),
                ("/var/run/", "mounts a volume at /var/run, above /run/perseus"),
                ("/var/run/perseus", "mounts another volume at /var/run/perseus"),
                ("/run/perseus/agent.sock", "mounts a volume at /run/perseus/agent.sock, below /run/perseus"),
                ("/var/run/perseus/x", "mounts a volume at /var/run/perseus/x, below /run/perseus"),
                ("/opt/../run", "mounts a volume at /opt/../run, above /run/perseus"),
            )
        ),
        (
            {"volumeMounts": [{"name": "mine", "mountPath": DIRECTORY, "subPath": "a"}]},
            [BY_HAND],
            "mounts another volume at",
        ),
    ],
)
def test_a_container_that_cannot_have_it_is_left_as_it_is(
    container: dict[str, Any], volumes: list[Any], warning: str
) -> None:
    before = pod(container, {}, volumes=volumes)
    after = inject(before, SOCKET)
    assert after.pod["spec"]["containers"][0] == before["spec"]["containers"][0]
    assert ENV in after.pod["spec"]["containers"][1]["env"], "the other one has it"
    (said,) = after.warnings
    assert said.startswith("container c0: ")
    assert warning in said


def test_a_volume_beside_it_does_no_harm() -> None:
    before = pod({"volumeMounts": [{"name": "v", "mountPath": "/var/lib"}]}, volumes=[{"name": "v", "emptyDir": {}}])
    after = inject(before, SOCKET)
    assert [mount["mountPath"] for mount in after.pod["spec"]["containers"][0]["volumeMounts"]] == [
        "/var/lib",
        DIRECTORY,
    ]
    assert not after.warnings


def test_a_volume_of_our_name_that_is_another_leaves_the_pod_as_it_is() -> None:
    before = pod(volumes=[{"name": VOLUME, "emptyDir": {}}])
    after = inject(before, SOCKET)
    assert after.pod == before
    assert after.warnings == (
        "volume perseus-agent is not the node's directory /run/perseus: the agent's socket is not mounted",
    )


def test_windows_is_left_alone() -> None:
    before = pod(os={"name": "windows"})
    after = inject(before, SOCKET)
    assert after.pod == before
    assert after.warnings


# ------------------------------------------------------------------------------------------------------------- laws

# How long an example takes says how busy the machine is.
LAW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

NAMES = st.sampled_from(["v", "w", VOLUME])
PATHS = st.sampled_from(["/run/perseus", "/run/perseus/", "/run", "/", "/data", "/run/perseus/deep", "/run/perseusx"])
VOLUMES = st.lists(
    st.builds(
        lambda name, source: {"name": name, **source},
        NAMES,
        st.one_of(
            st.just({"emptyDir": {}}),
            PATHS.map(lambda path: {"hostPath": {"path": path}}),
            st.just({"hostPath": {"path": "/x"}}),
        ),
    ),
    max_size=3,
    unique_by=lambda volume: volume["name"],
)
VARIABLES = st.sampled_from(
    [ENV, {"name": keys.ENV_SOCKET, "value": "/x"}, {"name": keys.ENV_SOCKET}, {"name": "A", "value": ""}]
)
ANNOTATIONS = st.none() | st.sampled_from(["", "c0", "c1,c0", "nobody", " , "]).map(
    lambda t: {keys.ANNOTATION_CONTAINERS: t}
)


@st.composite
def pods(draw: st.DrawFn) -> dict[str, Any]:
    volumes = draw(VOLUMES)
    there = st.sampled_from([volume["name"] for volume in volumes] or ["v"])
    mounts = st.lists(
        st.builds(lambda n, p: {"name": n, "mountPath": p}, there, PATHS),
        max_size=3,
        unique_by=lambda m: m["mountPath"],
    )
    containers = draw(
        st.lists(
            st.fixed_dictionaries(
                {},
                optional={
                    "env": st.lists(VARIABLES, max_size=2, unique_by=lambda v: v["name"]) | st.none(),
                    "volumeMounts": mounts | st.none(),
                },
            ),
            min_size=1,
            max_size=3,
        )
    )
    spec = {"volumes": draw(st.just(volumes) | st.none())} if not volumes else {"volumes": volumes}
    return pod(*containers, annotations=draw(ANNOTATIONS), **spec)


@LAW
@given(pods())
def test_twice_is_once(before: dict[str, Any]) -> None:
    once = inject(before, SOCKET)
    twice = inject(once.pod, SOCKET)
    assert twice.pod == once.pod
    assert twice.warnings == once.warnings


@LAW
@given(pods())
def test_nothing_is_taken_away_or_replaced(before: dict[str, Any]) -> None:
    after = inject(before, SOCKET).pod
    without = copy.deepcopy(after)
    for container, original in zip(without["spec"]["containers"], before["spec"]["containers"], strict=True):
        for name in ("env", "volumeMounts"):
            had, has = original.get(name) or [], container.pop(name, None) or []
            assert has[: len(had)] == had
            assert len(has) - len(had) <= 1
        assert container == {key: value for key, value in original.items() if key not in ("env", "volumeMounts")}
    had, has = before["spec"].get("volumes") or [], without["spec"].pop("volumes", None) or []
    assert has[: len(had)] == had
    assert has[len(had) :] in ([], [HOST])
    assert without["metadata"] == before["metadata"]


@LAW
@given(pods())
def test_what_comes_out_is_a_valid_pod(before: dict[str, Any]) -> None:
    after = inject(before, SOCKET).pod["spec"]
    volumes = [volume["name"] for volume in after.get("volumes") or ()]
    assert len(volumes) == len(set(volumes))
    for container, original in zip(after["containers"], before["spec"]["containers"], strict=True):
        added = (container.get("volumeMounts") or [])[len(original.get("volumeMounts") or ()) :]
        assert all(mount["name"] in volumes and mount["readOnly"] for mount in added)
        variables = [variable["name"] for variable in container.get("env") or ()]
        assert len(variables) == len(set(variables))


@LAW
@given(pods())
def test_the_json_patch_makes_exactly_that_pod(before: dict[str, Any]) -> None:
    """By the library that kopf makes the patch with: it moves no element that was there."""
    after = inject(before, SOCKET).pod
    patch = jsonpatch.JsonPatch.from_diff(before, after)
    assert patch.apply(before) == after
    assert {operation["op"] for operation in patch.patch} <= {"add", "replace"}


GPU: dict[str, Any] = {"resources": {"limits": {"nvidia.com/gpu": 8}}}
REQUEST = {"limits": {keys.RESOURCE_AGENT: "1"}, "requests": {keys.RESOURCE_AGENT: "1"}}


def test_a_request_is_all_that_a_confined_pod_gets() -> None:
    own = {"limits": {"nvidia.com/gpu": 8, "cpu": "1"}, "requests": {"cpu": "500m"}}
    claims = [{"name": "gpus"}]
    before = pod({"resources": {"claims": claims}}, {"resources": own})
    after = request(before, SOCKET, "")
    expected = copy.deepcopy(before)
    expected["spec"]["containers"][0]["resources"] = {"claims": claims, **REQUEST}
    expected["spec"]["containers"][1]["resources"] = {kind: own[kind] | REQUEST[kind] for kind in own}
    assert after.pod == expected
    assert after.warnings == ()
    assert request(after.pod, SOCKET, "").pod == after.pod, "asked again, it adds nothing"
    assert inject(after.pod, SOCKET).pod == after.pod, "a container that has the request needs no mount"


def test_no_pod_gets_a_request_for_which_it_might_wait() -> None:
    after = request(pod(GPU), SOCKET, "2 of 3 GPU nodes do not offer it, such as b")
    assert after.pod == pod(GPU)
    (warning,) = after.warnings
    assert "2 of 3 GPU nodes do not offer it, such as b; it trains at default clocks" in warning
    own = pod({"resources": REQUEST})
    assert request(own, SOCKET, "whatever").pod == own, "what the user requests stays"
    assert request(own, SOCKET, "whatever").warnings == ()


@pytest.mark.parametrize("resources", [{}, {"limits": {"cpu": "1"}}, {"limits": {"amd.com/gpu": 8}}])
@pytest.mark.parametrize("lacking", ["", "no node with GPUs is known"])
def test_a_pod_without_a_gpu_may_run_on_nodes_that_offer_no_socket(resources: dict[str, Any], lacking: str) -> None:
    launcher = pod({"resources": resources})
    assert request(launcher, SOCKET, lacking) == Injected(launcher, ())


def test_a_pod_for_windows_requests_nothing() -> None:
    before = pod(GPU, os={"name": "windows"})
    after = request(before, SOCKET, "")
    assert after.pod == before
    assert after.warnings == ("perseus.energy/job: a pod for Windows cannot reach an agent",)


def test_only_the_named_containers_request_it() -> None:
    before = pod(GPU, GPU, annotations={keys.ANNOTATION_CONTAINERS: "c1"})
    after = request(before, SOCKET, "").pod["spec"]["containers"]
    assert [keys.RESOURCE_AGENT in container["resources"]["limits"] for container in after] == [False, True]


@pytest.mark.parametrize(
    ("container", "rule"),
    [
        ({"env": [{"name": keys.ENV_SOCKET, "value": "/elsewhere"}]}, "PERSEUS_SOCKET is set to something other"),
        ({"volumeMounts": [{"name": "d", "mountPath": "/run"}]}, "mounts a volume at /run, above /run/perseus"),
    ],
)
def test_a_container_in_which_the_mount_would_not_work_requests_none(container: dict[str, Any], rule: str) -> None:
    before = pod(GPU | container, volumes=[{"name": "d", "emptyDir": {}}])
    after = request(before, SOCKET, "")
    assert after.pod == before
    (warning,) = after.warnings
    assert rule in warning
