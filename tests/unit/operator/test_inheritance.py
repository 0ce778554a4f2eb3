"""What was measured of an engine is used again by the next operator and by other pools, if their windows agree."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doubles.engine_pool import EnginePool
from tests.doubles.stored_objects import StoredObjects, stored_object

from perseus_core.serving import FOLLOW_TABLE
from perseus_operator.api.conditions import Reason
from perseus_operator.errors import InvalidSpec, KubeForbidden, KubeUnavailable
from perseus_operator.families.serving.features.inheritance.inheritance import Stage
from perseus_operator.families.serving.features.model.state import StoreProfile
from perseus_operator.families.serving.profiles import (
    KEPT,
    profile_name,
    profile_spec,
    read_profile,
    store_profile,
    stored_windows,
)
from perseus_operator.objects.values import Json
from perseus_solver.serving import Window, windows_to_csv

LONG_S = 1_500
SOON_S = 150
"""Much less than measuring downwards takes."""


@pytest.fixture(scope="module")
def learnt() -> EnginePool:
    """A pool that has stored its profile."""
    pool = EnginePool()
    pool.run(LONG_S, until=lambda: bool(pool.profiles))
    assert pool.status()["engine"]["profile"] == next(iter(pool.profiles))
    return pool


@pytest.fixture
def profiles(learnt: EnginePool) -> dict[str, Json]:
    return deepcopy(learnt.profiles)


def orders_until(pool: EnginePool, follow: int, most_s: int = SOON_S) -> list[list[int]]:
    """The clocks of each second until so many replicas follow a table."""
    seen = []
    while pool.clocks.count(FOLLOW_TABLE) < follow and len(seen) < most_s:
        pool.step()
        seen.append(pool.clocks)
    return seen


def test_after_a_restart_a_table_is_in_force_without_measuring_downwards(profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles)
    seen = orders_until(pool, 3)
    assert pool.clocks == [FOLLOW_TABLE] * 3
    assert {mhz for clocks in seen for mhz in clocks} <= {0, FOLLOW_TABLE}, "no clock was tried"
    alone = [clocks for clocks in seen if clocks == [FOLLOW_TABLE, 0, 0]]
    assert len(alone) >= 10, "the canary followed it first"
    assert pool.conditions()["ProfileReady"].reason is Reason.PROFILE_FITTED
    assert pool.status()["engine"]["profile"] == next(iter(profiles))


def test_the_table_is_that_of_the_pool_that_learnt_it(learnt: EnginePool, profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles, replicas=1)
    orders_until(pool, 1)
    ours, theirs = pool.family.pool.model.table, learnt.family.pool.model.table
    assert ours is not None
    assert theirs is not None
    clocks = [[mhz for row in table.clocks_mhz for mhz in row] for table in (ours, theirs)]
    pairs = list(zip(*clocks, strict=True))
    step_mhz = 2 * 105
    assert sum(a == b or (a and b and abs(a - b) <= step_mhz) for a, b in pairs) >= 0.9 * len(pairs)


def test_other_limits_have_another_table_of_the_same_profile(profiles: dict[str, Json]) -> None:
    limits = {"timeToFirstToken": {"limit": "500ms"}, "timePerOutputToken": {"limit": "35ms"}}
    pool = EnginePool(profiles=profiles, objective=limits)
    orders_until(pool, 3)
    assert pool.clocks == [FOLLOW_TABLE] * 3


def test_while_it_is_compared_the_condition_says_so(profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles)
    pool.run(4)
    said = pool.conditions()
    assert (said["ProfileReady"].status, said["ProfileReady"].reason) == (False, Reason.CONFIRMING_PROFILE)
    assert "at default clocks" in said["ProfileReady"].message
    assert said["ClocksApplied"].reason is Reason.WAITING_FOR_PROFILE
    pool.run(SOON_S, until=lambda: pool.clocks[0] == FOLLOW_TABLE)
    assert "of r-0, by it" in pool.conditions()["ProfileReady"].message


def test_a_profile_of_a_faster_engine_sets_no_clock_and_is_dropped_with_the_reason(profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles)
    pool.slower = 1.2
    pool.run(SOON_S, until=lambda: pool.family.pool.inheritance.stage is Stage.ENDED)
    assert pool.clocks == [0, 0, 0]
    said = pool.conditions()["ProfileReady"]
    assert said.reason is Reason.PROFILING
    assert "is not used: at 1,980 MHz" in said.message
    assert "longer than it says" in said.message
    pool.run(SOON_S, until=lambda: pool.clocks[0] > 0)
    assert pool.clocks[0] > 0, "it is measured as if there were none"


def test_one_that_is_wrong_below_the_default_clocks_harms_the_canary_alone(profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles)
    others = set()
    while pool.family.pool.inheritance.stage is not Stage.ENDED and pool.second < LONG_S:
        pool.slower = 1.3 if pool.clocks[0] == FOLLOW_TABLE else 1.0
        pool.step()
        others |= set(pool.clocks[1:])
    assert others == {0}
    assert "is not used" in pool.family.pool.inheritance.refusal


def test_loads_that_it_does_not_have_do_not_confirm_it(profiles: dict[str, Json]) -> None:
    pool = EnginePool(profiles=profiles, replicas=1, running=lambda *_: 200)
    pool.run(700, until=lambda: pool.family.pool.inheritance.stage is Stage.ENDED)
    assert pool.clocks == [0]
    assert "no load that it has" in pool.family.pool.inheritance.refusal


def test_a_profile_of_another_engine_is_none(profiles: dict[str, Json]) -> None:
    [(name, spec)] = profiles.items()
    spec["serving"]["fingerprint"] = "0" * 64
    pool = EnginePool(profiles=profiles)
    pool.run(3)
    assert f"PerseusProfile {name}: spec.serving.fingerprint: must be that of the engine" in (
        pool.conditions()["ProfileReady"].message
    )


HEADER = windows_to_csv(())
WINDOW = Window(1_980, 1.0, 8.0, 4_000.0, 50, 0.0123, watts=900.0)


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ("clock\n1\n", "the first line must be clock_mhz,"),
        (HEADER + "1,2\n", "line 2 must have 11 values, not 2"),
        (HEADER + "x,1,8,4000,50,0.01,0,0,0,,\n", "line 2: clock_mhz must be a number, not 'x'"),
        (HEADER + "1980,1,nan,4000,50,0.01,0,0,0,,\n", "line 2: running must be from 0 to 65,536"),
        (HEADER + "1980,inf,8,4000,50,0.01,0,0,0,,\n", "line 2: seconds must be more than 0"),
        (HEADER + f"{'9' * 5_000},1,8,4000,50,0.01,0,0,0,,\n", "line 2: clock_mhz must be"),
        (HEADER + "1980,1,8,4000,50,1e-9,0,0,0,,\n", "line 2: step_s must be from 0.000001"),
        (HEADER + '"1980\n', "it is no CSV"),
        (HEADER + "1980,1,8,4000,1,0.01,0,0,0,,\n" * 4_001, "windows must be at most 4,000"),
        (windows_to_csv([WINDOW]).replace("1980", "2500"), "clock_mhz must be at most 1,980 MHz"),
        ("x" * 500_001, "must be CSV of at most 500000 characters"),
    ],
)
def test_a_profile_that_somebody_wrote_is_refused_with_the_field_and_the_rule(windows: str, message: str) -> None:
    serving = {"fingerprint": "a" * 64, "engine": "e", "model": "m", "windows": windows, "promptTokens": 9}
    found = stored_object("p", {"serving": {**serving, "measuredAt": "2030-01-31T18:00:00Z"}}, ours=False)
    with pytest.raises(InvalidSpec, match=r"PerseusProfile p: spec\.serving\.windows") as raised:
        stored_windows(found, "p", "a" * 64, 1_980)
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_nothing_but_an_engine_s_profile_is_used() -> None:
    with pytest.raises(InvalidSpec, match=r"spec\.serving: is required"):
        stored_windows(stored_object("p", {"csv": "x"}), "p", "a" * 64, 1_980)


def services_of(kube: StoredObjects, shared: str | None = None) -> Any:
    async def granted(*_: str) -> str | None:
        return shared

    grants = None if shared is None else SimpleNamespace(shared_namespace=granted)
    return SimpleNamespace(kube=kube, grants=grants, wall_s=lambda: 1.9e9, monotonic_s=lambda: 0.0)


class Namespaces(StoredObjects):
    """Several."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    async def read_profile(self, namespace: str, name: str) -> Any:
        return self._read(self.profiles if namespace == self.where else {}, name)


