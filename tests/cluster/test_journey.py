"""A user's journey on a real cluster, from install to uninstall; with ``-s`` it prints every step.

Its chapters are tests that depend on one another: after a failed one the others are skipped. The actions use helm and
kubectl as the documentation says. The checks read the simulated GPUs and the API server's audit log.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import monitoring
import pytest
import yaml
from evil_tenant import EvilTenant
from installation import CHART, PATIENCE_S, SYSTEM
from journey import AGENTS, Journey
from tests.dashboards import queries
from tests.rights import OCCASIONAL, lacking
from training import A100, PHYSICS, TRAINING, Training

from perseus_core import keys
from perseus_operator.replicas.shard import SEATS, SHARDS, seat_lease, shard_lease
from perseus_sim.cluster import rbac
from perseus_sim.profiles import profile_csv

pytestmark = [pytest.mark.timeout(900), pytest.mark.usefixtures("one_chapter_after_the_other")]

NODES, GPUS_OF_A_NODE = 2, 8
GPT3 = Training("gpt3", stages=8, pipelines=2, microbatches=4)
BLOOM = Training("bloom", stages=4, pipelines=1, microbatches=4, gpus_per_pod=2)
PROFILES = {
    job.name: profile_csv(job.stages, imbalance=1.25, forward_s=forward_s)
    for job, forward_s in ((GPT3, 0.05), (BLOOM, 0.06))
}
BUDGET_W = 2400
INSTALL = (
    *("--set", f"agent.namespaceOverride={AGENTS}"),
    *("--set", "simulatedGpus.enabled=true,agent.settings.gpuMetrics=true"),
    *("--set", "webhook.enabled=true"),
    *("--set", "solver.enabled=true,solver.replicas=1,solver.resources.requests.cpu=100m"),
)
IN_GRAFANA = {
    "$__rate_interval": f"{4 * monitoring.INTERVAL_S}s",
    "$__range": "1m",
    "$__interval": f"{monitoring.INTERVAL_S}s",
    "$job_namespace": TRAINING,
    "$job_name": GPT3.name,
    "$node": ".*",
    "$pool_namespace": TRAINING,
    "$pool_name": "none",
}
OF_SERVING = re.compile(r"^perseus-serving|perseus_pool_|perseus_agent_(?:engine|boost|metrics_pages)")
"""Queries about pools, of which this journey has none: tests/observability asks them."""
MAY_BE_EMPTY = {"perseus-job, timeseries Error of predicted times: B"}
"""This panel needs a calibration, which takes 40 iterations: on a fast machine the journey ends before."""
COMPARED = 6
"""Iterations whose median is compared."""
LEASES = {"perseus-epoch", *map(seat_lease, range(SEATS)), *map(shard_lease, range(SHARDS))}
CRDS = {f"{plural}.{keys.API_GROUP}" for plural in keys.PLURALS}


@pytest.fixture(scope="module")
def enough_nodes(cluster: Any) -> None:
    if len(cluster.nodes) != NODES:
        pytest.skip(f"the journey needs a cluster of {NODES} nodes, this one has {len(cluster.nodes)}")


@pytest.fixture(scope="module")
def journey(enough_nodes: None, cleared_journey: Journey) -> Journey:
    return cleared_journey


@pytest.fixture(scope="module")
def prometheus(journey: Journey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[monitoring.Prometheus]:
    """A user's Prometheus, from the first chapter that needs it to the last."""
    flags = ("--namespace", SYSTEM, *INSTALL, "--set", "metrics.podMonitor.enabled=true")
    rendered = yaml.safe_load_all(journey.helm("template", "perseus", str(CHART), *flags))
    [monitor] = [body for body in rendered if body and body["kind"] == "PodMonitor"]
    with monitoring.serve(journey.cluster, monitor, tmp_path_factory.mktemp("prometheus")) as server:
        yield server


