"""A profile of other GPUs: it makes no plan, and what was planned with it before the GPUs were known is given back."""

from __future__ import annotations

from typing import Any

import pytest

from perseus_operator.api.conditions import ConditionType, Reason
from perseus_operator.api.schema import parse
from perseus_operator.api.stored import ProfileSpec
from perseus_operator.families.training.features.profile.sweep import Sweep
from perseus_operator.families.training.status.conditions import conditions_of
from perseus_operator.families.training.work.profile_source import profile_from_sweep, shape_of
from perseus_operator.nodes.actions import Release
from perseus_operator.nodes.gpu import Gpu

A100, H100 = "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"


def describe(job: Any, *models: str) -> None:
    for node, model in zip(job.nodes, models, strict=True):
        node.gpus_described({}, {}, {rank.gpu_uuid: Gpu(model, "560.1") for rank in node.ranks.values()})


def profile_ready(job: Any) -> tuple[Reason, str]:
    found = next(c for c in conditions_of(job.state, job.decide()) if c.type is ConditionType.PROFILE_READY)
    return found.reason, found.message


@pytest.mark.parametrize(
    ("measured", "models", "fits"),
    [
        (A100, (A100, A100), True),
        (A100, (H100, H100), False),
        (A100, (A100, H100), False),
        ("", (H100, H100), True),
    ],
    ids=["the same", "another", "one of another", "by hand"],
)
def test_a_profile_is_used_on_gpus_of_its_model_alone(
    make_job: Any, measured: str, models: tuple[str, str], fits: bool
) -> None:
    job = make_job()
    job.run()
    assert job.decide().applied, "the GPUs are not known yet"
    job.state.profile_accepted("csv", None, gpu_model=measured)
    describe(job, *models)
    if fits:
        assert profile_ready(job)[0] is Reason.PROFILE_READ
        assert job.decide().waiting is None or job.decide().waiting.reason is not Reason.PROFILE_MISMATCH
        return
    reason, message = profile_ready(job)
    assert reason is Reason.PROFILE_MISMATCH
    assert f"was measured on {A100}, the job runs on {H100}: name another one, or none to measure one" in message
    assert {type(action) for action in job.act().actions} >= {Release}
    job.settle()
    assert not any(node.plans.driven for node in job.nodes)
    assert not job.decide().wanted


def test_what_is_measured_names_its_gpus(make_job: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perseus_operator.families.training.work.profile_source.csv_of", lambda _: "csv")
    monkeypatch.setattr(
        "perseus_operator.families.training.work.profile_source.blocking_power",
        lambda _: type("W", (), {"watts": 80.0}),
    )
    spec, sweep = make_job().spec, Sweep((1410,), "s", None)  # type: ignore[arg-type]
    own = parse(ProfileSpec, profile_from_sweep(sweep, shape_of(spec), [Gpu(A100, "560.1")] * 2), "spec")
    assert (own.gpu_model, own.driver_version) == (A100, "560.1")
    mixed = parse(
        ProfileSpec, profile_from_sweep(sweep, shape_of(spec), [Gpu(A100, "560.1"), Gpu(H100, "560.2")]), "spec"
    )
    assert (mixed.gpu_model, mixed.driver_version) == (None, None)
