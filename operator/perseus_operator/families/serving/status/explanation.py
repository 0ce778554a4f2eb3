"""ServingPools as answers: all of them at a glance, and one: what its clocks do now, why, and what to do next.

Everything is read from the stored objects, so it needs no operator that runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from perseus_core import keys
from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.job import Mode
from perseus_operator.families.serving.status.summary import TIMES, conditions, summary
from perseus_operator.objects.formatting import counted, megahertz, slowed_by
from perseus_operator.objects.values import Json

_MODES: Final[Mapping[str, str]] = {
    Mode.OBSERVE: "no clock is set; what requests take is reported",
    Mode.RECOMMEND: "no clock is set",
    Mode.CANARY: "the clock of one replica follows its load, once its engine is measured",
    Mode.ENFORCE: "one replica is measured, then the clocks of all follow their load",
}
_TRIALS: Final[Mapping[str, str]] = {
    "Tried": "one step below the last clock, and predicted to stay clear of the limit",
    "Measured": "windows are still counted at it",
    "NearLimit": "the next lower clock would come too near to the limit",
    "Missed": "a limit was missed one step below",
    "Waits": "the next lower clock missed a limit, and is not tried again yet",
    "Lowest": "there is no lower clock",
}
"""Why a canary has its clock, by the word of ``status.canary.why``."""
HELD: Final[Mapping[str, str]] = {
    "Floor": "the table's clock for this load",
    "Trim": "raised above the table's, since requests missed a limit",
    "Boost": "a prompt waits or is computed",
    "Hold": "a boost has just ended",
    "BeyondTable": "at this load no lower clock keeps the limits, or none was measured",
    "MemoryFull": "the memory for keys and values is full",
    "NoSample": "the engine says nothing",
    "ImpossibleSample": "what the engine says cannot be true",
    Reason.AUTOSCALER_NEAR.value: "default clocks, since at lower ones an autoscaler may want other replicas",
    "Ordered": "ordered: it is measured, spans nodes, or has its default clocks",
}
"""What held a clock, by the word of ``status.replicas[].limitedBy``."""


def pool_listing(pools: Iterable[Json], classes: Sequence[Json] = ()) -> Json:
    """List ServingPools as the API server returns them.

    Args:
        pools: with metadata, spec and status.
        classes: what is to be said of namespaces that ask for an EnergyClass.

    Returns:
        ``pools``, each as ``summary``, by namespace and name, and ``classes``.
    """
    lines = sorted((summary(pool) for pool in pools), key=lambda line: (line["namespace"], line["name"]))
    return {"pools": lines, "classes": list(classes)}


def pool_explanation(pool: Json) -> Json:
    """Explain what a pool does and why.

    Args:
        pool: as the API server returns it.

    Returns:
        ``pool``; ``summary``; ``why``, rows of ``what`` and ``says``; ``replicas`` as in the status, each with ``why``
        in words; ``next``, with ``says`` and, if there is something to do, ``do``.
    """
    line, status = summary(pool), pool.get("status") or {}
    replicas = [
        {**one, **({"why": HELD.get(one["limitedBy"], one["limitedBy"])} if "limitedBy" in one else {})}
        for one in status.get("replicas") or ()
    ]
    return {
        "pool": f"{line['namespace']}/{line['name']}",
        "summary": line,
        "why": [{"what": what, "says": says} for what, says in _rows(pool, line)],
        "replicas": replicas,
        "next": next_step(pool),
    }


def _rows(pool: Json, line: Json) -> Iterator[tuple[str, str]]:
    status, states = pool.get("status") or {}, conditions(pool)
    name = (pool["metadata"].get("labels") or {}).get(keys.LABEL_CLASS)
    if name:
        yield "class", f"made by EnergyClass {name}, whose edits do not change it"
    yield "mode", f"{line['mode']}: {_MODES.get(line['mode'], 'unknown')}"
    yield from _promised(line)
    if engine := status.get("engine"):
        seen = counted(engine["windows"], "window")
        yield "engine", f"{engine['engine']} with {engine['model']}; {seen} of about a second count"
    if canary := status.get("canary"):
        clock = megahertz(canary["clockMegahertz"]) if canary["clockMegahertz"] else "default clocks"
        yield "canary", f"{canary['pod']} is measured at {clock}: {_TRIALS.get(canary['why'], canary['why'])}"
    if lowest := (status.get("engine") or {}).get("lowestMegahertz"):
        yield "table", f"a clock for each load, from {megahertz(lowest)} up to the default clocks"
    for missed in (status.get("engine") or {}).get("missedClocks") or ():
        times = counted(missed["misses"], "time")
        yield "missed", f"{megahertz(missed['clockMegahertz'])}, {times}; not tried before {missed['notBefore']}"
    if advice := status.get("advice"):
        yield "replicas", advised_sentence(advice)
    if savings := status.get("savings"):
        yield "saved", saved_sentence(savings)
    else:
        yield "saved", f"not measured: {line['unmeasured']}"
    if budget := status.get("powerBudget"):
        yield "budget", budget_sentence(budget)
    for kind in (ConditionType.PROFILE_READY, ConditionType.CLOCKS_APPLIED, ConditionType.READY):
        if kind in states:
            yield _CONDITIONS[kind], states[kind]["message"]


def _promised(line: Json) -> Iterator[tuple[str, str]]:
    """What requests were promised, and how many of them got it."""
    for field, limit in line["limits"].items():
        kept = f"; {limit['kept']} did lately" if "kept" in limit else "; none was counted yet"
        yield "limit", f"{limit['attainment']} of requests shall keep {limit['limit']} {TIMES[field]}{kept}"
    slowdown, proposes = line.get("maxSlowdown"), "proposedLimits" in line
    if slowdown and not proposes:
        first = "" if line["limits"] else "; these are measured first"
        yield "slowdown", f"99% of requests take at most {slowdown} longer than at default clocks{first}"
    elif not line["limits"]:
        yield "limit", _proposal(line)


_CONDITIONS: Final[Mapping[ConditionType, str]] = {
    ConditionType.PROFILE_READY: "profile",
    ConditionType.CLOCKS_APPLIED: "clocks",
    ConditionType.READY: "now",
}


def _proposal(line: Json) -> str:
    proposed = line.get("proposedLimits")
    if not proposed:
        return "none, and none is proposed before requests have ended"
    kept = " and ".join(f"{proposed[field]} {what}" for field, what in TIMES.items() if field in proposed)
    return f"none; 99% of the requests lately kept {kept}"


def advised_sentence(advice: Mapping[str, Any]) -> str:
    """Say how many replicas are advised, or why none are."""
    if "replicas" not in advice:
        return f"no number is advised: {advice['why']}"
    start = f" A start takes {advice['startSeconds']} s." if "startSeconds" in advice else ""
    return f"{advice['replicas']} are advised: {advice['why']}{start}"


def budget_sentence(budget: Mapping[str, Any]) -> str:
    """Say what a PowerBudget grants the pool, and whether that slows it; ``budget`` is the status' ``powerBudget``."""
    if "slowdown" in budget:
        return f"{budget['watts']:,} W are granted: {slowed_by(budget['name'], budget['slowdown'])}"
    if "watts" in budget:
        return f"PowerBudget {budget['name']} grants {budget['watts']:,} W, which do not slow it"
    return f"PowerBudget {budget['name']} has granted nothing yet"


