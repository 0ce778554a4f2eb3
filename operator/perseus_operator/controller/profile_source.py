"""Profiles in ConfigMaps: read and checked for one job, or made from a sweep for this job and later ones.

Beside the CSV an operator stores the blocking power that was measured with it, how long clock changes took on its GPUs,
and the shape of the pipeline on which it was measured: without the shape, a profile of other stages would be used
without notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import MAX_BLOCKING_POWER_MW, JobSpec
from perseus_operator.clients.kube import Kube
from perseus_operator.controller.config_map_ref import resolve
from perseus_operator.errors import InvalidProfile
from perseus_operator.objects import ConfigMap
from perseus_operator.planning.gpu import StoredLatency, latency_from_json, latency_to_json
from perseus_operator.planning.profiling.sweep import Sweep, blocking_power, csv_of
from perseus_proto.units import mw_from_w

_POWER: Final = "blockingPowerMilliwatts"
_SHAPE: Final = "measuredOn"
_LATENCY: Final = "clockLatency"


@dataclass(frozen=True)
class StoredProfile:
    """A profile as it is stored.

    Attributes:
        power_mw: blocking power; None: none is stored with it.
        latency: of clock changes on the GPUs that were measured; None: none is stored, or none that can be true.
    """

    config_map: ConfigMap
    csv: bytes
    power_mw: int | None
    latency: StoredLatency | None = None


async def read_profile(kube: Kube, namespace: str, spec: JobSpec) -> StoredProfile:
    """Read the profile that a spec names; the CSV itself is not checked.

    Raises:
        InvalidProfile: it does not exist, or was not measured on this job's shape.
        KubeError: it is not known whether it exists.
    """
    reference = spec.profile.config_map_ref
    found, csv = await resolve(kube, namespace, reference, field="spec.profile.configMapRef", refusal=InvalidProfile)
    latency = latency_from_json(found.data.get(_LATENCY, ""))
    return StoredProfile(found, csv, _check(found, spec), latency)


def _check(found: ConfigMap, spec: JobSpec) -> int | None:
    where = f"ConfigMap {found.name}"
    measured_on = found.data.get(_SHAPE)
    if measured_on is not None and measured_on != _shape(spec):
        message = f"{where} was measured on {measured_on}, spec.pipeline has {_shape(spec)}: name another ConfigMap."
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    text = found.data.get(_POWER)
    if text is None:
        if spec.profile.blocking_power_milliwatts is None:
            message = f"spec.profile.{_POWER}: must be set, as {where} has no key {_POWER}."
            raise InvalidProfile(Reason.PROFILE_INVALID, message)
        return None
    if not text.strip().isdecimal() or int(text) > MAX_BLOCKING_POWER_MW:
        message = f"{where}, key {_POWER}: must be an integer from 0 to {MAX_BLOCKING_POWER_MW}, not {text[:40]!r}."
        raise InvalidProfile(Reason.PROFILE_INVALID, message)
    return int(text)


def profile_from_sweep(sweep: Sweep, spec: JobSpec, latency: StoredLatency | None = None) -> ConfigMap:
    """The ConfigMap that stores the profile of a finished sweep, and what it showed of clock changes."""
    reference = spec.profile.config_map_ref
    power_mw = min(MAX_BLOCKING_POWER_MW, mw_from_w(blocking_power(sweep.readings).watts))
    data = {reference.key: csv_of(sweep), _POWER: str(power_mw), _SHAPE: _shape(spec)}
    if latency is not None:
        data[_LATENCY] = latency_to_json(latency)
    return ConfigMap(reference.name, data, {}, ours=True)


def _shape(spec: JobSpec) -> str:
    shape = spec.pipeline
    split = f" on {shape.tensor_parallel} GPUs each" if shape.tensor_parallel > 1 else ""
    chunks = f" of {shape.chunks} chunks" if shape.chunks else ""
    return f"{shape.stages} stages{chunks}{split}"
