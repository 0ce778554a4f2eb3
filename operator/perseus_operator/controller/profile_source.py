"""Profiles: read and checked for one job, or made from a sweep for this job and later ones.

A user stores a profile in a ConfigMap or a PerseusProfile, the operator in a PerseusProfile. Beside the CSV that holds
the blocking power that was measured with it, how long clock changes took on its GPUs, and the shape of the pipeline on
which it was measured: without the shape, a profile of other stages would be used without notice.
"""

from __future__ import annotations

from dataclasses import dataclass

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import MAX_BLOCKING_POWER_MW, JobSpec
from perseus_operator.api.schema import dump, parse
from perseus_operator.api.stored import ProfileSpec
from perseus_operator.clients.kube_interface import Kube
from perseus_operator.controller.config_map_ref import resolve
from perseus_operator.errors import InvalidProfile, InvalidSpec, KubeNotFound
from perseus_operator.objects import ConfigMap, Json
from perseus_operator.planning.gpu import StoredLatency, latency_from_json, latency_to_json
from perseus_operator.planning.profiling.sweep import Sweep, blocking_power, csv_of
from perseus_proto.units import mw_from_w


@dataclass(frozen=True)
class StoredProfile:
    """A profile as it is stored.

    Attributes:
        name: of the PerseusProfile or ConfigMap.
        config_map: that holds it; None: a PerseusProfile does.
        power_mw: blocking power; None: none is stored with it.
        latency: of clock changes on the GPUs that were measured; None: none is stored, or none that can be true.
        ours: an operator measured it.
    """

    name: str
    csv: bytes
    config_map: ConfigMap | None = None
    power_mw: int | None = None
    latency: StoredLatency | None = None
    ours: bool = False


async def read_profile(kube: Kube, namespace: str, spec: JobSpec) -> StoredProfile:
    """Read the profile that a spec names; the CSV itself is not checked.

    Raises:
        InvalidProfile: it does not exist, or was not measured on this job's shape.
        KubeError: it is not known whether it exists.
    """
    reference, profile_ref = spec.profile.config_map_ref, spec.profile.profile_ref
    if reference is not None:
        field = "spec.profile.configMapRef"
        found, csv = await resolve(kube, namespace, reference, field=field, refusal=InvalidProfile)
        return StoredProfile(reference.name, csv, found)
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
    if profile.measured_on not in (None, _shape(spec)):
        message = f"{where} was measured on {profile.measured_on}, spec.pipeline has {_shape(spec)}: name another one."
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    power_mw = profile.blocking_power_milliwatts
    if power_mw is None and spec.profile.blocking_power_milliwatts is None:
        message = f"spec.profile.blockingPowerMilliwatts: must be set, as {where} has none."
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    latency = latency_from_json(profile.clock_latency or "")
    return StoredProfile(name, profile.csv.encode(), None, power_mw, latency, stored.ours)


def profile_from_sweep(sweep: Sweep, spec: JobSpec, latency: StoredLatency | None = None) -> Json:
    """The spec of the PerseusProfile that stores the profile of a finished sweep, and what it showed of clock
    changes.
    """
    stored = ProfileSpec(
        csv=csv_of(sweep),
        blocking_power_milliwatts=min(MAX_BLOCKING_POWER_MW, mw_from_w(blocking_power(sweep.readings).watts)),
        measured_on=_shape(spec),
        clock_latency=None if latency is None else latency_to_json(latency),
    )
    profile: Json = dump(stored)
    return profile


def _shape(spec: JobSpec) -> str:
    shape = spec.pipeline
    split = f" on {shape.tensor_parallel} GPUs each" if shape.tensor_parallel > 1 else ""
    chunks = f" of {shape.chunks} chunks" if shape.chunks else ""
    return f"{shape.stages} stages{chunks}{split}"