def saved_sentence(savings: Mapping[str, Any]) -> str:
    """Say what is saved, and how sure that is."""
    interval = f"{savings['low']} to {savings['high']} with 95% confidence"
    joules_per_token = savings["millijoulesPerToken"] / 1000
    blocks = counted(savings["blocks"], "comparison")
    return f"{savings['energy']} of a token's energy ({interval}, {blocks}); {joules_per_token:.3g} J a generated token"


def next_step(pool: Json) -> Json:
    """Return what to do next with a pool: ``says`` and, unless it is to wait, ``do``."""
    metadata, line = pool["metadata"], summary(pool)
    where = f"-n {metadata['namespace']}"
    if line["state"] == "NotSeen" or _waits_for_signals(pool):
        return {"says": "It is not as it should be.", "do": f"kubectl perseus doctor sp/{metadata['name']} {where}"}
    patch = f"kubectl patch servingpool {metadata['name']} {where} --type merge -p"
    if not line["limits"] and ("maxSlowdown" not in line or "proposedLimits" in line):
        return _limits_step(line, patch)
    if line["mode"] in (Mode.OBSERVE, Mode.RECOMMEND):
        says = "It sets no clock. In mode Canary one replica's clock follows its load."
        return {"says": says, "do": f"{patch} {_patch({'mode': Mode.CANARY.value})}"}
    if line["mode"] == Mode.CANARY and line["state"] == Reason.CANARY and line["ready"] == "True":
        sure = "" if "savings" in line else " What that saves is not known yet."
        says = f"One replica follows its load.{sure} In mode Enforce all do."
        return {"says": says, "do": f"{patch} {_patch({'mode': Mode.ENFORCE.value})}"}
    if line["state"] in (Reason.TABLE_IN_FORCE, Reason.AUTOSCALER_NEAR):
        return {"says": "Nothing: it goes on by itself."}
    return {"says": "Wait: it goes on by itself.", "do": f"kubectl perseus doctor sp/{metadata['name']} {where}"}


def _waits_for_signals(pool: Json) -> bool:
    states = conditions(pool)
    needed = (ConditionType.ACCEPTED, ConditionType.SIGNALS_READY)
    return any(states.get(kind, {}).get("status") == "False" for kind in needed)


def _limits_step(line: Json, patch: str) -> Json:
    proposed = line.get("proposedLimits")
    if not proposed:
        return {"says": "Wait for requests: limits are proposed then. Or set spec.objective to what you promised."}
    objective: Json = {field: {"limit": proposed[field]} for field in TIMES if field in proposed}
    if "maxSlowdown" in line:
        objective["maxSlowdown"] = None  # a merge patch removes it
    says = "Without limits no clock is set. Give it what you promised, or a little more than what was kept lately:"
    return {"says": says, "do": f"{patch} {_patch({'objective': objective})}"}


def _patch(spec: Json) -> str:
    return f"'{json.dumps({'spec': spec})}'"
