"""The operator's Prometheus series.

Series are per PerseusJob or ServingPool (``pools.metrics``), never per rank, node or iteration, so that their number
stays small. Names carry base units. The series of a job are removed with the job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest

from perseus_core.evidence import Evidence
from perseus_core.marks import ClockControl
from perseus_core.units import j_from_mj, j_from_wh, ratio_from_share, s_from_ms, s_from_us
from perseus_operator.api.budget import BudgetFigures, EnergyFigures
from perseus_operator.api.status import Figures, Savings, StatusFigures
from perseus_operator.jobs.pools.metrics import PoolMetrics
from perseus_operator.nodes.iterations import Measured
from perseus_operator.objects.values import JobRef
from perseus_operator.solving.view import CalibrationQuality

disable_created_metrics()  # type: ignore[no-untyped-call]  # they would double the series of counters

# Not "namespace" and "job": Prometheus gives those to the target that it scrapes.
_JOB: Final = ("job_namespace", "job_name")
MAX_FRONTIER_POINTS: Final = 24
"""Points of each job's frontier that have series: more would not change the curve that is drawn."""


_JOB_GAUGES: Final = {
    "active": "1 if pods of the job run, 0 if not.",
    "ready": "1 if the job's condition Ready is True, 0 if not.",
    "predicted_iteration_seconds": "Predicted iteration time of the plan in force.",
    "predicted_iteration_joules": "Predicted energy of all GPUs per iteration of the plan in force.",
    "measured_iteration_seconds": "Median iteration time under the plan in force.",
    "measured_iteration_joules": "Median energy of all GPUs per iteration under the plan in force.",
    "baseline_iteration_seconds": "Median iteration time at default clocks, measured before the first plan.",
    "baseline_iteration_joules": "Median energy of all GPUs per iteration at default clocks, before the first plan.",
    "frontier_points": "Number of plans on the frontier.",
    "solve_seconds": "Time that the solver took for the frontier in use.",
    "gap_ratio": "Certified optimality gap of the frontier, mean over all deadlines, a ratio.",
    "prediction_error_ratio": "Measured divided by predicted iteration time of the plan in force, minus 1.",
    "model_explains": "1 if the calibrated model predicts iterations not used for calibration, 0 if it does not.",
    "calibration_error_ratio": "Mean error of predicted iteration times, on iterations not used for calibration.",
    "straggler_pipelines": "Number of pipelines that are stragglers now, detected or declared.",
    "planned_slowdown_ratio": "Largest iteration time of the plans in force, divided by T_min.",
    "switch_latency_median_seconds": "Median time of a clock change under which the job's plans were rehearsed.",
    "switch_latency_p99_seconds": "99th percentile of the time of a clock change under which plans were rehearsed.",
    "switch_latency_measured": "1 if those times were measured on GPUs of the job's model, 0 if they are assumed.",
    "mark_lead_seconds": "How far hosts' marks lead the begin on the GPU: median, of the rank with the largest.",
    "below_plan_ratio": "Share of the latest iterations' computing time with a clock below the planned one.",
    "above_plan_ratio": "Share of the latest iterations' computing time with a clock above the planned one.",
    "saved_ratio": "Energy of an iteration that the plan saves, as measured; absent: not known, negative: lost.",
    "saved_low_ratio": "Lower end of its 95 % interval; absent: fewer than two comparisons.",
    "saved_high_ratio": "Upper end of its 95 % interval.",
}


_BUDGET_GAUGES: Final = {
    "watts": "Power that all jobs of the PowerBudget may draw together.",
    "jobs": "Running jobs that share the PowerBudget.",
    "granted_watts": "Sum of the shares granted to the jobs.",
    "wanted_watts": "Power that the jobs would draw if their own objectives decided.",
    "least_watts": "Power that the jobs draw at their most frugal plans.",
    "unsteered_watts": "Power of selected jobs whose clocks are not set; subtracted from the budget first.",
    "gpus_per_watt": "Throughput that one more watt would add, in GPUs at full speed.",
    "energy_limit_joules": "spec.energy of the PowerBudget; absent: it has none.",
    "energy_measured_joules": "Energy of its jobs in the period that goes on, by the GPUs' counters.",
    "energy_assumed_joules": "The same where nobody measured, at the watts that were granted.",
    "energy_forecast_joules": "What would be used by the end of the period if objectives decided.",
    "energy_pace_watts": "Power that lets the energy last; absent: spec.watts or the timetable do.",
    "energy_kept": "1 if the energy can be kept, 0 if it is used up or the most frugal plans need more.",
    "kept": "1 if the predicted power of all plans fits the budget, 0 if it does not; absent: not known.",
}