@pytest.mark.parametrize(("where", "shared", "source"), [
    ("ns", None, "serving-"), ("lib", "lib", "of namespace lib"), ("lib", None, ""), ("lib", "other", ""),
])  # fmt: skip
async def test_profiles_of_another_namespace_are_read_only_where_a_class_grants_it(
    profiles: dict[str, Json], where: str, shared: str | None, source: str
) -> None:
    kube, pool = Namespaces(where), EnginePool()
    pool.decide()
    kube.profiles = {name: stored_object(name, spec) for name, spec in profiles.items()}
    await read_profile(pool.family.pool, services_of(kube, shared))
    found = pool.family.pool.inheritance
    assert found.confirming is bool(source)
    assert source in found.source


async def store_window(pool: EnginePool, kube: StoredObjects) -> None:
    serving = pool.family.pool
    await store_profile(serving, serving.signals.replicas[0], StoreProfile((WINDOW,), 9.0), services_of(kube))


@pytest.mark.parametrize("error", [KubeUnavailable("away"), KubeForbidden("no right")])
async def test_without_an_answer_it_is_asked_again_and_measured_without_in_the_end(error: Any) -> None:
    kube, pool = StoredObjects(), EnginePool()
    kube.failing = error
    pool.decide()
    inheritance, asked = pool.family.pool.inheritance, 0
    while inheritance.stage is not Stage.ENDED:
        assert inheritance.read_due(1e9)
        await read_profile(pool.family.pool, services_of(kube))
        asked += 1
    assert asked == 5
    assert str(error) in inheritance.refusal
    kube.failing = None
    pool.run(SOON_S, until=lambda: pool.clocks[0] > 0)
    assert pool.clocks[0] > 0


