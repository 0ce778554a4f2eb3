"""``kubectl perseus``: what it says of a job is what the solver's own simulation says, and what is missing is named."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import yaml
from tests.doubles.plugin_job import (
    CSV,
    PIPELINES,
    SPEC,
    STAGES,
    TENSOR,
    Stored,
    command,
)
from tests.doubles.stored_objects import stored_object

from perseus_core import keys
from perseus_core.units import ratio_from_share
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import parse_spec
from perseus_operator.errors import CannotAnswer, KubeConflict, KubeForbidden, KubeNotFound, KubeUnavailable
from perseus_operator.objects.values import ConfigMap, Json
from perseus_operator.plugin import cli
from perseus_operator.plugin.job import load_job
from perseus_operator.plugin.plot import LEAST_WIDTH, Mark, draw
from perseus_operator.plugin.reports import explanation, frontier_document, plan_document
from perseus_operator.plugin.tables import Terminal, explanation_text, frontier_text, plan_text
from perseus_sim.profiles import profile_csv


# ------------------------------------------------------------------------------------------------------- documents
def test_the_frontier_is_that_of_the_whole_job_against_every_clock_at_maximum(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    document = frontier_document(job)
    points, highest = document["points"], document["allAtMaximum"]
    assert len(points) == len(job.frontier)
    for point, solved in zip(points, job.frontier, strict=True):
        assert point["energyMillijoules"] == round(1000 * PIPELINES * TENSOR * solved.energy_j)
        assert point["powerWatts"] == round(PIPELINES * TENSOR * solved.energy_j / solved.iteration_time_s)
        assert ratio_from_share(point["gap"]) == pytest.approx(max(0.0, solved.gap), abs=1e-6)
        assert float(point["saved"].rstrip("%")) == pytest.approx(
            100 * (1 - point["energyMillijoules"] / highest["energyMillijoules"]), abs=0.01
        )
    assert highest["iterationTimeMicroseconds"] == points[0]["iterationTimeMicroseconds"], "T_min costs no time"
    assert float(points[0]["saved"].rstrip("%")) > 1, "and saves"
    assert document["pointInForce"] == 1


def test_a_plan_names_every_instruction_and_counts_its_changes(stored: Stored) -> None:
    document = plan_document(load_job(stored, "team", "gpt3"), None)
    assert (document["point"], document["inForce"]) == (1, True)
    for stage in document["stages"]:
        kinds = [(i["kind"], i["microbatch"]) for i in stage["instructions"]]
        assert sorted(kinds) == [(kind, m) for kind in ("backward", "forward") for m in range(4)]
        assert all(0 < i["megahertz"] <= 1410 for i in stage["instructions"])
    assert sum(stage["clockChanges"] for stage in document["stages"]) == document["clockChanges"]
    assert plan_document(load_job(stored, "team", "gpt3"), 0)["inForce"] is False


def test_a_straggler_is_waited_for_in_what_a_plan_is_compared_with(stored: Stored) -> None:
    alone = explanation(load_job(stored, "team", "gpt3"))
    slow = {"dataParallelRank": 1, "slowdown": "20.00%", "source": "Declared", "point": 0}
    stored.body["status"]["stragglers"] = [slow]
    with_it = explanation(load_job(stored, "team", "gpt3"))
    before, after = (d["figures"]["all at maximum clocks"] for d in (alone, with_it))
    assert after["iterationTimeMicroseconds"] == pytest.approx(1.2 * before["iterationTimeMicroseconds"], abs=1)
    # Two pipelines wait for a fifth of an iteration, each stage of each tensor rank at blocking power.
    waiting_mj = 2 * TENSOR * STAGES * 83.640 * 0.2 * before["iterationTimeMicroseconds"] / 1e3
    assert after["energyMillijoules"] - before["energyMillijoules"] == pytest.approx(waiting_mj, rel=1e-6)
    said = {row["what"]: row["says"] for row in with_it["why"]}
    assert "pipeline 1 is 20.00% slower (declared)" in said["straggler"]
    assert "have until then" in said["straggler"]
    slow["slowdown"] = "900.00%"
    assert "slower saves nothing" in str(explanation(load_job(stored, "team", "gpt3"))["why"])


def test_an_objective_without_slowdown_says_what_is_taken_for_noise(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC, "objective": {"type": "MaxThroughput"}}

    def said(planned: str) -> str:
        stored.body["status"]["plan"]["plannedSlowdown"] = planned
        return str(explanation(load_job(stored, "team", "gpt3"))["why"][0]["says"])

    assert said("0.22%").endswith("; that in force is 0.22% slower, within the 1.00% taken for noise")
    assert "noise" not in said("0.00%")
    assert "noise" not in said("20.00%"), "a straggler or a budget has its own line"


@pytest.mark.parametrize(
    ("objective", "said"),
    [
        ({"type": "MaxThroughput"}, "MaxThroughput: no slowdown"),
        ({"type": "MinEnergy"}, "MinEnergy: the least energy of all is at"),
        ({"type": "PowerCap", "powerCapWatts": 900}, "PowerCap: the fastest plan of at most 900 W"),
        ({"type": "Deadline", "deadline": {"iterationTimeMicroseconds": 700_000}}, "an iteration may take 0.7 s"),
        (
            {"type": "Deadline", "deadline": {"finishBy": "2030-01-31T18:00:00Z", "iterations": 9}},
            "Deadline: 9 iterations by 2030-01-31T18:00:00Z",
        ),
    ],
)
def test_every_objective_is_described(stored: Stored, objective: Json, said: str) -> None:
    stored.body["spec"] = {**SPEC, "objective": objective}
    document = explanation(load_job(stored, "team", "gpt3"))
    assert said in document["why"][0]["says"]
    assert document["why"][0]["what"] == "objective"


def test_measured_is_measured_and_predicted_is_predicted(stored: Stored) -> None:
    saves = explanation(load_job(stored, "team", "gpt3"))["saves"]
    assert saves["measured"] == {"energy": "30.00%", "slowdown": "1.67%", "against": "measured at default clocks"}
    assert saves["predicted"]["against"] == "all at maximum clocks"
    del stored.body["status"]["savings"]
    assert "measured" not in explanation(load_job(stored, "team", "gpt3"))["saves"]


# ------------------------------------------------------------------------------------------------ what is missing
def test_a_profile_of_its_own_kind_is_read_with_its_calibrations(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC, "profile": {"profileRef": {"name": "measured"}}}
    stored.objects["perseusprofiles", "measured"] = stored_object(
        "measured", {"csv": CSV}, {"calibrations": {"x": "{}"}}
    )
    assert "predicted" in explanation(load_job(stored, "team", "gpt3"))["saves"]
    stored.objects["perseusprofiles", "measured"] = stored_object("measured", {})
    found = frontier_text(frontier_document(load_job(stored, "team", "gpt3")), Terminal(), everything=False)
    assert "Note: the profile cannot be read from PerseusProfile measured" in found


def test_without_the_profile_all_but_names_and_comparison_is_shown(stored: Stored) -> None:
    for other in (None, ConfigMap("profile", {"profile.csv": profile_csv(STAGES, imbalance=1.1)}, {})):
        stored.maps.pop("profile", None)
        if other is not None:
            stored.maps["profile"] = other
        job = load_job(stored, "team", "gpt3")
        assert "saved" not in frontier_document(job)["points"][0]
        assert "Note: the profile" in frontier_text(frontier_document(job), Terminal(), everything=False)
        assert "predicted" not in explanation(job)["saves"]
        with pytest.raises(CannotAnswer, match="instructions cannot be named: the profile"):
            plan_document(job, 1)


def test_every_gap_is_one_line_with_its_reason(stored: Stored) -> None:
    status = stored.body["status"]
    for arguments, said in (
        (("frontier", "nope"), "there is no PerseusJob nope in namespace team"),
        (("frontier", "gpt3", "-n", "other"), "there is no PerseusJob gpt3 in namespace other"),
        (("plan", "gpt3", "--point", "99"), "--point: the frontier has points 0 to"),
        (
            ("straggler", "set", "gpt3", "--pipeline", "3", "--slowdown", "2"),
            "data-parallel ranks 0 to 2, not 3",
        ),
    ):
        assert command(*arguments)[0] == cli.REFUSED
        assert said in command(*arguments)[2]
        assert command(*arguments)[2].count("\n") == 1
    status["conditions"] = [
        {"type": "PlanApplied", "status": "False", "reason": "WaitingForRanks", "message": "1 of 6 have connected."}
    ]
    del status["plan"]
    assert "runs no plan: WaitingForRanks: 1 of 6 have connected." in command("plan", "gpt3")[2]
    assert command("frontier", "gpt3")[0] == 0, "a frontier is there all the same"

    stored.objects["perseusfrontiers", "gpt3"] = stored_object("gpt3", {"digest": "other"})
    assert "it is being replaced, try again" in command("frontier", "gpt3")[2]
    del stored.objects["perseusfrontiers", "gpt3"]
    assert "PerseusFrontier gpt3 does not exist" in command("frontier", "gpt3")[2]
    del status["frontier"]
    wrong = {"type": "ProfileReady", "status": "False", "reason": "KeyNotFound", "message": "no key p.csv"}
    status["conditions"] = [{"type": "Accepted", "status": "True"}, wrong]
    assert "gpt3 has no frontier yet: KeyNotFound: no key p.csv" in command("explain", "gpt3")[2]
    stored.body.pop("status")
    assert "no operator has reported on it yet" in command("explain", "gpt3")[2]


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KubeUnavailable("the API server cannot be reached: refused"), cli.UNREACHABLE, "cannot be reached"),
        (KubeForbidden('User "eve" cannot get'), cli.REFUSED, 'access denied: User "eve" cannot get'),
        (KubeNotFound("the server could not find the requested resource"), cli.REFUSED, "is the chart installed?"),
    ],
)
def test_an_error_of_the_api_server_becomes_an_exit_code(
    stored: Stored, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, said: str
) -> None:
    def refuse(*_: str) -> Any:
        raise error

    monkeypatch.setattr(stored, "job", refuse)
    for arguments in (("explain", "gpt3"), ("straggler", "clear", "gpt3")):
        found, out, err = command(*arguments)
        assert (found, out) == (code, "")
        assert said in err


@pytest.mark.parametrize(
    "arguments",
    [
        ("frontier",),
        ("straggler", "set", "gpt3", "--slowdown", "1.2"),
        ("straggler", "set", "gpt3", "--pipeline", "1"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--gpu", "GPU-a", "--slowdown", "2"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "0.9"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "fast"),
        ("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2", "--delay", "3"),
        ("explain", "gpt3", "-o", "xml"),
    ],
)
def test_wrong_arguments_are_two(stored: Stored, arguments: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command(*arguments)
    assert left.value.code == cli.USAGE
    assert "kubectl perseus" in capsys.readouterr().err


def test_without_a_command_the_commands_are_listed(stored: Stored, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        command()
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(f"\n    {name} " in shown for name in ("frontier", "plan", "explain"))


# ---------------------------------------------------------------------------------------------------- stragglers
def annotation(stored: Stored) -> str:
    return str(stored.body["metadata"].get("annotations", {}).get(keys.ANNOTATION_STRAGGLER, ""))


def test_stragglers_are_declared_and_cleared(stored: Stored) -> None:
    declare = ("straggler", "set", "gpt3", "--slowdown", "1.2")
    assert command(*declare, "--pipeline", "1")[1] == "pipeline 1 of team/gpt3 takes 1.2 times as long\n"
    assert command(*declare, "--gpu", "GPU-ab", "--delay", "30s")[1].endswith("takes 1.2 times as long in 30 s\n")
    assert annotation(stored) == "1:0:1.2,GPU-ab:30:1.2"
    command(*declare, "--pipeline", "2", "--delay", "10it")
    assert annotation(stored).endswith(",2:6.1:1.2"), "ten iterations as they are measured"
    assert "back to normal" in command("straggler", "clear", "gpt3", "--pipeline", "1")[1]
    assert "was not declared slow" in command("straggler", "clear", "gpt3", "--pipeline", "1")[1]
    assert annotation(stored) == "GPU-ab:30:1.2,2:6.1:1.2"
    assert json.loads(command("straggler", "clear", "gpt3", "-o", "json")[1])["stragglers"] == []
    assert annotation(stored) == ""


def test_pipelines_are_those_that_the_ranks_report_where_the_manifest_names_none(stored: Stored) -> None:
    declare = ("straggler", "set", "gpt3", "--slowdown", "1.2", "--pipeline")
    stored.body["spec"] = {}
    assert "before its ranks have connected" in command(*declare, "1")[2]
    shape = {"schedule": "FromRanks", "stages": STAGES, "dataParallel": 2, "tensorParallel": 1}
    stored.body["status"]["shape"] = shape
    assert command(*declare, "1")[0] == 0
    assert "ranks 0 to 1, not 2" in command(*declare, "2")[2]


def test_a_delay_in_iterations_needs_to_know_what_one_takes(stored: Stored) -> None:
    for name in ("measured", "predicted", "baseline"):
        del stored.body["status"][name]
    code, _, err = command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2", "--delay", "5it")
    assert (code, annotation(stored)) == (cli.REFUSED, "")
    assert "give seconds, such as 30s" in err


def test_an_invalid_annotation_is_not_edited_but_can_be_cleared(stored: Stored) -> None:
    stored.body["metadata"]["annotations"] = {keys.ANNOTATION_STRAGGLER: "soon"}
    code, _, err = command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2")
    assert (code, annotation(stored)) == (cli.REFUSED, "soon")
    assert "not 'soon'" in err
    assert command("straggler", "clear", "gpt3")[0] == 0
    assert annotation(stored) == ""


def test_a_job_that_ignores_stragglers_says_so(stored: Stored) -> None:
    stored.body["spec"] = {**SPEC, "straggler": {"mode": "Ignore"}}
    assert "the operator ignores it" in command("straggler", "set", "gpt3", "--pipeline", "1", "--slowdown", "2")[1]


def test_concurrent_edits_are_not_lost(monkeypatch: pytest.MonkeyPatch, stored: Stored) -> None:
    from perseus_operator.plugin.kube_client import KubeReader

    cluster = object.__new__(KubeReader)
    writes: list[Json] = []

    def patch(namespace: str, name: str, body: Json) -> None:
        if len(writes) < 2:
            stored.body["metadata"] = {"resourceVersion": f"8{len(writes)}", "annotations": {"key": f"{len(writes)}"}}
            writes.append(body)
            raise KubeConflict("the object has been modified")
        writes.append(body)

    monkeypatch.setattr(cluster, "_end_s", math.inf, raising=False)
    monkeypatch.setattr(cluster, "job", stored.job, raising=False)
    monkeypatch.setattr(cluster, "_patch", patch, raising=False)
    assert cluster.edit_annotation("team", "gpt3", "key", lambda _, before: f"{before}+mine") == "1+mine"
    assert [w["metadata"]["resourceVersion"] for w in writes] == ["7", "80", "81"]
    assert writes[-1]["metadata"]["annotations"] == {"key": "1+mine"}


# --------------------------------------------------------------------------------------------------- how it looks
def test_the_three_formats_hold_the_same_figures(stored: Stored) -> None:
    for name in ("frontier", "plan", "explain"):
        as_json = json.loads(command(name, "gpt3", "-o", "json")[1])
        assert yaml.safe_load(command(name, "gpt3", "-o", "yaml")[1]) == as_json
        assert as_json["job"] == "team/gpt3"
        assert "team/gpt3" in command(name, "gpt3")[1]


def test_nothing_but_text_goes_into_a_pipe_and_no_line_is_wider_than_the_terminal(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    for width in (60, 80, 200):
        for colour in (False, True):
            terminal = Terminal(width, colour=colour, fancy=False)
            for text in (
                plan_text(plan_document(job, None), terminal, everything=False),
                explanation_text(explanation(job), terminal),
            ):
                plain = text.replace("\x1b[1m", "").replace("\x1b[0m", "")
                assert (plain == text) is not colour
                assert max(map(len, plain.splitlines())) <= max(width, 76)
                plain.encode("ascii")
    document = frontier_document(job)
    assert "\x1b" not in frontier_text(document, Terminal(80, colour=False), everything=False)
    assert "\x1b[32m*" in frontier_text(document, Terminal(80, colour=True), everything=False)
    frontier_text(document, Terminal(80, fancy=False), everything=True).encode("ascii")


def test_a_long_frontier_is_thinned_but_never_its_ends_or_the_plan_in_force(stored: Stored) -> None:
    job = load_job(stored, "team", "gpt3")
    document = frontier_document(job)
    count = len(document["points"])
    document["pointInForce"] = 7
    for everything in (False, True):
        table = frontier_text(document, Terminal(), everything=everything).split("POINT")[1].splitlines()[1:]
        numbers = [int(line.lstrip("* ").split()[0]) for line in table if " W " in line]
        assert {0, 7, count - 1} <= set(numbers)
        assert (numbers == list(range(count))) is (everything or count <= 16)


@pytest.mark.parametrize("fancy", [True, False])
@pytest.mark.parametrize("width", [10, 40, 81, 300])
def test_a_plot_falls_where_the_curve_falls_and_shows_its_marks(width: int, fancy: bool) -> None:
    curve = [(1.0 + i / 50, 1000 / (1 + i / 10)) for i in range(50)]
    lines = draw(curve, [Mark(*curve[0], "A", "a"), Mark(*curve[-1], "B", "b")], width=width, fancy=fancy)
    assert max(map(len, lines)) <= max(width, LEAST_WIDTH)
    first, last = ("A", "B") if fancy else ("a", "b")
    assert first in lines[0]
    row = next(i for i, line in enumerate(lines) if last in line)
    assert row == len(lines) - 3
    assert lines[row].index(last) == max(len(line) for line in lines[:-2]) - 1
    assert lines[0].strip().startswith("1000")
    assert lines[-1].split() == ["1", "1.98"]


def test_a_frontier_of_one_point_can_be_drawn() -> None:
    assert any("x" in line for line in draw([(1.0, 2.0)], [Mark(1.0, 2.0, "x", "x")], width=50, fancy=True))


def test_the_spec_of_these_tests_is_one() -> None:
    assert parse_spec(JobSpec, SPEC).pipeline.data_parallel == PIPELINES