class Metrics:
    """All series of one operator."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reference: list[tuple[str, str, tuple[str, ...], str]] = []
        """Name, type, labels and help of every family, for the metrics page."""
        self._gauges: dict[str, Gauge] = {
            name: self._new(Gauge, f"perseus_job_{name}", text, _JOB) for name, text in _JOB_GAUGES.items()
        }
        self._frontier_s: Gauge = self._new(
            Gauge, "perseus_job_frontier_seconds", "Iteration time of a plan on the frontier.", (*_JOB, "point")
        )
        self._frontier_j: Gauge = self._new(
            Gauge,
            "perseus_job_frontier_joules",
            "Energy of all GPUs per iteration of a plan on the frontier.",
            (*_JOB, "point"),
        )
        self._control: Gauge = self._new(
            Gauge,
            "perseus_job_clock_control",
            "1 for the way in which agents choose the moments of clock changes: timetable, marks or held.",
            (*_JOB, "control"),
        )
        self._info: Gauge = self._new(
            Gauge,
            "perseus_job_info",
            "Always 1; labels name the EnergyClass of a job or pool, and the model that it is labelled with.",
            (*_JOB, "energy_class", "model"),
        )
        self._infos: dict[tuple[str, str], tuple[str, str]] = {}
        self._values: dict[tuple[str, str], Mapping[str, float | None]] = {}
        """Of the gauges, as they were set last; by job."""
        self._controls: dict[tuple[str, str], ClockControl | None] = {}
        self._iterations: Counter = self._new(
            Counter, "perseus_job_iterations_total", "Iterations whose energy the two counters of energy have.", _JOB
        )
        self._energies: tuple[Counter, Counter] = (
            self._new(
                Counter,
                "perseus_job_energy_joules_total",
                "Energy of all GPUs in all iterations since the baseline was measured, whatever their clocks.",
                _JOB,
            ),
            self._new(
                Counter,
                "perseus_job_baseline_energy_joules_total",
                "Energy that as many iterations draw at default clocks, by the measured baseline.",
                _JOB,
            ),
        )
        self.pools = PoolMetrics(self._new)
        self._budgets: dict[str, Gauge] = {
            name: self._new(Gauge, f"perseus_budget_{name}", text, ("budget",)) for name, text in _BUDGET_GAUGES.items()
        }
        self._shown: dict[tuple[str, str], tuple[tuple[int, float, float], ...]] = {}
        build = self._new(
            Gauge, "perseus_operator_build_info", "Always 1; the label is the operator's version.", ("version",)
        )
        build.labels(version("perseus-k8s")).set(1)
        self.shards: Gauge = self._new(
            Gauge, "perseus_operator_shards", "Shards of the jobs that this replica serves; all replicas together: 32."
        )
        self.reconcile_seconds: Histogram = self._new(
            Histogram,
            "perseus_operator_reconcile_seconds",
            "Time of one reconciliation of one job.",
            buckets=(0.0001, 0.001, 0.01, 0.1, 1.0, 10.0),
        )
        self.solves = self._counter("solves", "Attempts to solve a frontier.", "result")
        self._solver_gauges: dict[str, Gauge] = {
            name: self._new(Gauge, f"perseus_operator_{name}", text)
            for name, text in {
                "solves_waiting": "Solves and calibrations that wait for a worker.",
                "solves_running": "Solves and calibrations that a worker has been given.",
                "solve_workers": "Workers that solve: processes of the operator's pod, or pods of the solver service.",
            }.items()
        }
        self.restores = self._counter("frontiers_restored", "Frontiers restored from their PerseusFrontiers.")
        self.agent_calls = self._counter("agent_calls", "Calls to agents.", "call", "result")
        self.late_selections = self._counter(
            "late_selections",
            "Selections that reached an agent after their iteration had begun; they took effect one iteration later.",
        )
        self.telemetry_dropped = self._counter(
            "telemetry_dropped",
            "Telemetry batches before which events were lost because the operator read too slowly.",
        )
        self.errors = self._counter("errors", "Unexpected errors; the operator's log has the traceback.")
        # A counter that appears with its first event has never risen, and alerts on its increase would miss that event.
        for result in ("solved", "failed"):
            self.solves.labels(result)
        for call in ("acquire", "renew", "push", "select", "order", "release"):
            for result in ("ok", "refused", "unavailable", "fenced"):
                self.agent_calls.labels(call, result)

    def set_job(
        self,
        job: JobRef,
        figures: StatusFigures,
        *,
        measured: Measured | None,
        planned_slowdown: float,
        stragglers: int,
        active: bool,
        ready: bool,
        quality: CalibrationQuality | None = None,
        evidence: Evidence | None = None,
    ) -> None:
        """Set the series of one job. A value that is not known removes its series: absent is not zero.

        Args:
            job: whose series these are.
            figures: of its status.
            measured: median of iterations under the plan in force.
            planned_slowdown: largest time of a plan in force, divided by T_min.
            stragglers: number of slow pipelines.
            active: whether the condition Active is True.
            ready: whether the condition Ready is True.
            quality: of the latest calibration.
            evidence: how clocks followed plans in the latest iterations.
        """
        hardware, evidence = figures.hardware, evidence or Evidence()
        labels = (job.namespace, job.name)
        frontier, predicted, baseline = figures.frontier, figures.predicted, figures.baseline
        values = {
            "active": float(active),
            "ready": float(ready),
            "straggler_pipelines": float(stragglers),
            "planned_slowdown_ratio": planned_slowdown,
            "predicted_iteration_seconds": s_from_us(predicted.iteration_time_microseconds) if predicted else None,
            "predicted_iteration_joules": _joules(predicted),
            "baseline_iteration_seconds": s_from_us(baseline.iteration_time_microseconds) if baseline else None,
            "baseline_iteration_joules": _joules(baseline),
            "measured_iteration_seconds": s_from_us(measured.time_us) if measured else None,
            "measured_iteration_joules": j_from_mj(measured.energy_mj) if measured and measured.energy_mj else None,
            "prediction_error_ratio": _prediction_error(predicted, measured),
            "model_explains": float(quality.explains) if quality else None,
            "calibration_error_ratio": quality.heldout_error if quality else None,
            "frontier_points": float(frontier.points) if frontier else None,
            "solve_seconds": s_from_ms(frontier.solve_milliseconds) if frontier else None,
            "gap_ratio": ratio_from_share(frontier.mean_gap) if frontier else None,
            "switch_latency_median_seconds": (
                s_from_us(hardware.switch_latency_median_microseconds) if hardware else None
            ),
            "switch_latency_p99_seconds": s_from_us(hardware.switch_latency_p99_microseconds) if hardware else None,
            "switch_latency_measured": float(hardware.figures != "Assumed") if hardware else None,
            "mark_lead_seconds": None if evidence.lead_us is None else s_from_us(evidence.lead_us),
            "below_plan_ratio": evidence.below_share,
            "above_plan_ratio": evidence.above_share,
            **_savings(figures.savings),
        }
        before = self._values.get(labels, {})
        for name, value in values.items():
            if name not in before or value != before[name]:  # a series costs much more to find than to compare
                _set(self._gauges[name], labels, value)
        self._values[labels] = values
        self._set_control(labels, evidence.control)

    def set_info(self, job: JobRef, energy_class: str, model: str) -> None:
        """Set of which EnergyClass a job or pool was made, and which model it trains or serves; empty: not known."""
        labels, info = (job.namespace, job.name), (energy_class, model)
        before = self._infos.get(labels)
        if before != info:
            if before is not None:
                self._info.remove(*labels, *before)
            self._infos[labels] = info
            self._info.labels(*labels, *info).set(1)

    def _set_control(self, labels: tuple[str, str], control: ClockControl | None) -> None:
        if self._controls.get(labels) is control:
            return
        for one in ClockControl:
            _set(self._control, (*labels, one.label.lower()), None if control is None else float(one is control))
        self._controls[labels] = control

    def count_iteration(self, job: JobRef, energy_mj: int | None, baseline: Measured | None) -> None:
        """Count the energy of one iteration, and of the baseline's, where both are known."""
        if energy_mj is None or baseline is None or baseline.energy_mj is None:
            return
        for counter, counted_mj in zip(self._energies, (energy_mj, baseline.energy_mj), strict=True):
            counter.labels(job.namespace, job.name).inc(j_from_mj(counted_mj))
        self._iterations.labels(job.namespace, job.name).inc()

    def set_frontier(self, job: JobRef, curve: Sequence[tuple[int, int]]) -> None:
        """Set the series of a job's frontier.

        Args:
            job: whose frontier this is.
            curve: time (µs) and energy (mJ) of each point; at most ``MAX_FRONTIER_POINTS`` of them get series, the
                first and the last always. Empty: remove the series.
        """
        labels, last = (job.namespace, job.name), len(curve) - 1
        some = min(len(curve), MAX_FRONTIER_POINTS)
        points = sorted({round(k * last / max(1, some - 1)) for k in range(some)})
        shown = tuple((point, s_from_us(curve[point][0]), j_from_mj(curve[point][1])) for point in points)
        before = self._shown.get(labels, ())
        if before == shown:
            return
        for gone in {point for point, _, _ in before} - set(points):
            self._frontier_s.remove(*labels, str(gone))
            self._frontier_j.remove(*labels, str(gone))
        for point, time_s, energy_j in shown:
            self._frontier_s.labels(*labels, str(point)).set(time_s)
            self._frontier_j.labels(*labels, str(point)).set(energy_j)
        self._shown[labels] = shown

    def forget_job(self, job: JobRef) -> None:
        """Remove all series of a job, or of a pool."""
        self.pools.forget_pool(job)
        self.set_frontier(job, ())
        self._shown.pop((job.namespace, job.name), None)
        for series in (*self._gauges.values(), *self._energies, self._iterations):
            series.remove(job.namespace, job.name)
        self._set_control((job.namespace, job.name), None)
        self._values.pop((job.namespace, job.name), None)
        self._controls.pop((job.namespace, job.name), None)
        info = self._infos.pop((job.namespace, job.name), None)
        if info is not None:
            self._info.remove(job.namespace, job.name, *info)

    def set_budget(
        self, budget: str, watts: int, figures: BudgetFigures, *, kept: bool | None, energy_kept: bool | None
    ) -> None:
        """Set the series of one PowerBudget.

        Args:
            budget: its name.
            watts: that are shared now.
            figures: of its status.
            kept: whether its watts are; None: not known.
            energy_kept: whether its energy is; None: it has none.
        """
        values = {
            "watts": watts,
            "jobs": figures.jobs,
            "granted_watts": figures.granted_watts,
            "wanted_watts": figures.wanted_watts,
            "least_watts": figures.least_watts,
            "unsteered_watts": figures.unsteered_watts,
            "gpus_per_watt": figures.milli_gpus_per_kilowatt / 1e6,
            "kept": kept,
            **_energy(figures.energy, energy_kept),
        }
        for name, value in values.items():
            _set(self._budgets[name], (budget,), None if value is None else float(value))

    def forget_budget(self, budget: str) -> None:
        """The PowerBudget has gone."""
        for gauge in self._budgets.values():
            _set(gauge, (budget,), None)

    def watch_solvers(self, slots: Slots) -> None:
        """Show from now on how many workers there are, and what waits for them."""
        self._solver_gauges["solves_waiting"].set_function(lambda: slots.waiting)
        self._solver_gauges["solves_running"].set_function(lambda: slots.held)
        self._solver_gauges["solve_workers"].set_function(lambda: slots.slots)

    def exposition(self) -> bytes:
        """Return all series in Prometheus' text format."""
        return generate_latest(self.registry)

    def _new(self, kind: Any, name: str, text: str, labels: tuple[str, ...] = (), **further: Any) -> Any:
        self.reference.append((name, kind.__name__.lower(), labels, text))
        return kind(name, text, labels, registry=self.registry, **further)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        counter: Counter = self._new(Counter, f"perseus_operator_{name}_total", text, labels)
        return counter


