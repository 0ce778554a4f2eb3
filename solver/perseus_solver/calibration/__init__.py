"""Calibration: delays between instructions, estimated from measured iterations, so that predicted times come true.

The model. Instruction i of iteration k took d_ki. A message from stage a to stage b takes δ_ab; a gap γ_s lies between
two consecutive instructions of stage s; every iteration takes an overhead o in addition (optimizer step, gradient
synchronisation):

    T_k(θ) = max over paths p of the schedule's graph ( Σ_{i∈p} d_ki + Σ_ab c_p,ab·δ_ab + Σ_s c_p,s·γ_s ) + o

c_p is the number of times that path p crosses each delay, and θ = (δ, γ, o) ≥ 0. With y_k the measured time of
iteration k and ȳ the median of all, the estimate minimises

    (1/n) Σ_k |T_k(θ) − y_k| / y_k  +  (λ/ȳ) ( Σ_ab |δ_ab − δ̄| + Σ_s |γ_s − γ̄| + ε (E·δ̄ + N·γ̄) )

where δ̄ and γ̄ are free common values. Absolute errors make the estimate robust. λ lets a delay differ from the others
of its kind only where the data require it. ε assigns to the overhead what only a sum determines.

Modules: ``fit`` minimises, ``confidence`` gives intervals, ``estimate`` measures the error on plans that were not
fitted, ``rivals`` compares it with that of other schedules, ``noise`` measures scatter, ``model`` is the result and its
JSON, ``trace`` reads files and ``recorder`` collects telemetry.
"""

from perseus_solver.calibration.estimate import calibrate, predict_s
from perseus_solver.calibration.model import Calibration
from perseus_solver.calibration.recorder import Recorder
from perseus_solver.calibration.rivals import calibrate_against_rivals
from perseus_solver.calibration.trace import Trace, read_trace

__all__ = ["Calibration", "Recorder", "Trace", "calibrate", "calibrate_against_rivals", "predict_s", "read_trace"]
