"""Why a pool does not save: question by question in the order in which they depend on each other, and what to do.

What its conditions say is in the stored object. Why there are no pods, or why an engine says nothing, is often in the
pods and in what makes them, which its owner may read: so these are looked at, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from perseus_core import keys
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.energy_class import ClassSpec
from perseus_operator.api.job import Mode
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import InvalidSpec, KubeForbidden, KubeNotFound
from perseus_operator.families.serving.status.explanation import budget_sentence, next_step, saved_sentence
from perseus_operator.families.serving.status.summary import conditions, summary
from perseus_operator.objects.formatting import counted
from perseus_operator.objects.values import Json
from perseus_operator.plugin.doctor import ADVICE, Finding
from perseus_operator.plugin.named import Reader

NO_READER: Final = "nothing on this node reads metrics pages"
UNKNOWN_ENGINE: Final = "is of no engine that is known"
NO_PAGE: Final = "cannot be read"
OTHER_PAGE: Final = "answers"
LACKS: Final = "does not show"
NOT_YET: Final = "was not read yet"
_PAGE_ADVICE: Final = (
    (NOT_YET, "wait some seconds"),
    (NO_READER, "set agent.reader.enabled=true in the chart, or install the client's wheel in the engine's image"),
    (UNKNOWN_ENGINE, "nothing: this engine is not followed; its GPUs stay at default clocks"),
    (LACKS, "update the engine: this version does not say what its clock could follow"),
    (NO_PAGE, "set spec.engine.port to that of the engine's metrics, and let policies admit the agents' nodes"),
    (OTHER_PAGE, "set spec.engine.path and port to where the engine shows its metrics"),
)
"""What to do about what agents say of a metrics page, by words of it."""
_PODS: Final = frozenset({Reason.NO_PODS, Reason.SUSPENDED})
_ENGINES: Final = frozenset({Reason.SIGNALS_SEEN, Reason.NO_SIGNAL, Reason.ENGINE_UNKNOWN, Reason.ENGINES_DIFFER})
_WAITS: Final = frozenset({
    *(Reason.CONFIRMING_PROFILE, Reason.MEASURING_BASELINE),
    *(Reason.PROFILING, Reason.APPLYING, Reason.WAITING_FOR_SIGNALS, Reason.WAITING_FOR_PROFILE),
    *(Reason.NOT_MEASURED, Reason.NO_LIMITS),
})  # fmt: skip
"""Reasons of what time alone ends, or an earlier step says."""
_ADVICE: Final[Mapping[Reason, str]] = {
    Reason.NO_PODS: "label the pod template perseus.energy/job: POOL, or correct spec.workload",
    Reason.NO_SIGNAL: "wait for the engine to start; if it has, install the client's wheel in its image",
    Reason.PROFILING: "wait: some minutes at each clock",
    Reason.MEASURING_BASELINE: "wait: spec.objective.maxSlowdown is a share of what requests take at default clocks",
    Reason.PROFILING_FAILED: "follow the message",
    Reason.MODEL_DOES_NOT_EXPLAIN: "nothing: default clocks are kept until model, flags or engine change",
    Reason.GPU_NOT_CONTROLLABLE: "free the GPU of MIG, sharing and other programs that set clocks",
    Reason.AGENT_REFUSED: "follow the message; often a PerseusJob or another pool claims the same pod",
    Reason.OVERLOADED: "add replicas as status.advice says, or look at the router; no clock helps",
    Reason.OBJECTIVE_MISSED: "at default clocks add replicas, or relax the limit; lower clocks rise by themselves",
}
"""Where a pool's owner does something else than a job's."""


@dataclass(frozen=True)
class Surroundings:
    """What else is stored about a pool; None: it could not be read, or there is nothing to read.

    Attributes:
        pods: that carry its label.
        workload: that makes them; empty: it does not exist.
        energy_class: that made the pool, as it is now.
    """

    pods: Sequence[Json] | None = None
    workload: Json | None = None
    energy_class: ClassSpec | None = None


def surroundings_of(reader: Reader, pool: Json) -> Surroundings:
    """Read what else is stored about a pool, as far as the user may."""
    metadata, spec = pool["metadata"], pool.get("spec") or {}
    namespace, reference = metadata["namespace"], spec.get("workload")
    label = f"{keys.LABEL_JOB}={metadata['name']}"
    pods = _unless_refused(lambda: reader.pods(namespace, label))
    workload = None
    if reference:
        plural = f"{reference['kind'].lower()}s"
        try:
            workload = reader.workload(reference["apiVersion"], plural, namespace, reference["name"])
        except KubeNotFound:
            workload = {}
        except KubeForbidden:
            workload = None
    name = (metadata.get("labels") or {}).get(keys.LABEL_CLASS, "")
    body = _unless_refused(lambda: reader.energy_class(name)) if name else None
    try:
        energy_class = None if body is None else parse_spec(ClassSpec, body.get("spec"))
    except InvalidSpec:
        energy_class = None
    return Surroundings(pods, workload, energy_class)


T = TypeVar("T")


def _unless_refused(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except (KubeForbidden, KubeNotFound):
        return None


def examine_pool(pool: Json, around: Surroundings) -> Json:
    """Examine one ServingPool as the API server returns it.

    Args:
        pool: with metadata, spec and status.
        around: what else is stored about it.

    Returns:
        ``pool``, ``verdict``, one sentence, and ``steps``, as ``examine`` has them of a PerseusJob.
    """
    metadata = pool["metadata"]
    steps = list(_in_order(_Examination(pool, around).steps()))
    return {
        "pool": f"{metadata['namespace']}/{metadata['name']}",
        "verdict": _verdict(pool, steps),
        "steps": steps,
        **({"saves": pool["status"]["savings"]} if (pool.get("status") or {}).get("savings") else {}),
    }


def _in_order(steps: Iterator[Json]) -> Iterator[Json]:
    """After the first fault only what is good is said, and what the spec alone decides: the others repeat the fault."""
    blocked = False
    for step in steps:
        if blocked and step["finding"] not in _SHOWN and step["question"] not in (_PROMISED, _MAY):
            yield {"question": step["question"], "finding": Finding.UNKNOWN.value}
            continue
        yield step
        blocked = blocked or step["finding"] not in _SHOWN


_SHOWN: Final = (Finding.GOOD, Finding.NOTE)
_PROMISED: Final = "Were requests promised anything?"
_MAY: Final = "May clocks be set?"


class _Examination:
    """The steps of one pool."""

    def __init__(self, pool: Json, around: Surroundings) -> None:
        self._pool, self._around = pool, around
        self._name = str(pool["metadata"]["name"])
        self._found = conditions(pool)
        self._line = summary(pool)

    def steps(self) -> Iterator[Json]:
        yield self._of(ConditionType.ACCEPTED, "Is the manifest valid, and its name free?")
        yield from self._signals()
        yield self._limits()
        yield self._mode()
        yield self._of(ConditionType.PROFILE_READY, "Is the engine measured?")
        yield self._of(ConditionType.CLOCKS_APPLIED, "Do clocks follow the load?")
        yield self._of(ConditionType.OBJECTIVE_KEPT, "Do requests keep the limits?")
        if budget := (self._pool.get("status") or {}).get("powerBudget"):
            yield _step("Does a PowerBudget slow it?", Finding.NOTE, says=f"{budget_sentence(budget)}.")
        yield self._saved()

    def _of(self, kind: ConditionType, question: str) -> Json:
        """What a condition says."""
        condition = self._found.get(kind)
        if condition is None:
            return _step(question, Finding.UNKNOWN)
        if condition["status"] == "True":
            return _step(question, Finding.GOOD, condition)
        waits = condition["status"] == "Unknown" or condition["reason"] in _WAITS
        return _step(question, Finding.WAITING if waits else Finding.FAULT, condition, self._advice(condition))

    def _advice(self, condition: Mapping[str, Any]) -> str:
        try:
            reason = Reason(condition["reason"])
        except ValueError:  # of a later release
            return "follow the message"
        return _ADVICE.get(reason, ADVICE.get(reason, "")).replace("POOL", self._name).replace("JOB", self._name)

    def _signals(self) -> Iterator[Json]:
        """Whether pods run, agents hold leases, and engines report: one condition, the first that fails."""
        questions = ("Do its pods run?", "Do agents hold their leases?", "Do its engines say what they do?")
        condition = self._found.get(ConditionType.SIGNALS_READY)
        if condition is None:
            yield from (_step(question, Finding.UNKNOWN) for question in questions)
            return
        reason = condition["reason"]
        failed = 0 if reason in _PODS else 2 if reason in _ENGINES else 1
        for place, question in enumerate(questions):
            if place < failed or condition["status"] == "True":
                yield _step(question, Finding.GOOD)
            elif place > failed:
                yield _step(question, Finding.UNKNOWN)
            elif reason == Reason.NO_PODS:
                yield self._no_pods(question, condition)
            elif reason == Reason.NO_SIGNAL:
                yield self._no_signal(question, condition)
            else:
                yield self._of(ConditionType.SIGNALS_READY, question)

    def _no_pods(self, question: str, condition: Json) -> Json:
        says, do = condition["message"], self._advice(condition)
        workload, reference = self._around.workload, (self._pool.get("spec") or {}).get("workload") or {}
        what = f"{reference.get('kind')} {reference.get('name')}"
        if workload == {}:
            says, do = f"{what} does not exist in this namespace.", "name in spec.workload what makes the pods"
        elif workload is not None:
            spec = workload.get("spec") or {}
            template = (spec.get("template") or {}).get("metadata") or {}
            if spec.get("replicas", 1) == 0:
                says, do = f"{what} has 0 replicas.", f"nothing, or kubectl scale {what.lower().replace(' ', '/')}"
            elif not self._of_class() and (template.get("labels") or {}).get(keys.LABEL_JOB) != self._name:
                says = f"The pod template of {what} lacks the label {keys.LABEL_JOB}: {self._name}."
                do = "add that label to the pod template"
        return _step(question, Finding.FAULT, {**condition, "message": says}, do)

    def _of_class(self) -> bool:
        return keys.LABEL_CLASS in (self._pool["metadata"].get("labels") or {})

    def _no_signal(self, question: str, condition: Json) -> Json:
        says, do = condition["message"], self._advice(condition)
        do = next((advice for words, advice in _PAGE_ADVICE if words in says), do)
        if without := [pod["metadata"]["name"] for pod in self._around.pods or () if not _has_socket(pod)]:
            some = without[0] if len(without) == 1 else f"{without[0]} and {len(without) - 1} more"
            says = f"{says.rstrip('.')}. The agent's socket is not in pod {some}, so a plugin could not say it either."
            do += f". For the plugin, mount it: the webhook does so in pods that are created with {keys.LABEL_JOB}"
        return _step(question, Finding.FAULT, {**condition, "message": says}, do)

    def _limits(self) -> Json:
        question = _PROMISED
        # Limits that follow from a slowdown are measured; those of a page's engine are proposed instead.
        if self._line["limits"] or ("maxSlowdown" in self._line and "proposedLimits" not in self._line):
            return _step(question, Finding.GOOD)
        says = "spec.objective has no limit, so no clock is set."
        serving = self._around.energy_class and self._around.energy_class.serving
        if serving and serving.objective.limits is not None:
            return _step(question, Finding.FAULT, says=f"{says} Its EnergyClass has limits by now.",
                         do="delete the pool: it is made anew with them while its pods run")  # fmt: skip
        do = next_step({**self._pool, "status": {**(self._pool.get("status") or {}), "conditions": _AS_IF_READY}})
        return _step(question, Finding.FAULT, says=says, do=do.get("do") or do["says"])

    def _mode(self) -> Json:
        question, mode = _MAY, self._line["mode"]
        if (self._pool.get("spec") or {}).get("suspend"):
            return _step(question, Finding.FAULT, says="spec.suspend is true.", do=ADVICE[Reason.SUSPENDED])
        if mode in (Mode.OBSERVE, Mode.RECOMMEND):
            do = "set spec.mode: Canary, and the clock of one replica follows its load; Enforce for all"
            return _step(
                question, Finding.FAULT, says=f"spec.mode is {mode}: no clock is set, so nothing is saved.", do=do
            )
        if mode == Mode.CANARY:
            says = "spec.mode is Canary: the clock of one replica follows its load, and the others save nothing."
            return _step(question, Finding.NOTE, says=says, do="set spec.mode: Enforce, once it is worth it")
        return _step(question, Finding.GOOD)

    def _saved(self) -> Json:
        question = "Is it known what is saved?"
        if savings := self._line.get("savings"):
            return _step(question, Finding.GOOD, says=f"{saved_sentence(savings)}.")
        return _step(question, Finding.WAITING, says=self._line["unmeasured"], do="wait")


_AS_IF_READY: Final = ({"type": ConditionType.READY.value, "status": "True", "reason": Reason.READY.value},)


def _step(
    question: str, finding: Finding, condition: Mapping[str, Any] | None = None, do: str = "", *, says: str = ""
) -> Json:
    step: Json = {"question": question, "finding": finding.value}
    if condition is not None:
        step |= {"condition": condition["type"], "reason": condition["reason"], "says": condition["message"]}
    if says:
        step["says"] = says
    if do:
        step["do"] = do
    return step


def _has_socket(pod: Json) -> bool:
    containers = (pod.get("spec") or {}).get("containers") or ()
    return any(env.get("name") == keys.ENV_SOCKET for one in containers for env in one.get("env") or ())


def _verdict(pool: Json, steps: Sequence[Json]) -> str:
    metadata, status = pool["metadata"], pool.get("status") or {}
    if not status.get("conditions"):
        return "No operator has reported on it yet: check that one runs and serves this namespace."
    if status.get("observedGeneration", 0) < metadata.get("generation", 0):
        return "The operator has not seen the latest edit yet; what follows is older."
    first = next((step for step in steps if step["finding"] not in _SHOWN), None)
    if first is None:
        return f"It saves {saved_sentence(status['savings'])}."
    if first is steps[-1]:
        replicas = counted(status.get("replicaCount", 0), "replica")
        return f"It serves with {replicas}, and clocks follow the load; what that saves is not measured yet."
    what = "It does not save" if first["finding"] == Finding.FAULT else "It waits"
    if first.get("condition") == ConditionType.OBJECTIVE_KEPT and first["finding"] == Finding.FAULT:
        what = "Requests miss what they were promised"
    return f"{what}: {first.get('says') or 'not reported yet.'}"