def test_it_is_installed_as_the_documentation_says(journey: Journey) -> None:
    assert not journey.left(), "objects of an earlier release"
    for command in (
        f"create namespace {SYSTEM}",
        f"label namespace {SYSTEM} pod-security.kubernetes.io/enforce=restricted",
        f"create namespace {AGENTS}",
        f"label namespace {AGENTS} pod-security.kubernetes.io/enforce=privileged",
        f"create namespace {TRAINING}",
    ):
        journey.say(f"$ kubectl {command}")
        journey.kubectl(*command.split())
    journey.helm("install", "perseus", str(CHART), "--namespace", SYSTEM, *INSTALL)
    journey.rolled_out("deployment/perseus-operator", "daemonset/perseus-gpu-sim", "daemonset/perseus-agent")

    def offered() -> list[str | None]:
        return [node.status.allocatable.get("nvidia.com/gpu") for node in journey.core.list_node().items]

    journey.eventually("the kubelets offer the GPUs", lambda: offered() == [str(GPUS_OF_A_NODE)] * NODES)
    journey.say(f"{NODES} kubelets offer {GPUS_OF_A_NODE} nvidia.com/gpu each, at default clocks")
    assert len(journey.gpus()) == NODES * GPUS_OF_A_NODE
    assert not journey.locked()


def test_only_agents_need_more_than_the_standard_restricted(journey: Journey) -> None:
    """The release's namespace enforces *restricted*. For the agents' namespace a dry run shows the violations."""
    pods = {pod.metadata.name.rsplit("-", 2)[0] for pod in journey.core.list_namespaced_pod(SYSTEM).items}
    assert pods == {"perseus-operator", "perseus-solver"}
    enforced = journey.core.read_namespace(SYSTEM).metadata.labels["pod-security.kubernetes.io/enforce"]
    assert enforced == "restricted"
    command = f"label --dry-run=server --overwrite namespace {AGENTS} pod-security.kubernetes.io/enforce=restricted"
    warnings = journey.show(f"kubectl {command}", journey.warnings(*command.split()))
    refused = set(re.findall(r"Warning: (perseus-[a-z-]+?)-[a-z0-9]{5}\b", warnings))
    assert refused == {"perseus-agent", "perseus-gpu-sim"}, warnings


def test_prometheus_finds_operator_and_agents(journey: Journey, prometheus: monitoring.Prometheus) -> None:
    journey.all_are_scraped(prometheus)
    journey.say("Prometheus has found operator and agents by Kubernetes service discovery, and scrapes them")


def test_images_contain_only_what_they_need(journey: Journey) -> None:
    """In the running pods: which modules Python finds, the user id, and that the image is read-only."""
    foreign = ["ortools", "kopf", "kubernetes", "numpy", "perseus_solver", "perseus_operator", "perseus_sim", "pip"]
    program = (
        "import importlib.util, os, shutil, sys;"
        "print([name for name in sys.argv[1:] if importlib.util.find_spec(name)],"
        "[tool for tool in ('gcc', 'cc', 'pip', 'pip3') if shutil.which(tool)],"
        "os.access('/opt', os.W_OK), os.getuid())"
    )
    found = {}
    for component in ("agent", "operator", "solver", "gpu-sim"):
        pod = journey.pods(component)[0].metadata
        output = journey.kubectl("-n", pod.namespace, "exec", pod.name, "--", "python", "-c", program, *foreign)
        found[component] = output.strip()
    assert found["agent"] == "[] [] False 0"
    assert found["operator"].endswith("[] False 65532")
    assert found["solver"] == "['ortools', 'numpy', 'perseus_solver', 'perseus_operator'] [] False 65532"
    assert found["gpu-sim"] == "['perseus_sim'] [] False 0"


