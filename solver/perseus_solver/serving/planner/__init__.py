"""Which replicas serve tomorrow, on how many GPUs each, at which clocks: for pools whose load is forecast.

`Replica.points` says what a replica carries within its limits at each clock, and draws (`OperatingPoint`); `Forecaster`
says which load to expect, and how far it may be wrong. `plan` finds the numbers of replicas that cost least, epoch by
epoch, with starts, minimum up times, a limit of GPUs and spare replicas, and bounds what any plan could save beyond.
With the load known in advance the same call is the optimum in hindsight.
"""

from perseus_solver.serving.planner.forecast import Forecast, Forecaster, ForecastError
from perseus_solver.serving.planner.plan import TooFewGpus, plan
from perseus_solver.serving.planner.problem import (
    Choice,
    OperatingPoint,
    PlanRequest,
    PoolLoad,
    ReplicaPlan,
    Tariff,
    Variant,
)
from perseus_solver.serving.planner.replica import FittedSteps, Limits, Replica, RequestClass, Steady, Steps

__all__ = [
    "Choice",
    "FittedSteps",
    "Forecast",
    "ForecastError",
    "Forecaster",
    "Limits",
    "OperatingPoint",
    "PlanRequest",
    "PoolLoad",
    "Replica",
    "ReplicaPlan",
    "RequestClass",
    "Steady",
    "Steps",
    "Tariff",
    "TooFewGpus",
    "Variant",
    "plan",
]
