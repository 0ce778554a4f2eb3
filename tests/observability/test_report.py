"""A real Prometheus holds two days of a made-up job and pool; what the report reads there is what they took and did."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.made_up_fleet import BEGIN_S, HOUR_S, Worker, fleet
from tests.observability.conftest import _free_port, await_true

from perseus_operator.report.figures import rows
from perseus_operator.report.prometheus import Access, Prometheus
from perseus_operator.report.statement import Period, Statement
from perseus_operator.report.usage import read_usage

EVERY_S = 120
DAYS_S = 2 * 24 * HOUR_S


def workers() -> list[Worker]:
    """A job that runs for a part of the time, and a pool that was there before and stays."""
    job, pool = fleet(1, 1)
    job.first, job.last = 5, 29
    return [job, pool]


def openmetrics(made: list[Worker]) -> str:
    """What scrapes have seen of them: counters that rise, and gauges."""
    families: dict[str, list[str]] = {}
    for worker in made:
        for series, per_hour in {**worker.hourly, **worker.levels, "perseus_job_info": 1.0}.items():
            counter, looked_at = series.endswith("_total"), series.endswith(("_active", "_gpus"))
            labels = ",".join(f'{name}="{value}"' for name, value in worker.labels(series).items())
            for moment_s in range(BEGIN_S - HOUR_S, BEGIN_S + DAYS_S + 1, EVERY_S):
                begin_s, end_s = (BEGIN_S + hour * HOUR_S for hour in (worker.first, worker.last))
                if worker.kind == "job" and not begin_s <= moment_s <= end_s:
                    continue
                hours = (moment_s - max(begin_s, BEGIN_S) + HOUR_S) / HOUR_S
                value = per_hour * hours if counter else per_hour / 60 if looked_at else per_hour
                families.setdefault(series, []).append(f'{series}{{{labels},instance="o"}} {value} {moment_s}')
    text = []
    for series, lines in families.items():
        name, kind = (series.removesuffix("_total"), "counter") if series.endswith("_total") else (series, "gauge")
        text += [f"# TYPE {name} {kind}", *lines]
    return "\n".join([*text, "# EOF", ""])


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if shutil.which("prometheus") is None or shutil.which("promtool") is None:
        pytest.skip("no prometheus on this machine (Debian: apt-get install prometheus)")
    folder: Path = tmp_path_factory.mktemp("report")
    (folder / "data.om").write_text(openmetrics(workers()))
    (folder / "prometheus.yml").write_text("global: {}\n")
    make = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(folder / "data.om"), str(folder / "data")]
    subprocess.run(make, check=True, capture_output=True)
    where = f"127.0.0.1:{_free_port()}"
    options = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    options += ["--storage.tsdb.retention.time=100y", f"--web.listen-address={where}", "--log.level=warn"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(["prometheus", *options], stdout=log, stderr=log)

    def ready() -> bool:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            return bool(urllib.request.urlopen(f"http://{where}/-/ready", timeout=2).status == 200)
        except OSError:
            return False

    try:
        await_true("Prometheus is ready", ready)
        yield f"http://{where}"
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize(("begin_s", "end_s"), [(0, DAYS_S), (1234, DAYS_S - 2345)], ids=["hours", "parts of hours"])
def test_what_it_reads_is_what_they_took_and_did(address: str, begin_s: int, end_s: int) -> None:
    period = Period(begin_s=BEGIN_S + begin_s, end_s=BEGIN_S + end_s)
    usage = read_usage(Prometheus(address, Access(), {}), period, None, {})
    statement = Statement(
        period=period,
        queries=usage.queries,
        members=usage.members,
        measured_hours=usage.measured_hours,
        taken_s=0,
        scope="",
        origin="",
        program="",
    )
    assert statement.gap() == ""
    found = {row.kind: row for row in rows(statement, "model")}
    for worker in workers():
        row, per_hour = found[worker.kind], worker.hourly
        ran_h = worker.hours(period.begin_s, period.end_s)
        kwh = per_hour[f"perseus_{worker.kind}_energy_joules_total"] / 3.6e6
        assert row.name == worker.model
        # increase() extrapolates to the ends of the hour: what an hour lacks between two scrapes.
        assert row.measured["energyKilowattHours"] == pytest.approx(kwh * ran_h, rel=0.01)
        gpus = per_hour["perseus_node_job_gpus"] / 60
        assert row.measured["gpuHours"] == pytest.approx(gpus * ran_h, rel=0.02)
        assert row.measured["activeHours"] == pytest.approx(ran_h, rel=0.02)
        assert row.measured["activeHours"] <= (end_s - begin_s) / HOUR_S + 0.02, "no look is counted twice"
        assert row.measured["activeHoursWithoutEnergy"] < 0.2
    saved = workers()[0].levels["perseus_job_saved_ratio"]
    assert found["job"].estimated["saved"] == pytest.approx(saved, rel=0.01)
    assert found["job"].estimated["savedAsMeasuredLast"] == pytest.approx(saved)
    assert found["job"].estimated["savedLow"] == pytest.approx(saved - 0.01)
