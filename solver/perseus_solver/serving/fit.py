"""Fit both models to windows, with intervals, or say that they do not explain what was seen.

How much rows scatter is taken from those of one cell, which have about the same clock and load; steps with prompts, of
which the lengths differ, scatter more and count less. Where cells differ from the model by more than that, all
intervals grow by as much. Where a cell without prompts is off by more than `RELEVANT`, and beyond chance, the model
does not explain this engine, and no table may be made from it. Of an engine that computes prompts alone, the cells with
prompts are judged in their place. A row that is far from the others of its cell (a pause of the process, a preemption)
does not count; a whole cell always does.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from perseus_solver.errors import InvalidProblem
from perseus_solver.kinds import Floats, Index
from perseus_solver.serving.model import StepModel, StepModels, WattModel, interval_of
from perseus_solver.serving.search import PARAMETERS, Search
from perseus_solver.serving.watts import fit_watts
from perseus_solver.serving.windows import SEVERAL, Columns, Window

Flags = npt.NDArray[np.bool_]

RELEVANT: Final = 0.05
"""A cell that is off by more matters: a quarter of the margin that tables leave below the limit."""
RELEVANT_PROMPTS: Final = 0.1
"""The same of a cell with prompts, where those are judged: a fifth of what boosts leave below the limit."""
LEAST_WINDOWS: Final = 30
"""Five for each linear parameter."""
LEAST_CLOCKS: Final = 3
"""A knee needs a clock above, one below and one more that says how much slower."""
LEAST_RANGE: Final = 2.0
"""The largest load over the least: of either sequences or tokens in memory. Of prompts none is asked: an engine cuts
long ones into steps of one size and shows no others, and where short ones are all alike, so are those to come. How much
less is then known of longer queues the intervals say."""
_LEAST_SCATTER: Final = 0.002
"""Means over a second are not known better."""
_OUTLIER: Final = 5.0
"""Standard deviations from its cell's median."""
_CHANCE: Final = 0.01
"""How often chance alone may say that a model does not explain, over all cells together."""
_ROUNDS: Final = 2
"""Outliers and scatter are found with the errors of a fit, and the fit is repeated without the ones, with the other."""


class Verdict(enum.Enum):
    """What a fit found."""

    EXPLAINED = "Explained"
    TOO_FEW = "TooFew"
    """Too few windows, or too much alike; `FitResult.missing` says of what."""
    NOT_EXPLAINED = "NotExplained"
    """No parameters explain this engine; `FitResult.worst` says how far off the worst cell is."""


@dataclass(frozen=True, slots=True)
class Seen:
    """The range that the steps which are judged cover; beyond it nothing was measured."""

    lowest_mhz: int
    most_running: float
    most_kv_tokens: float


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows of about the same clock and load, and by what share they took longer than the model says."""

    clock_mhz: int
    running: float
    kv_tokens: float
    rows: int
    off: float


@dataclass(frozen=True, slots=True)
class FitResult:
    """What windows say.

    Attributes:
        verdict: whether the rest may be used.
        windows: how many were taken.
        outliers: steps of a window that did not count.
        scatter: standard deviation of a window's steps without prompts within their cell, as a share.
        residual: root of the mean square by which they differ from the model, as a share.
        missing: of what there is too little; empty but for `Verdict.TOO_FEW`.
        models: of times; None: too few windows.
        watts: of energy; None: too few windows, or too few with watts.
        seen: the range that they cover; None: no step of the kind that is judged.
        worst: the cell that differs most from the model; None: none has enough rows to be judged.
        prompts: steps with prompts were judged, of an engine that makes no others.
    """

    verdict: Verdict
    windows: int
    outliers: int = 0
    scatter: float = math.nan
    residual: float = math.nan
    missing: tuple[str, ...] = ()
    models: StepModels | None = None
    watts: WattModel | None = None
    seen: Seen | None = None
    worst: Cell | None = None
    prompts: bool = False

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % interval of each parameter of `StepModel`; of a plateau that is not seen the highest clock."""
        if self.models is None:
            return {}
        highest_mhz, draws = self.models.best.highest_mhz, (self.models.best, *self.models.draws)
        intervals = {}
        for field in fields(StepModel)[1:]:
            values = [getattr(draw, field.name) for draw in draws]
            low, high = interval_of(np.array([highest_mhz if value is None else value for value in values], float))
            intervals[field.name] = float(low), float(high)
        return intervals


