"""What a later release has stored is read by this one: what it does not understand is as if it were not there."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from perseus_core.units import ratio_from_ppm, ratio_from_share
from perseus_operator.api.schema import dump, openapi_of
from perseus_operator.api.status import PairStatus
from perseus_operator.api.stored import ProfileSpec, parse_stored
from perseus_operator.budgets.budget import decision_from_status
from perseus_operator.budgets.draw import member_from_status
from perseus_operator.families.training.features.comparison.state import Comparisons
from perseus_operator.families.training.features.hardware.hardware import hardware_from_status
from perseus_operator.families.training.status.restore import restore_from_status
from perseus_operator.families.training.training import Training
from perseus_operator.jobs.job import Job as PerseusJob
from perseus_operator.objects.formatting import exact_percent
from perseus_operator.objects.values import JobRef

FIGURES = {"iterationTimeMicroseconds": 1_000_000, "energyMillijoules": 5_000_000, "iterations": 9}
STORED: dict[str, Any] = {
    "baseline": FIGURES,
    "measured": FIGURES,
    "conditions": [{"type": "Finished", "status": "True", "lastTransitionTime": "2030-01-01T00:00:00Z"}],
    "comparison": {
        "lastIteration": 70,
        "without": FIGURES,
        "pairs": [{"number": 0, "savedPartsPerMillion": 200_000, "slowdownPartsPerMillion": 1_000}],
    },
    "canary": {"phase": "Passed", "savedPartsPerMillion": 200_000, "slowdownPartsPerMillion": 1, "slowAttempts": 1},
    "guard": {
        "hold": "FastestPlan",
        "about": "MaxSlowdown",
        "trips": 1,
        "until": "2030-01-01T00:01:00Z",
        "sinceIteration": 4,
        "measuredTimeMicroseconds": 1_100_000,
        "allowedTimeMicroseconds": 1_000_000,
        "referenceTimeMicroseconds": 1_000_000,
        "cause": "PowerLimit",
        "evidence": "a limit",
    },
    "hardware": {
        "gpu": "NVIDIA A100-SXM4-80GB",
        "switchLatencyMedianMicroseconds": 20_000,
        "switchLatencyP99Microseconds": 40_000,
        "callMicroseconds": 9_000,
        "gpusPerLock": 1,
        "figures": "Measured",
        "source": "measured",
        "marks": "Gpu",
        "noisePartsPerMillion": 1_000,
        "clocks": [{"megahertz": 900, "medianMicroseconds": 20_000, "p99Microseconds": 40_000}],
    },
    "shape": {"schedule": "FromRanks", "stages": 2, "dataParallel": 1, "tensorParallel": 1},
}
BUDGET = {
    "shares": [{"namespace": "ns", "name": "job", "watts": 700}],
    "conditions": [{"type": "Accepted", "status": "True", "reason": "TooSmall"}],
}
DRAW = {
    "powerBudget": {
        "name": "rack",
        "watts": 700,
        "draw": {"heldWatts": 500, "gpus": 8, "speeds": [{"watts": 400, "speedPartsPerMillion": 900_000}]},
    },
    "frontier": {"digest": "d"},
    "conditions": [{"type": "Active", "status": "True"}],
}
FUTURE = st.sampled_from(
    [
        "FromTheFuture",
        "",
        "2999-99-99",
        -1,
        0,
        2**70,
        0.5,
        1e400,
        True,
        None,
        {},
        [],
        ["x"],
        {"kind": "New"},
        [{}],
        [None],
    ]
)
"""Values that a later release might store in the place of one that this one knows."""


def places(document: Any, here: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything in a document."""
    children = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, child in children:
        yield (*here, key)
        yield from places(child, (*here, key))


