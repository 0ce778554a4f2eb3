"""The PerseusJob or the ServingPool that a word of the command line names: NAME, or TYPE/NAME as kubectl has it.

One name may be of both. Then the PerseusJob is meant, whose pods they are; the pool is ``sp/NAME``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from perseus_core import keys
from perseus_operator.errors import CannotAnswer, KubeForbidden, KubeNotFound
from perseus_operator.objects.values import ConfigMap, Json, StoredObject
from perseus_operator.plugin.classes import ClassReader, class_of_namespace, refused_pods

NO_DEFINITION: Final = "this cluster has no CustomResourceDefinition of PerseusJob: is the chart installed?"
BOTH: Final = (keys.KIND, keys.POOL_KIND)
_NO_RESOURCE: Final = "could not find the requested resource"
_TYPES: Final[Mapping[str, str]] = {
    word: kind
    for kind, plural, short in (
        (keys.KIND, keys.PLURAL, keys.SHORT_NAME),
        (keys.POOL_KIND, keys.POOL_PLURAL, keys.POOL_SHORT_NAME),
    )
    for word in (kind.lower(), plural, short)
}


class Reader(ClassReader, Protocol):
    """Reads objects from the API server."""

    def job(self, namespace: str, name: str) -> Json:
        """Raises KubeNotFound."""
        ...

    def pool(self, namespace: str, name: str) -> Json:
        """Raises KubeNotFound."""
        ...

    def workload(self, api_version: str, plural: str, namespace: str, name: str) -> Json:
        """What makes pods. Raises KubeNotFound."""
        ...

    def config_map(self, namespace: str, name: str) -> ConfigMap:
        """Raises KubeNotFound."""
        ...

    def stored(self, plural: str, namespace: str, name: str) -> StoredObject:
        """Raises KubeNotFound."""
        ...


def read_named(reader: Reader, namespace: str, word: str, kinds: Sequence[str] = BOTH) -> tuple[str, Json]:
    """Read what a word names.

    Args:
        reader: of the API server.
        namespace: of the object.
        word: NAME or TYPE/NAME.
        kinds: that the command can answer about, the first that exists counts.

    Returns:
        Its kind, and the object.

    Raises:
        CannotAnswer: there is none, access to it is denied, or the command does not answer about its kind.
    """
    prefix, slash, name = word.rpartition("/")
    wanted: Sequence[str] = kinds
    if slash:
        kind = _TYPES.get(prefix.lower(), "")
        if kind not in kinds:
            forms = ", ".join(f"{short}/NAME" for short, kind in _TYPES.items() if kind in kinds and len(short) == 2)
            raise CannotAnswer(f"{word}: must be NAME or {forms}")
        wanted = (kind,)
    refused: KubeForbidden | None = None
    for kind in wanted:
        try:
            return kind, _read(reader, kind, namespace, name)
        except KubeNotFound as error:
            if kind == keys.KIND and _NO_RESOURCE in str(error):
                raise CannotAnswer(NO_DEFINITION) from error
        except KubeForbidden as error:
            refused = refused or error
    if refused is not None:
        raise CannotAnswer(f"access denied: {refused}") from refused
    raise CannotAnswer(_absence(reader, namespace, name, wanted))


def _read(reader: Reader, kind: str, namespace: str, name: str) -> Json:
    return reader.pool(namespace, name) if kind == keys.POOL_KIND else reader.job(namespace, name)


def _absence(reader: Reader, namespace: str, name: str, kinds: Sequence[str]) -> str:
    """One line: that there is none, what has the name instead, and what the namespace's class has to do with it."""
    said = f"there is no {' or '.join(kinds)} {name} in namespace {namespace}"
    for kind in BOTH:
        if kind not in kinds and exists(reader, kind, namespace, name):
            command = "serving" if kind == keys.POOL_KIND else "explain"
            return f"{said}, but a {kind} of this name: kubectl perseus {command} {name}"
    answer = next(refused_pods(reader, namespace, ()), None) or class_of_namespace(reader, namespace)
    return said + (f": {answer['says']} ({answer['do']})" if answer else "")


def exists(reader: Reader, kind: str, namespace: str, name: str) -> bool:
    """Whether there is such an object that may be read."""
    try:
        _read(reader, kind, namespace, name)
    except (KubeForbidden, KubeNotFound):
        return False
    return True