def test_training_starts_and_every_pod_gets_the_socket(journey: Journey) -> None:
    physics = {"metadata": {"name": PHYSICS}, "data": {f"{name}.csv": csv for name, csv in PROFILES.items()}}
    journey.core.create_namespaced_config_map(TRAINING, physics)
    journey.apply(*GPT3.indexed_job())
    journey.eventually("the ranks train", lambda: journey.iteration(GPT3) >= 0, PATIENCE_S)
    pods = journey.training_pods(GPT3)
    assert len(pods) == GPT3.ranks
    for pod in pods:
        [container] = pod.spec.containers
        assert keys.ENV_SOCKET in {variable.name for variable in container.env}, "by the webhook"
    nodes = sorted(pod.spec.node_name for pod in pods)
    assert {nodes.count(node) for node in nodes} == {GPUS_OF_A_NODE}
    journey.say(f"{len(pods)} pods train on {NODES} nodes; the webhook has given each the agent's socket")
    journey.say(journey.log(GPT3).strip().splitlines()[-1])
    assert not journey.locked(), "no PerseusJob exists yet"


def test_it_is_profiled_on_the_running_job_planned_and_in_force(journey: Journey) -> None:
    online = {"maxClocks": 10, "maxSlowdown": "60%", "iterationsPerClock": 2}
    job = GPT3.perseus_job(
        profile={"profileRef": {"name": "gpt3-a100"}, "online": online},
        straggler={"mode": "Automatic", "slowdownThreshold": "5%", "recoveryThreshold": "2%"},
        points=30,
    )
    journey.full_j = journey.joules(GPT3)
    journey.say(f"at full clocks an iteration takes {journey.full_j:.0f} J by the counters of all GPUs")
    journey.apply(job)
    journey.follow(GPT3, "PlanApplied")
    identified = journey.ranks_by_gpu()
    wanted = sorted((pipeline, stage) for pipeline in range(GPT3.pipelines) for stage in range(GPT3.stages))
    assert sorted(identified.values()) == wanted, (
        "identified by SO_PEERCRED, control group and the kubelet's PodResources"
    )
    assert set(identified) == set(journey.gpus())
    journey.clocks_are_the_plans(GPT3)


def test_the_frontier_was_solved_by_the_service(journey: Journey) -> None:
    [worker] = [pod.metadata.name for pod in journey.pods("solver")]
    path = f"/api/v1/namespaces/{SYSTEM}/pods/{worker}:{keys.DEFAULT_SOLVER_METRICS_PORT}/proxy/metrics"
    page = journey.kubectl("get", "--raw", path)
    done = {match[1]: float(match[2]) for match in re.finditer(r"perseus_solver_work_total\{(.*)\} (\S+)", page)}
    journey.say(f"the worker {worker} has done: {done}")
    assert done['outcome="answered",task="solve"'] >= 1


def test_the_reported_savings_are_the_measured_ones(journey: Journey) -> None:
    """Agents hold a new plan's highest clock until they know when its instructions run. Such iterations draw more and
    are not reported, so the counters are read after them, and again where another plan came meanwhile.
    """
    read: list[tuple[float, dict[str, str]]] = []

    def measured() -> bool:
        before = journey.status(GPT3)
        if int(before.get("measured", {}).get("iterations", 0)) < 2:
            return False
        planned_j, after = journey.joules(GPT3), journey.status(GPT3)
        if "savings" in after and after["plan"]["fromIteration"] == before["plan"]["fromIteration"]:
            read.append((planned_j, after["savings"]))
        return bool(read)

    journey.eventually("iterations under one plan are measured", measured, PATIENCE_S)
    planned_j, reported = read[-1]
    saved = 1 - planned_j / journey.full_j
    journey.say(f"under the plan it takes {planned_j:.0f} J: {saved:.1%} less, at the same speed")
    assert saved > 0.04
    assert float(reported["energy"].rstrip("%")) / 100 == pytest.approx(saved, abs=0.05)
    assert float(reported["slowdown"].rstrip("%")) < 10, "no slowdown, except for the noise of a busy machine"


