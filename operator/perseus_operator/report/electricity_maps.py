"""Grid carbon by hours from Electricity Maps, through its client ``aioelectricitymaps``: the one place that imports it.

Nothing is asked unless a user names a zone. The service gives a key the last 24 hours; a report of more needs a CSV.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from perseus_operator.errors import CannotAnswer, UnusableArgument
from perseus_operator.report.factors import HourlyValues
from perseus_operator.report.statement import HOUR_S

ENV_KEY: Final = "PERSEUS_CARBON_KEY"
_ZONE: Final = re.compile(r"[A-Z0-9-]{2,20}")
_TIMEOUT_S: Final = 30.0
_MAX_KEY_BYTES: Final = 4096


def zone_values(zone: str, key_file: Path | None, environment: Mapping[str, str] = os.environ) -> HourlyValues:
    """Ask for the last 24 hours of a zone.

    Args:
        zone: as the service calls it, such as DE.
        key_file: holds the key; None: it is in the environment, as ``ENV_KEY``.
        environment: of the process.

    Raises:
        UnusableArgument: there is no such zone's name, no key, or the client is not installed.
        CannotAnswer: the service does not answer, or does not accept the key.
    """
    if not _ZONE.fullmatch(zone):
        raise UnusableArgument("--carbon: a zone is written as Electricity Maps does, such as electricitymaps:DE")
    key = _key(key_file, environment)
    try:
        import aioelectricitymaps  # noqa: F401
    except ImportError as error:
        raise UnusableArgument("--carbon: a zone needs pip install 'perseus-k8s[carbon]'") from error
    return asyncio.run(_ask(zone, key))


async def _ask(zone: str, key: str) -> HourlyValues:
    from aioelectricitymaps import ElectricityMaps, ElectricityMapsError, ElectricityMapsInvalidTokenError
    from aioelectricitymaps.request import ZoneRequest

    try:
        async with asyncio.timeout(_TIMEOUT_S), ElectricityMaps(token=key) as service:
            answer = await service.carbon_intensity_history(ZoneRequest(zone))
    except ElectricityMapsInvalidTokenError as error:
        raise CannotAnswer("--carbon: Electricity Maps does not accept the key") from error
    # What it answers is decoded by the client, whose decoder raises what it likes.
    except (ElectricityMapsError, TimeoutError, ValueError, LookupError, TypeError) as error:
        raise CannotAnswer(f"--carbon: Electricity Maps does not answer: {error or type(error).__name__}") from error
    history = {int(one.timestamp.timestamp()) // HOUR_S * HOUR_S: one for one in answer.history}
    kinds = sorted({one.emission_factor_type for one in history.values()})
    return HourlyValues(
        source=f"Electricity Maps, zone {answer.zone}, {', '.join(kinds)} emission factors, last 24 hours",
        values={hour_s: float(one.carbon_intensity) for hour_s, one in history.items()},
        estimated=frozenset(hour_s for hour_s, one in history.items() if one.is_estimated),
    )


def _key(key_file: Path | None, environment: Mapping[str, str]) -> str:
    if key_file is None:
        name, key = ENV_KEY, environment.get(ENV_KEY, "")
    else:
        name = "--carbon-key-file"
        try:
            with key_file.open("rb") as file:
                key = file.read(_MAX_KEY_BYTES).decode("utf-8", "replace")
        except OSError as error:
            raise UnusableArgument(f"{name}: {key_file} cannot be read: {error.strerror}") from error
    if not re.fullmatch(r"[\x21-\x7e]+", key.strip()):
        raise UnusableArgument(f"--carbon: a zone needs a key in --carbon-key-file or {ENV_KEY}; {name} holds none")
    return key.strip()