def fit(
    windows: Sequence[Window], highest_mhz: int, least_clocks: int = LEAST_CLOCKS, *, prompts: bool = False
) -> FitResult:
    """Fit.

    Args:
        windows: at most `MOST_WINDOWS`, in any order, of engines of one fingerprint.
        highest_mhz: the GPU's highest clock.
        least_clocks: how many clocks must have been seen; with fewer than three the models hold at these alone.
        prompts: the engines compute prompts alone, so that steps with prompts are judged.

    Returns:
        What they say. Windows that no model explains are no error, and neither are too few.

    Raises:
        InvalidProblem: too many windows, or a clock that no GPU has.
    """
    columns = Columns(windows, highest_mhz)
    if not windows:
        return FitResult(Verdict.TOO_FEW, 0, missing=(f"windows: 0 of {LEAST_WINDOWS}",), prompts=prompts)
    missing, seen = _missing(columns, least_clocks, prompts=prompts), _seen(columns, prompts=prompts)
    if missing:
        return FitResult(Verdict.TOO_FEW, len(windows), missing=missing, seen=seen, prompts=prompts)
    cells, kinds = columns.cells(), (columns.prompt_tokens > 0.0).astype(np.intp)
    search = Search(columns, np.full(len(cells), _LEAST_SCATTER**2))
    for _ in range(_ROUNDS):
        errors = search.errors()
        counted = _counted(errors, cells, kinds)
        scatter = _scatter(errors, cells, kinds, counted)
        search.again(np.where(counted, scatter[kinds] ** 2, np.inf))
    errors = search.errors()
    kind = int(prompts)
    of_kind = counted & (kinds == kind)
    judged, used, spread = _judged(columns, errors, cells, of_kind), errors[of_kind], float(scatter[kind])
    models = StepModels(search.best, search.draws(_disagreement(judged, spread)))
    off = _off_beyond_chance(judged, spread, RELEVANT_PROMPTS if prompts else RELEVANT)
    return FitResult(
        verdict=Verdict.NOT_EXPLAINED if off else Verdict.EXPLAINED,
        windows=len(windows),
        outliers=int((~counted).sum()),
        scatter=spread,
        residual=float(np.sqrt(np.mean(used**2))),
        models=models,
        watts=fit_watts(windows, search.best),
        seen=seen,
        worst=max(judged, key=lambda cell: abs(cell.off), default=None),
        prompts=prompts,
    )


@dataclass(frozen=True, slots=True)
class Agreement:
    """Windows that a fit has not seen, beside what it says of them.

    Attributes:
        rows: steps of a window, of the kind that is judged, that cells of several have; the others say nothing.
        worst: the cell that differs most; None: there is none of several rows.
        agrees: no cell is off by more than `RELEVANT`, and beyond chance.
    """

    rows: int
    worst: Cell | None
    agrees: bool


def compare(result: FitResult, windows: Sequence[Window]) -> Agreement:
    """Compare other windows with the models of a fit, by the rule by which it judges its own.

    Args:
        result: of other windows, with models.
        windows: at most `MOST_WINDOWS`, of loads and clocks that the fit has seen: beyond, it only guesses.

    Returns:
        Whether they agree, and where they differ most.

    Raises:
        InvalidProblem: the fit has no models, or there are too many windows.
    """
    if result.models is None:
        raise InvalidProblem("result must have models")
    best = result.models.best
    columns = Columns(windows, best.highest_mhz)
    if not windows:
        return Agreement(0, None, agrees=True)
    errors, cells = columns.errors(best), columns.cells()
    kinds = (columns.prompt_tokens > 0.0).astype(np.intp)
    counted = _counted(errors, cells, kinds)
    kind = int(result.prompts)
    judged = _judged(columns, errors, cells, counted & (kinds == kind))
    scatter = max(result.residual, float(_scatter(errors, cells, kinds, counted)[kind]))
    return Agreement(
        sum(cell.rows for cell in judged),
        max(judged, key=lambda cell: abs(cell.off), default=None),
        agrees=not _off_beyond_chance(judged, scatter, RELEVANT_PROMPTS if result.prompts else RELEVANT),
    )