def test_kubectl_and_the_plugin_show_it(journey: Journey) -> None:
    line = rf"{GPT3.name} +True +Ready +Enforce +MaxThroughput +\d+\.\d+%"
    get = lambda: journey.kubectl("-n", TRAINING, "get", "pj")  # noqa: E731
    # The plan may just be replaced by one for what was measured meanwhile, of which no savings are measured yet.
    journey.eventually("kubectl shows what is saved", lambda: re.search(line, get()), PATIENCE_S)
    journey.show("kubectl get pj", get())
    described = journey.kubectl("-n", TRAINING, "describe", "pj", GPT3.name)
    assert "The plan is in force." in described
    events = journey.kubectl("-n", TRAINING, "events", "--for", f"perseusjob/{GPT3.name}")
    journey.show(f"kubectl events --for perseusjob/{GPT3.name}", events)
    for reason in ("Leased", "BaselineMeasured", "Profiling", "Solved", "PlanChanged"):
        assert reason in events
    assert "in force" in journey.plugin("explain", GPT3.name)


def test_an_evil_tenant_beside_it_changes_nothing(journey: Journey, cluster: Any, api: Any, tmp_path: Path) -> None:
    """Floods of the agents' sockets, objects at the limits of their schemas, and planted frontiers, for a while."""
    before = journey.restarts()
    fast_s = median(journey.iteration_times(GPT3)[-COMPARED:])
    evil = EvilTenant(cluster.kubeconfig, api, tmp_path)
    try:
        honest = journey.frontier(GPT3)["spec"]
        refused = {
            "write a PerseusFrontier": lambda: evil.make(keys.FRONTIER_PLURAL, keys.FRONTIER_KIND, "own", honest),
            "write a PowerBudget": lambda: evil.make(keys.BUDGET_PLURAL, keys.BUDGET_KIND, "own", {"watts": 1}),
        }
        answers = {what: evil.may_not(action) for what, action in refused.items()}
        assert answers == dict.fromkeys(refused, 403)
        evil.plant(honest)
        evil.fill()
        evil.flood([node.name for node in cluster.nodes], "/run/perseus")
        begun = lambda: all(evil.tried(node.name) > 100 for node in cluster.nodes)  # noqa: E731
        journey.eventually("both floods have begun", begun, PATIENCE_S)
        journey.trains(GPT3, COMPARED)
        journey.clocks_are_the_plans(GPT3)
        slow_s = median(journey.iteration_times(GPT3)[-COMPARED:])
        tried = sum(evil.tried(node.name) for node in cluster.nodes)
        journey.say(f"beside {tried} hostile connections an iteration takes {slow_s:.3f} s, before {fast_s:.3f} s")
        assert slow_s < 1.05 * fast_s
        journey.follow(GPT3, "PlanApplied")  # it may just be replaced by one for what was measured meanwhile
        assert journey.restarts() == before, "no process of ours has died"
    finally:
        evil.end()


def test_a_straggler_is_declared(journey: Journey) -> None:
    """Infrastructure declares a straggler, so the other pipeline runs a slower plan."""
    annotation = f"{keys.ANNOTATION_STRAGGLER}=1:0:1.3"
    journey.say(f"$ kubectl annotate pj {GPT3.name} {annotation}")
    journey.kubectl("-n", TRAINING, "annotate", keys.PLURAL, GPT3.name, annotation)
    journey.slowed_for(GPT3, "Pipeline 1 is declared 30.00% slower")
    journey.say(f"$ kubectl annotate pj {GPT3.name} {keys.ANNOTATION_STRAGGLER}-")
    journey.kubectl("-n", TRAINING, "annotate", keys.PLURAL, GPT3.name, f"{keys.ANNOTATION_STRAGGLER}-")
    journey.fast_again(GPT3)


def test_a_thermal_straggler_is_detected(journey: Journey) -> None:
    """It is on the last stage, which has the most work and therefore the highest clock of the plan."""
    [hot] = [uuid for uuid, rank in journey.ranks_by_gpu().items() if rank == (0, GPT3.stages - 1)]
    journey.poke(hot, "cap_mhz=900", "reasons=64")
    message = journey.slowed_for(GPT3, "Pipeline 0 is")
    assert "Cause: thermal" in message
    assert hot in message
    journey.poke(hot, "cap_mhz=0", "reasons=0")
    journey.fast_again(GPT3)