@st.composite
def of_a_later_release(draw: st.DrawFn, stored: dict[str, Any]) -> dict[str, Any]:
    """The same with unknown fields, and with some fields that are gone or say something new."""
    later = copy.deepcopy(stored)
    for path in draw(st.lists(st.sampled_from(list(places(stored))), max_size=3)):
        *way, last = path
        place: Any = later
        try:
            for key in way:
                place = place[key]
            if draw(st.booleans()):
                place[last] = draw(FUTURE)
            else:
                del place[last]
                place["fieldOfALaterRelease"] = draw(FUTURE)
        except (KeyError, IndexError, TypeError):
            continue  # what it is in was changed already
    later["partOfALaterRelease"] = draw(FUTURE)
    return later


def restored(status: dict[str, Any]) -> Training:
    state = Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1))
    stored = json.loads(json.dumps(status))
    restore_from_status(state, stored, now_s=0.0, wall_s=1_893_456_000.0)
    state.job.end.restored(stored)
    return state


def parts_of(state: Training) -> dict[str, Any]:
    return {
        "baseline": state.baseline,
        "comparison": state.comparisons,
        "canary": state.canary,
        "guard": state.guard,
        "hardware": state.hardware.in_use,
        "shape": state.shape,
        "conditions": state.job.end.finished_at_s,
    }


KNOWN, NEW = parts_of(restored(STORED)), parts_of(Training(PerseusJob(JobRef("ns", "job", "uid"), generation=1)))


def test_this_release_reads_every_part_of_it() -> None:
    assert all(KNOWN[part] != NEW[part] for part in KNOWN)


@given(of_a_later_release(STORED))
def test_a_job_is_taken_over_whatever_a_later_release_has_stored(later: dict[str, Any]) -> None:
    found = parts_of(restored(later))
    for part, value in found.items():
        if later.get(part) == STORED[part]:
            assert value == KNOWN[part], "what is understood counts, whatever stands beside it"


def test_a_part_that_is_not_understood_is_as_if_it_were_not_there() -> None:
    for part, changed in (
        ("baseline", {"iterationTimeNanoseconds": 1}),
        ("comparison", {"pairs": [{"saved": "20%"}]}),
        ("guard", {**STORED["guard"], "cause": "FromTheFuture"}),
        ("hardware", {**STORED["hardware"], "figures": "FromTheFuture"}),
        ("canary", {"phase": "FromTheFuture"}),
    ):
        found = parts_of(restored({**STORED, part: changed}))
        assert found[part] == NEW[part], part
    assert restored({**STORED, "comparison": {}}).comparisons == Comparisons()


@given(of_a_later_release(BUDGET), of_a_later_release(DRAW))
def test_budgets_of_a_later_release_end_no_operator(budget: dict[str, Any], draw: dict[str, Any]) -> None:
    decision_from_status(json.loads(json.dumps(budget)))
    member_from_status("ns/job", 0, json.loads(json.dumps(draw)))


def test_shares_in_parts_per_million_that_an_earlier_release_stored_are_read() -> None:
    """The API server keeps them, and what is written next has their new names."""
    pair = {"number": 0, "saved": "20%", "slowdown": "-0.1%"}
    earlier = {"number": 0, "savedPartsPerMillion": 200_000, "slowdownPartsPerMillion": -1_000}
    assert parse_stored(PairStatus, earlier) == parse_stored(PairStatus, pair)
    assert dump(parse_stored(PairStatus, earlier)) == pair
    properties = openapi_of(PairStatus)["properties"]
    assert earlier.keys() | pair.keys() == properties.keys()
    hardware = {**STORED["hardware"], "noise": "0.1%"}
    del hardware["noisePartsPerMillion"]
    assert hardware_from_status(hardware) == hardware_from_status(STORED["hardware"]) is not None
    profile = parse_stored(ProfileSpec, {"clockLatency": "{}"})
    assert profile is not None
    assert dump(profile) == {"switchLatency": "{}"}


@given(st.integers(-9_999_999, 9_999_999))
def test_a_share_is_the_same_to_the_part_per_million_once_it_is_read_again(ppm: int) -> None:
    assert ratio_from_share(exact_percent(ratio_from_ppm(ppm))) == ratio_from_ppm(ppm)