def _prediction_error(predicted: Figures | None, measured: Measured | None) -> float | None:
    if predicted is None or measured is None or not predicted.iteration_time_microseconds:
        return None
    return measured.time_us / predicted.iteration_time_microseconds - 1


def _savings(savings: Savings | None) -> dict[str, float | None]:
    """The figures of the status as ratios."""
    shares = (savings.energy, savings.energy_low, savings.energy_high) if savings else (None, None, None)
    names = ("saved_ratio", "saved_low_ratio", "saved_high_ratio")
    return {
        name: None if share is None else float(share.removesuffix("%")) / 100
        for name, share in zip(names, shares, strict=True)
    }


def _joules(figures: Figures | None) -> float | None:
    return None if figures is None or figures.energy_millijoules is None else j_from_mj(figures.energy_millijoules)


def _energy(energy: EnergyFigures | None, kept: bool | None) -> dict[str, float | None]:
    """The figures of spec.energy; each absent if there is none."""
    if energy is None:
        return dict.fromkeys(name for name in _BUDGET_GAUGES if name.startswith("energy_"))
    return {
        "energy_limit_joules": j_from_wh(energy.budget_watt_hours),
        "energy_measured_joules": j_from_wh(energy.used.measured_watt_hours),
        "energy_assumed_joules": j_from_wh(energy.used.assumed_watt_hours),
        "energy_forecast_joules": j_from_wh(energy.forecast_watt_hours),
        "energy_pace_watts": energy.pace_watts,
        "energy_kept": kept,
    }


def _set(gauge: Gauge, labels: tuple[str, ...], value: float | None) -> None:
    if value is None:
        gauge.remove(*labels)  # absent is not zero
    else:
        gauge.labels(*labels).set(value)


class Slots(Protocol):
    """Workers, and what waits for them."""

    slots: int
    held: int
    waiting: int