def test_watts_are_shared(journey: Journey, prometheus: monitoring.Prometheus) -> None:
    """The budget stays until Prometheus has scraped it, so that the dashboards show it."""
    version = f"{keys.API_GROUP}/{keys.API_VERSION}"
    journey.apply(
        {"apiVersion": version, "kind": "PowerBudget", "metadata": {"name": "hall-b"}, "spec": {"watts": BUDGET_W}}
    )
    limited = lambda: journey.in_force(GPT3) and journey.condition(GPT3, "PlanApplied")[1] == "LimitedByBudget"  # noqa: E731
    journey.eventually("the budget limits the job", limited, PATIENCE_S)
    journey.show("kubectl get pb", journey.kubectl("get", "pb"))
    journey.clocks_are_the_plans(GPT3)
    budget_queries = {where: query for where, query in queries(IN_GRAFANA).items() if "perseus_budget_" in query}
    seen = lambda: all(prometheus.ever(budget_queries, journey.begun_s, time.time()).values())  # noqa: E731
    journey.eventually(f"Prometheus has data of {', '.join(budget_queries)}", seen, PATIENCE_S)
    journey.kubectl("delete", "pb", "hall-b")
    journey.fast_again(GPT3)


def test_agents_are_upgraded_during_training(journey: Journey) -> None:
    """One after the other: no agent leaves a GPU locked, training goes on, and the plan returns."""
    agents, resets = {pod.metadata.uid for pod in journey.pods("agent")}, journey.gpus()
    locked, before = journey.locked(), journey.iteration(GPT3)
    flags = ("--reset-then-reuse-values", "--set", "agent.settings.sampleIntervalMs=60")
    agent_exits = journey.agent_exits()
    journey.helm("upgrade", "perseus", str(CHART), "--namespace", SYSTEM, *flags)
    journey.rolled_out("daemonset/perseus-agent")
    assert [agent_exit.left_locked() for agent_exit in agent_exits] == [[]] * NODES, "reset by the old agents"
    assert not agents & {pod.metadata.uid for pod in journey.pods("agent")}
    now = journey.gpus()
    assert all(now[uuid]["reset_calls"] > resets[uuid]["reset_calls"] for uuid in locked), "every lock was reset"
    all_ranks = lambda: len(journey.ranks_by_gpu()) == GPT3.ranks  # noqa: E731
    journey.eventually("all ranks are back", all_ranks, PATIENCE_S)
    journey.follow(GPT3, "PlanApplied")
    journey.clocks_are_the_plans(GPT3)
    journey.trains(GPT3, 1)
    pods = journey.training_pods(GPT3)
    assert [pod.status.container_statuses[0].restart_count for pod in pods] == [0] * GPT3.ranks
    assert "begins again" not in journey.log(GPT3), "no iteration was lost"
    journey.say(f"both agents are new; training went on from iteration {before} to {journey.iteration(GPT3)}")


def test_a_deleted_job_resets_every_clock_and_training_goes_on(journey: Journey) -> None:
    journey.say(f"$ kubectl delete pj {GPT3.name}")
    journey.kubectl("-n", TRAINING, "delete", keys.PLURAL, GPT3.name, f"--timeout={PATIENCE_S:.0f}s")
    journey.eventually("every GPU is at its default clocks", lambda: not journey.locked())
    journey.trains(GPT3, 1)
    journey.say("every GPU is at its default clocks, and training goes on")
    journey.say(f"$ kubectl delete job,service {GPT3.name}")
    journey.kubectl("-n", TRAINING, "delete", "job,service", GPT3.name, f"--timeout={PATIENCE_S:.0f}s")
    gone = lambda: not journey.training_pods(GPT3)  # noqa: E731
    journey.eventually("the pods are gone", gone, PATIENCE_S)


