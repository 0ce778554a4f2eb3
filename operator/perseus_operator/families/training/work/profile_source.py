"""Profiles: read and checked for one job, or made from a sweep for this job and later ones.

A user stores a profile in a ConfigMap or a PerseusProfile, the operator in a PerseusProfile. Beside the CSV that holds
the blocking power that was measured with it, how long clock changes took on its GPUs, and the shape of the pipeline and
the GPUs on which it was measured: without these, a profile of other stages or GPUs would be used without notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from perseus_core.units import mw_from_w
from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import MAX_BLOCKING_POWER_MW, JobSpec
from perseus_operator.api.schema import dump, parse
from perseus_operator.api.stored import ProfileSpec
from perseus_operator.clients.kube.interface import Kube
from perseus_operator.errors import InvalidProfile, InvalidSpec, KubeNotFound
from perseus_operator.families.training.features.frontier.basis import PlanBasis
from perseus_operator.families.training.features.profile.sweep import Sweep, blocking_power, csv_of
from perseus_operator.families.training.work.config_map_ref import resolve
from perseus_operator.nodes.gpu import Gpu, StoredLatency, latency_from_json, latency_to_json
from perseus_operator.objects.values import ConfigMap, Json


@dataclass(frozen=True)
class StoredProfile:
    """A profile as it is stored.

    Attributes:
        name, namespace: of the PerseusProfile or ConfigMap.
        config_map: that holds it; None: a PerseusProfile does.
        power_mw: blocking power; None: none is stored with it.
        gpu_model: that was measured; empty: it is not known.
        latency: of clock changes on the GPUs that were measured; None: none is stored, or none that can be true.
        ours: an operator measured it.
        basis, basis_source: what it is to the job, and the same in a clause.
    """

    name: str
    csv: bytes
    namespace: str
    config_map: ConfigMap | None = None
    power_mw: int | None = None
    gpu_model: str = ""
    latency: StoredLatency | None = None
    ours: bool = False
    basis: PlanBasis = PlanBasis.PROFILE
    basis_source: str = ""


async def read_profile(kube: Kube, namespace: str, spec: JobSpec) -> StoredProfile:
    """Read the profile that a spec names; the CSV itself is not checked.

    Args:
        kube: the API server.
        namespace: in which it is looked for.
        spec: of the job.

    Raises:
        InvalidProfile: it does not exist, or was not measured on this job's shape.
        KubeError: it is not known whether it exists.
    """
    reference, profile_ref = spec.profile.config_map_ref, spec.profile.profile_ref
    if reference is not None:
        field = "spec.profile.configMapRef"
        config_map, csv = await resolve(kube, namespace, reference, field=field, refusal=InvalidProfile)
        return StoredProfile(
            reference.name,
            csv,
            namespace,
            config_map,
            basis_source=f"ConfigMap {reference.name}",
        )
    assert profile_ref is not None
    name, where = profile_ref.name, f"PerseusProfile {profile_ref.name}"
    field = "spec.profile.profileRef.name"
    try:
        stored = await kube.read_profile(namespace, name)
        profile = parse(ProfileSpec, stored.spec, f"{where}: spec")
    except KubeNotFound as error:
        message = f"{field}: {where} does not exist in namespace {namespace}."
        raise InvalidProfile(Reason.PROFILE_NOT_FOUND, message) from error
    except InvalidSpec as error:
        raise InvalidProfile(Reason.PROFILE_INVALID, str(error)) from error
    if profile.csv is None:
        raise InvalidProfile(Reason.PROFILE_NOT_FOUND, f"{field}: {where} has no spec.csv: nothing is measured yet.")
    if profile.measured_on not in (None, shape_of(spec)):
        message = (
            f"{where} was measured on {profile.measured_on}, spec.pipeline has {shape_of(spec)}: name another one."
        )
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    power_mw = profile.blocking_power_milliwatts
    if power_mw is None and spec.profile.blocking_power_milliwatts is None:
        message = f"spec.profile.blockingPowerMilliwatts: must be set, as {where} has none."
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    latency = latency_from_json(profile.switch_latency or "")
    return StoredProfile(
        name,
        profile.csv.encode(),
        namespace,
        power_mw=power_mw,
        gpu_model=profile.gpu_model or "",
        latency=latency,
        ours=stored.ours,
        basis_source=f"{where} of namespace {namespace}",
    )


def profile_from_sweep(
    sweep: Sweep, measured_on: str | None, gpus: Sequence[Gpu], latency: StoredLatency | None = None
) -> Json:
    """The spec of the PerseusProfile that stores the profile of a finished sweep.

    Args:
        sweep: that is finished.
        measured_on: shape of the job; None: the profile is of any.
        gpus: that were measured.
        latency: what the sweep showed of their clock changes.
    """
    models, drivers = {gpu.model for gpu in gpus}, {gpu.driver for gpu in gpus}
    stored = ProfileSpec(
        csv=csv_of(sweep),
        blocking_power_milliwatts=min(MAX_BLOCKING_POWER_MW, mw_from_w(blocking_power(sweep.readings).watts)),
        measured_on=measured_on,
        gpu_model=min(models) if len(models) == 1 else None,
        driver_version=(min(drivers) or None) if len(drivers) == 1 else None,
        switch_latency=None if latency is None else latency_to_json(latency),
    )
    profile: Json = dump(stored)
    return profile


def shape_of(spec: JobSpec) -> str:
    """The shape of a job's pipeline in words, as ``measuredOn`` of a profile has it."""
    shape = spec.pipeline
    split = f" on {shape.tensor_parallel} GPUs each" if shape.tensor_parallel > 1 else ""
    chunks = f" of {shape.chunks} chunks" if shape.chunks else ""
    return f"{shape.stages} stages{chunks}{split}"