def _missing(columns: Columns, least_clocks: int, *, prompts: bool) -> tuple[str, ...]:
    """What there is too little of, counted in steps of the kind that is judged, which tables are about."""
    judged = (columns.prompt_tokens > 0.0) == prompts
    if judged.sum() < LEAST_WINDOWS:
        kind = "prompts" if prompts else "no prompt"
        return (f"windows with steps that compute {kind}: {judged.sum()} of {LEAST_WINDOWS}",)
    missing = []
    clocks = len(np.unique(columns.in_force_mhz[judged]))
    if clocks < least_clocks:
        missing.append(f"clocks: {clocks} of {least_clocks}")
    ends = [np.quantile(load[judged], (0.05, 0.95)) for load in (columns.running, columns.kv_tokens)]
    wide = max(float(high / max(low, 1.0)) for low, high in ends)
    if wide < LEAST_RANGE and not prompts:
        missing.append(f"loads: the most is {max(wide, 1.0):.2f} times the least, of {LEAST_RANGE:g} times")
    return tuple(missing)


def _seen(columns: Columns, *, prompts: bool) -> Seen | None:
    judged = (columns.prompt_tokens > 0.0) == prompts
    if not judged.any():
        return None
    clocks_mhz, running, kv_tokens = columns.in_force_mhz[judged], columns.running[judged], columns.kv_tokens[judged]
    return Seen(int(clocks_mhz.min()), float(running.max()), float(kv_tokens.max()))


def _counted(errors: Floats, cells: Index, kinds: Index) -> Flags:
    """Return which rows are no outliers of their cell."""
    apart = np.abs(errors - _medians(errors, cells)[cells])
    several = np.bincount(cells)[cells] >= SEVERAL
    deviation = np.full(2, math.inf)
    for kind in range(2):
        if (of_kind := several & (kinds == kind)).any():
            deviation[kind] = max(1.4826 * float(np.median(apart[of_kind])), _LEAST_SCATTER)
    counted: Flags = ~several | (apart <= _OUTLIER * deviation[kinds])
    return counted


def _medians(errors: Floats, cells: Index) -> Floats:
    sizes = np.bincount(cells)
    first = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    ordered = errors[np.lexsort((errors, cells))]
    medians: Floats = 0.5 * (ordered[first + (sizes - 1) // 2] + ordered[first + sizes // 2])
    return medians


def _scatter(errors: Floats, cells: Index, kinds: Index, counted: Flags) -> Floats:
    """Return the standard deviation within cells of each kind of step; that of all where no cell has several rows."""
    scatter = np.empty(2)
    for kind in range(2):
        used = (counted & (kinds == kind)).astype(float)
        counts = np.bincount(cells, used)
        means = np.bincount(cells, used * errors) / np.maximum(counts, 1.0)
        several = counts >= SEVERAL
        freedom = float((counts - 1.0)[several].sum())
        if freedom:
            squares = float((used * several[cells] * (errors - means[cells]) ** 2).sum())
        else:
            squares, freedom = float((used * errors**2).sum()), max(1.0, float(used.sum()))
        scatter[kind] = max(math.sqrt(squares / freedom), _LEAST_SCATTER)
    return scatter


def _judged(columns: Columns, errors: Floats, cells: Index, used: Flags) -> tuple[Cell, ...]:
    counts = np.bincount(cells, used)

    def mean(values: Floats) -> Floats:
        means: Floats = np.bincount(cells, used * values) / np.maximum(counts, 1.0)
        return means

    clocks, running, kv_tokens, off = map(mean, (columns.in_force_mhz, columns.running, columns.kv_tokens, errors))
    return tuple(
        Cell(round(clocks[at]), float(running[at]), float(kv_tokens[at]), int(counts[at]), float(off[at]))
        for at in np.flatnonzero(counts >= SEVERAL)
    )


def _disagreement(judged: Sequence[Cell], scatter: float) -> float:
    """By what factor cells differ from the model more than rows of one cell differ; at least 1."""
    if not judged:
        return 1.0
    squares = sum(cell.rows * (cell.off / scatter) ** 2 for cell in judged)
    return max(1.0, math.sqrt(squares / max(len(judged) - PARAMETERS, len(judged) / 2)))


def _off_beyond_chance(judged: Sequence[Cell], scatter: float, relevant: float) -> bool:
    if not judged:
        return False
    sigmas = NormalDist().inv_cdf(1.0 - _CHANCE / 2.0 / len(judged))
    # The scatter is an estimate, too: Student's quantile, to first order.
    sigmas *= 1.0 + (sigmas**2 + 1.0) / (4.0 * max(1, sum(cell.rows - 1 for cell in judged)))
    return any(abs(cell.off) > max(relevant, sigmas * scatter / math.sqrt(cell.rows)) for cell in judged)
