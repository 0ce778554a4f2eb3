"""One word, one type: what two rooms speak of is declared once, in `core`.

A public class whose name another room declares too, or an enumeration with the same members, is a copy, or one word for
two things. Stubs that protobuf generates declare the wire's names again and do not count. What may stay is listed with
its reason; the list only shrinks: a line that excuses nothing fails.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.offenders import ROOT, Offence, no_offenders, text_of

ROOMS = ("core", "runtime", "proto", "solver", "agent", "client", "operator", "bench", "sim")
GENERATED = re.compile(r"_pb2(_grpc)?\.py$")
CLASS = re.compile(r"^class (?P<name>[A-Za-z]\w*)(?P<bases>.*?):\n(?P<body>(?:    .*\n|\n)*)", re.MULTILINE)
MEMBER = re.compile(r"^    ([A-Z]\w*) = ", re.MULTILINE)

EXCEPTIONS: dict[str, str] = {
    # An edge's own form of an object that another room owns.
    "AgentError": "at both ends of the wire: the agent's own errors, and the operator's of calls to it",
    "InvalidProfile": "the solver's names a row, the operator's becomes a condition of the PerseusJob",
    "InvalidSchedule": "the solver's names a row, the operator's becomes a condition of the PerseusJob",
    "Infeasible": "the solver's is an error, the operator's the answer that no point is as fast",
    "LiveSession": "the client's, and the simulator's that stands in for it",
    "Objective": "of the API, and of simulated serving, which has no API",
    "Pipeline": "the API's section of that name; the command line's options; a simulated one",
    "Profile": "the API's section of that name, and measurements",
    "Session": "the two ends of one connection",
    "StaleEpoch": "the two ends of one refusal",
    "Straggler": "the API's section of that name, and a detected one",
    "Workload": "the workload that owns a job, and what the acceptance kit runs",
    # Words of programming, each of its room alone: nothing of these types crosses.
    "Allocation": "of watts; of a device by the kubelet",
    "Bound": "of energy by a dual flow; of slowdown by the guard; of serving by a policy that knows the future",
    "Cell": "of a grid of loads, and of a framework's step",
    "Certificate": "of TLS; of optimality",
    "Driver": "protocols of the few calls that each room makes, and the simulated one",
    "Engine": "of a relaxation, of simulated serving and training",
    "Estimate": "of noise, of a profile, of the demo's savings",
    "Event": "protocol of a CUDA event, and a simulated one",
    "Finding": "of a preflight, of the guard, of the doctor",
    "Gpu": "as the operator knows it, as the simulator runs it",
    "Leads": "by how much marks lead, in a rehearsal and in an agent",
    "Mark": "of a plot, twice: one of pixels, one of characters",
    "MetricsServer": "of each process, on the one HTTP server of the runtime",
    "Node": "as the agent runs it, as the operator knows it",
    "Observer": "of a job's agents, and of the demo",
    "Outcome": "of a solve, of a simulated machine",
    "Phase": "of a rank, of a canary",
    "Reason": "of a refused hello, of a clock in serving, of a condition",
    "Row": "of a table of comparison, of a sweep",
    "Rule": "of rehearsal, of a schema",
    "Sample": "of relaxation, of telemetry, of a recorded page",
    "Seen": "of serving, of an aim",
    "Selection": "of a plan, as the agent received it and as the operator sent it",
    "Server": "of the agent, and of an API",
    "Settings": "of each process",
    "Step": "of the doctor, of simulated serving, of the client",
    "Target": "of a clock, of an aim",
    "Verdict": "of a fit, of a solve",
}
"""Words that two rooms declare, each with the reason why."""


@dataclass(frozen=True)
class Declaration:
    """A public class of a room."""

    room: str
    path: Path
    line: int
    name: str
    members: frozenset[str]
    """Of an enumeration, in capitals; else empty."""


def declarations(room: str, path: Path, source: str) -> Iterator[Declaration]:
    """The public classes of a module. Parsing all of them would take seconds."""
    for found in CLASS.finditer(source):
        members = frozenset(MEMBER.findall(found["body"].upper())) if "Enum" in found["bases"] else frozenset()
        yield Declaration(room, path, source.count("\n", 0, found.start()) + 1, found["name"], members)


def second_declarations(declared: Iterable[Declaration], exceptions: Mapping[str, str]) -> Iterator[Offence]:
    """Names and sets of members that two rooms declare, unless the list excuses them, and idle lines of the list."""
    by_word, by_members = (
        defaultdict[str, list[Declaration]](list),
        defaultdict[frozenset[str], list[Declaration]](list),
    )
    for one in declared:
        by_word[one.name].append(one)
        if len(one.members) > 1:
            by_members[one.members].append(one)
    excused = set()
    for alike in (*by_word.values(), *by_members.values()):
        for other in alike[1:]:
            first = alike[0]
            if other.room == first.room:
                continue
            if {first.name, other.name} & exceptions.keys():
                excused |= {first.name, other.name}
                continue
            what = "" if other.name == first.name else f", with the members of {first.name}"
            yield Offence(other.path, other.line, f"{other.name}{what}: {first.room} declares it, at {_place(first)}")
    for word in exceptions.keys() - excused:
        yield Offence(Path(__file__), 1, f"{word}: an exception that excuses nothing")


def _place(one: Declaration) -> str:
    return f"{one.path.relative_to(ROOT)}:{one.line}"


def test_no_two_rooms_declare_the_same_word() -> None:
    modules = [(room, path) for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    declared = [
        one
        for room, path in modules
        if not GENERATED.search(path.name)
        for one in declarations(room, path, text_of(path))
    ]
    assert len(declared) > 700
    no_offenders(second_declarations(declared, EXCEPTIONS))


def rules_of(source: Mapping[str, str], exceptions: Mapping[str, str]) -> list[str]:
    path = ROOT / "x.py"
    declared = [one for room, text in source.items() for one in declarations(room, path, text)]
    return [offence.rule for offence in second_declarations(declared, exceptions)]


def test_the_contract_finds_a_name_members_and_an_idle_exception() -> None:
    grain = "class {name}(StrEnum):\n    STAGE = 'stage'\n    NONE = 'none'\n"
    name = {"solver": "class Grain:\n    pass\n", "operator": "class Grain:\n    pass\n"}
    members = {"solver": grain.format(name="Grain"), "operator": grain.format(name="Fineness")}
    assert rules_of(name, {}) == ["Grain: solver declares it, at x.py:1"]
    assert rules_of(members, {}) == ["Fineness, with the members of Grain: solver declares it, at x.py:1"]
    assert rules_of({"solver": 2 * name["solver"]}, {}) == []  # a room's own affair
    assert rules_of({"agent": "class _Seen:\n    pass\n", "operator": "class _Seen:\n    pass\n"}, {}) == []
    assert rules_of(name, {"Grain": "because"}) == []
    assert rules_of({}, {"Grain": "because"}) == ["Grain: an exception that excuses nothing"]
