"""Which replicas serve tomorrow, on how many GPUs each, at which clocks: for pools whose load is forecast.

`ReplicaModel.points` says what a replica carries within its limits at each clock, and draws (`OperatingPoint`);
`Forecaster` says which load to expect, and how far it may be wrong. `plan` finds the numbers of replicas that cost
least, epoch by epoch, with starts, minimum up times, a limit of GPUs and spare replicas, and bounds what any plan could
save beyond. With the load known in advance the same call is the optimum in hindsight. `best_split` says whether pools
by length would need less than one.
"""

from perseus_solver.serving.planner.forecast import Forecast, Forecaster, ForecastError
from perseus_solver.serving.planner.plan import TooFewGpus, plan
from perseus_solver.serving.planner.problem import (
    MOST_REPLICAS,
    OperatingPoint,
    PlanRequest,
    PoolChoice,
    PoolLoad,
    ReplicaPlan,
    Tariff,
    Variant,
)
from perseus_solver.serving.planner.replica import EngineSteps, FittedSteps, ReplicaModel, Steady
from perseus_solver.serving.planner.requests import LatencyLimits, RequestClass
from perseus_solver.serving.planner.split import SeenClass, best_split, cells_of, classes_of

__all__ = [
    "MOST_REPLICAS",
    "EngineSteps",
    "FittedSteps",
    "Forecast",
    "ForecastError",
    "Forecaster",
    "LatencyLimits",
    "OperatingPoint",
    "PlanRequest",
    "PoolChoice",
    "PoolLoad",
    "ReplicaModel",
    "ReplicaPlan",
    "RequestClass",
    "SeenClass",
    "Steady",
    "Tariff",
    "TooFewGpus",
    "Variant",
    "best_split",
    "cells_of",
    "classes_of",
    "plan",
]
