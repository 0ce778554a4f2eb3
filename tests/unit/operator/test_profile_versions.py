"""What is kept of a profile that is measured again and again, and what is deleted."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st
from tests.doubles.stored_objects import StoredObjects, stored_object

from perseus_operator.errors import KubeUnavailable
from perseus_operator.families.training.work.profile_versions import KEPT, store_profile
from perseus_operator.objects.values import StoredObject


def store(kube: StoredObjects, number: int) -> int:
    return asyncio.run(store_profile(cast(Any, kube), "ns", "p", {"csv": f"measured {number}"}))


@given(st.integers(1, 12), st.sets(st.integers(1, 12)))
def test_the_newest_stay_and_those_that_a_job_names(times: int, named: set[int]) -> None:
    kube = StoredObjects()
    kube.named = {"p", *(f"p-v{number}" for number in named)}
    for number in range(1, times + 1):
        assert store(kube, number) == number
    assert kube.profiles.pop("p").spec == {"csv": f"measured {times}", "version": times}
    before = range(1, times)
    kept = {number for number in before if number in named or number >= times - KEPT}
    assert {name: found.spec["csv"] for name, found in kube.profiles.items()} == {
        f"p-v{number}": f"measured {number}" for number in kept
    }


def test_a_version_goes_once_no_job_names_it_any_more() -> None:
    kube = StoredObjects()
    kube.named = {"p-v1"}
    for number in range(1, 8):
        store(kube, number)
    assert "p-v1" in kube.profiles
    kube.named = set()
    store(kube, 8)
    assert "p-v1" not in kube.profiles


def test_what_somebody_else_wrote_is_neither_replaced_nor_deleted() -> None:
    kube = StoredObjects()
    theirs = {name: stored_object(name, {"csv": "theirs"}, ours=False) for name in ("p-v1", "p-v3", "p-w", "q-v1")}
    kube.profiles |= theirs
    for number in range(1, 10):
        store(kube, number)
    assert {name: kube.profiles[name] for name in theirs} == theirs


def test_a_profile_is_stored_though_old_ones_cannot_be_deleted() -> None:
    class Stubborn(StoredObjects):
        async def delete_profile(self, namespace: str, profile: StoredObject) -> None:
            raise KubeUnavailable("away")

    kube = Stubborn()
    for number in range(1, 8):
        assert store(kube, number) == number
    assert kube.profiles["p"].spec["csv"] == "measured 7"