async def test_what_somebody_else_wrote_under_the_name_stays(learnt: EnginePool) -> None:
    pool, kube = deepcopy(learnt), StoredObjects()
    name = profile_name(pool.family.pool.signals.fingerprint)
    kube.profiles[name] = stored_object(name, {"csv": "theirs"}, ours=False)
    await store_window(pool, kube)
    assert kube.profiles[name].spec == {"csv": "theirs"}


async def test_of_a_namespace_the_newest_stay_and_other_profiles_with_them(learnt: EnginePool) -> None:
    pool, kube = deepcopy(learnt), StoredObjects()
    [replica, *_] = pool.family.pool.signals.replicas
    kube.profiles["trained"] = stored_object("trained", {"csv": "x"})
    for number in range(2 * KEPT):
        spec = profile_spec(replica, StoreProfile((WINDOW,), 9.0), wall_s=1.8e9 + number)
        kube.profiles[f"serving-{number:02}"] = stored_object(f"serving-{number:02}", spec, ours=number > 0)
    await store_window(pool, kube)
    kept = {name for name in kube.profiles if name.startswith("serving-")}
    newest = {f"serving-{number:02}" for number in range(KEPT + 1, 2 * KEPT)}
    assert kept == {"serving-00", *newest, profile_name(replica.fingerprint)}, "a user's is not ours to delete"
    assert "trained" in kube.profiles


async def test_an_api_server_that_is_away_is_asked_again_soon(learnt: EnginePool) -> None:
    pool, kube = deepcopy(learnt), StoredObjects()
    kube.failing = KubeUnavailable("away")
    model = pool.family.pool.model
    model.store_started(0.0)
    assert not model.store_due(3_000.0)
    await store_window(pool, kube)
    assert model.store_due(100.0)