def test_plain_pods_with_several_ranks_each(journey: Journey) -> None:
    """As torchrun is often started, with a profile of the user and another objective."""
    journey.apply(*BLOOM.plain_pods())
    journey.eventually("the ranks train", lambda: journey.iteration(BLOOM) >= 0, PATIENCE_S)
    profile = {"metadata": {"name": "bloom-a100"}, "data": {"profile.csv": PROFILES[BLOOM.name]}}
    journey.core.create_namespaced_config_map(TRAINING, profile)
    power_mw = round(1000 * A100.blocking_power_w)
    reference = {"configMapRef": {"name": "bloom-a100"}, "blockingPowerMilliwatts": power_mw}
    journey.apply(BLOOM.perseus_job(profile=reference, objective={"type": "MaxSlowdown", "maxSlowdown": "10%"}))
    journey.follow(BLOOM, "PlanApplied")
    journey.clocks_are_the_plans(BLOOM)
    journey.say("$ kubectl delete pod,service --all      # the training first")
    journey.kubectl("-n", TRAINING, "delete", "pod,service", "--all", f"--timeout={PATIENCE_S:.0f}s")
    journey.eventually("every GPU is at its default clocks", lambda: not journey.locked())
    journey.kubectl("-n", TRAINING, "delete", keys.PLURAL, BLOOM.name, f"--timeout={PATIENCE_S:.0f}s")


def test_every_dashboard_had_data(journey: Journey, prometheus: monitoring.Prometheus) -> None:
    """Every query of every dashboard and page had data, and Prometheus has also found the upgraded agents."""
    journey.all_are_scraped(prometheus)
    seconds = f"{time.time() - journey.begun_s:.0f}s"
    asked = queries({**IN_GRAFANA, "$__range": seconds})
    expressions = {where: query for where, query in asked.items() if not OF_SERVING.search(f"{where} {query}")}
    answers = prometheus.ever(expressions, journey.begun_s, time.time())
    empty = {where for where, found in answers.items() if not found}
    assert empty <= MAY_BE_EMPTY <= expressions.keys(), sorted(empty ^ MAY_BE_EMPTY)
    assert set(prometheus.rules().values()) == {"ok"}
    journey.say(f"{len(expressions) - len(empty)} of {len(expressions)} queries of dashboards and pages had data")


def test_it_used_exactly_its_rights(journey: Journey) -> None:
    """The API server's audit log of the journey: no request was refused, and the used rights are the granted ones."""
    operator = rbac.user_name(SYSTEM, "perseus-operator")
    requests = list(rbac.requests(journey.cluster.audit_log, operator, since=journey.audited))
    assert lacking(requests) == set()
    used = {request.permission for request in requests}
    allowed = journey.rights("perseus-operator")
    assert sorted(map(str, allowed - used - OCCASIONAL)) == [], "granted and never used"
    assert sorted(map(str, used - allowed)) == [], "allowed by another role"
    journey.say(
        f"the operator sent {len(requests)} requests, used each of its {len(allowed)} rights, and was never refused"
    )
    accounts = [rbac.accounts(journey.cluster.audit_log, name, since=journey.audited) for name in (SYSTEM, AGENTS)]
    assert accounts == [{operator}, set()], "agents and GPU simulators do not use the API server"


def test_after_uninstall_only_definitions_and_leases_are_left(journey: Journey) -> None:
    journey.helm("uninstall", "perseus", "--namespace", SYSTEM, "--wait")
    expected = {f"customresourcedefinition/{name}" for name in CRDS} | {f"lease/{name}" for name in LEASES}

    def gone() -> bool:
        assert {f"customresourcedefinition/{name}" for name in CRDS} <= journey.left() <= expected
        return True

    journey.eventually("all other objects are gone with the last pod", gone, PATIENCE_S)
    for node in journey.cluster.nodes:
        assert "perseus" not in node.run("ls", "/var/lib/kubelet/device-plugins").stdout
    assert not journey.locked()
    journey.say("only the definitions are left, and the Leases from which the next operator goes on")
