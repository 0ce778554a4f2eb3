"""Calibration: what lies between computations, learnt from measured iterations, so that predicted iteration times
come true.

The model. Instruction i of iteration k took d_ki. Between stages a and b a message takes δ_ab; between two
consecutive instructions of stage s passes a gap γ_s; every iteration takes an overhead o in addition (optimizer step,
gradient synchronisation):

    T_k(θ) = max over paths p of the schedule's graph ( Σ_{i∈p} d_ki + Σ_ab c_p,ab·δ_ab + Σ_s c_p,s·γ_s ) + o

with c_p the number of times path p crosses each delay and θ = (δ, γ, o) ≥ 0. The estimate minimises, y_k being the
measured time and ȳ its median,

    (1/n) Σ_k |T_k(θ) − y_k| / y_k  +  (λ/ȳ) ( Σ_ab |δ_ab − δ̄| + Σ_s |γ_s − γ̄| + ε (E·δ̄ + N·γ̄) )

δ̄ and γ̄ are common values that are free. Absolute errors make it robust; λ lets a delay differ from its siblings
only where the data insist; ε settles what only a sum determines in favour of the overhead. ``fit`` minimises,
``confidence`` says how sure that is, ``estimate`` judges on plans not used, ``noise`` measures scatter, ``model`` is
the result and its JSON, ``trace`` the door for files and ``recorder`` that for telemetry. Plans are not made here.
"""

from perseus_solver.calibration.estimate import calibrate, predict_s
from perseus_solver.calibration.model import Calibration
from perseus_solver.calibration.recorder import Recorder
from perseus_solver.calibration.trace import Trace, read_trace

__all__ = ["Calibration", "Recorder", "Trace", "calibrate", "predict_s", "read_trace"]
