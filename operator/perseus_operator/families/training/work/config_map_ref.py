"""Reads the key of a ConfigMap that a field of a spec names."""

from __future__ import annotations

from perseus_operator.api.conditions import Reason
from perseus_operator.api.job import ConfigMapRef
from perseus_operator.api.pipeline import ScheduleRef
from perseus_operator.clients.kube.interface import Kube
from perseus_operator.errors import InvalidInput, KubeNotFound
from perseus_operator.objects.values import ConfigMap


async def resolve(
    kube: Kube, namespace: str, reference: ConfigMapRef | ScheduleRef, *, field: str, refusal: type[InvalidInput]
) -> tuple[ConfigMap, bytes]:
    """Read the ConfigMap that ``field`` of a spec names; the ConfigMap and the value of the key.

    Raises:
        InvalidInput: either does not exist; of the class ``refusal``.
        KubeError: it is not known whether they exist.
    """
    name, key = reference.name, reference.key
    try:
        config_map = await kube.read_config_map(namespace, name)
    except KubeNotFound as error:
        message = f"{field}.name: ConfigMap {name} does not exist in namespace {namespace}."
        raise refusal(Reason.CONFIG_MAP_NOT_FOUND, message) from error
    if key in config_map.data:
        return config_map, config_map.data[key].encode()
    if key in config_map.binary:
        return config_map, config_map.binary[key]
    existing = ", ".join(sorted([*config_map.data, *config_map.binary])[:10]) or "none"
    raise refusal(Reason.KEY_NOT_FOUND, f"{field}.key: ConfigMap {name} has no key {key}; its keys: {existing}.")
