"""Prices, carbon and overheads: each has a source, and one that lacks an hour or breaks a rule is one clear error."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from aioelectricitymaps.const import ApiEndpoints
from aiohttp import web
from tests.made_up_fleet import BEGIN_S, HOUR_S

from perseus_operator.errors import CannotAnswer, UnusableArgument
from perseus_operator.report.electricity_maps import zone_values
from perseus_operator.report.factors import HourlyValues, constant_factor, file_values, hourly_factor
from perseus_operator.report.statement import Member, Period, instant


def test_a_constant_has_its_origin() -> None:
    found = constant_factor("price", "0.12:contract 4711: base load")
    assert found is not None
    assert (found.value, found.source) == (0.12, "contract 4711: base load")
    assert constant_factor("price", "prices.csv") is None
    with pytest.raises(UnusableArgument, match=r"--price: must say where 0\.12 is from, such as '0\.12:contract"):
        constant_factor("price", "0.12")
    with pytest.raises(UnusableArgument, match="--pue: needs a source"):
        constant_factor("pue", "1.2: ")


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("pue", "0.9", "from 1 to"),
        ("server", "0.5", "from 1 to"),
        ("locationBased", "-1", "from 0 to"),
        ("price", "1e9", "to 1,000,000"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_its_rule(name: str, value: str, rule: str) -> None:
    with pytest.raises(UnusableArgument, match=rule):
        constant_factor(name, f"{value}:someone")


def test_a_price_below_zero_is_one() -> None:
    found = constant_factor("price", "-0.02:a windy day")
    assert found is not None
    assert found.value == -0.02


def test_a_file_by_hours_is_read_in_any_zone_and_keeps_its_sources_and_digest(tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text("hour,value,source\n2026-10-01T00:00Z,0.1,EPEX\n2026-10-01T03:00+02:00,0.2,EPEX\n")
    found = file_values("price", file)
    assert found.values == {BEGIN_S: 0.1, BEGIN_S + HOUR_S: 0.2}
    assert found.source == "prices.csv; EPEX"
    assert found.digest.startswith("sha256:")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("when,value\n", "needs the columns hour and value"),
        ("hour,value\n2026-10-01T00:00,1\n", "line 2: hour must be a full hour with its zone"),
        ("hour,value\n2026-10-01T00:30Z,1\n", "line 2: hour must be a full hour with its zone"),
        ("hour,value\nyesterday,1\n", "line 2: hour must be"),
        ("hour,value\n2026-10-01T00:00Z,cheap\n", "line 2: value must be a number, not 'cheap'"),
        ("hour,value\n2026-10-01T00:00Z\n", "line 2: value must be a number"),
        ("hour,value\n2026-10-01T00:00Z,nan\n", "line 2: price of a kWh must be from"),
        ("hour,value\n2026-10-01T00:00Z,1\n2026-10-01T00:00Z,2\n", "line 3: 2026-10-01T00:00:00Z stands there twice"),
        ('hour,value\n"2026', "line 1: unexpected end of data"),
        ("", "needs the columns"),
    ],
)
def test_a_file_that_breaks_a_rule_is_named_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "prices.csv"
    file.write_text(text)
    with pytest.raises(UnusableArgument, match=message) as error:
        file_values("price", file)
    assert str(error.value).startswith(f"--price: {file}")


def test_an_hour_in_which_energy_was_measured_must_have_a_value_and_no_other() -> None:
    period = Period(begin_s=BEGIN_S + 1800, end_s=BEGIN_S + 4 * HOUR_S)
    member = Member(kind="job", namespace="a", name="b", hours={"energyJoules": (None, 5.0, 6.0, None)})
    values = {BEGIN_S + HOUR_S: 1.0, BEGIN_S + 2 * HOUR_S: 2.0}
    found = hourly_factor("price", HourlyValues(source="x", values=values), period, (member,))
    assert found.hours == (None, 1.0, 2.0, None)
    del values[BEGIN_S + 2 * HOUR_S]
    missing = "no value for 1 of the 2 hours in which energy was measured; the first is 2026-10-01T02:00:00Z"
    with pytest.raises(UnusableArgument, match=missing):
        hourly_factor("price", HourlyValues(source="x", values=values), period, (member,))


NOW = datetime(2026, 10, 2, tzinfo=UTC)
KEY = "k3y"


class Service:
    """As api.electricitymaps.com answers; what it was asked with."""

    body: Any = None

    def __init__(self) -> None:
        self.keys: list[str | None] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.keys.append(request.headers.get("auth-token"))
        if request.headers.get("auth-token") != KEY:
            return web.Response(status=401)
        history = [
            {
                "carbonIntensity": 300 + hour,
                "datetime": (NOW - timedelta(hours=24 - hour)).isoformat(),
                "updatedAt": NOW.isoformat(),
                "emissionFactorType": "lifecycle",
                "isEstimated": hour >= 20,
                "estimationMethod": "TIME_SLICER_AVERAGE",
            }
            for hour in range(24)
        ]
        body = {"zone": request.query["zone"], "history": history}
        return web.Response(text=json.dumps(body if self.body is None else self.body))


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    found, loop, ready = Service(), asyncio.new_event_loop(), threading.Event()

    async def serve() -> None:
        application = web.Application()
        application.router.add_get("/history", found.answer)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        monkeypatch.setattr(
            ApiEndpoints, "HISTORY_CARBON_INTENSITY", f"http://127.0.0.1:{runner.addresses[0][1]}/history"
        )
        ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    yield found
    loop.call_soon_threadsafe(stop.set)
    thread.join()
    loop.close()


def test_a_zone_of_electricity_maps_is_asked_with_the_key_of_a_file(service: Service, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    found = zone_values("DE", file, {})
    assert service.keys == [KEY]
    assert len(found.values) == 24
    assert found.values[int(NOW.timestamp()) - HOUR_S] == 323
    assert len(found.estimated) == 4
    assert found.source == "Electricity Maps, zone DE, lifecycle emission factors, last 24 hours"
    assert instant(min(found.values)) == "2026-10-01T00:00:00Z"


def test_what_the_service_refuses_or_garbles_is_one_line_without_the_key(service: Service) -> None:
    with pytest.raises(CannotAnswer, match="Electricity Maps does not accept the key") as error:
        zone_values("DE", None, {"PERSEUS_CARBON_KEY": "wrong"})
    assert "wrong" not in str(error.value)
    for body in ({}, [], {"zone": "DE"}, {"zone": "DE", "history": [{}]}, {"zone": "DE", "history": 3}):
        service.body = body
        with pytest.raises(CannotAnswer, match="Electricity Maps does not answer"):
            zone_values("DE", None, {"PERSEUS_CARBON_KEY": KEY})


def test_a_zone_needs_a_key_and_a_name(tmp_path: Path) -> None:
    with pytest.raises(UnusableArgument, match="needs a key in --carbon-key-file or PERSEUS_CARBON_KEY"):
        zone_values("DE", None, {})
    with pytest.raises(UnusableArgument, match=r"--carbon-key-file: .* cannot be read"):
        zone_values("DE", tmp_path / "none", {})
    with pytest.raises(UnusableArgument, match="such as electricitymaps:DE"):
        zone_values("../de", None, {"PERSEUS_CARBON_KEY": KEY})
