"""The solver's inner loops in C: network simplex, sweeps and rehearsals, loaded with ctypes.

``deploy/build_compiled.py`` compiles them when the project is installed. The arrays belong to Python; the C code keeps
nothing between two calls. It runs without Python's global lock.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

LIBRARY = Path(__file__).with_name("library.so")
_AT, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double
_PLANS = (_AT, _COUNT, _AT, _AT)
_OFFERED = (*_PLANS, _AT, _AT, _COUNT, _AT)
_FUNCTIONS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "simplex_start": ((_AT,), None),
    "simplex_follow": ((_AT, ctypes.c_int32, _COUNT), None),
    "simplex_solve": ((_AT, ctypes.c_int32), _COUNT),
    "sweeps_measure": ((*_PLANS, _AT, _AT, _AT), ctypes.c_int),
    "sweeps_improve": (_PLANS, ctypes.c_int),
    "sweeps_mix": ((*_OFFERED, _AT, _AT, _NUMBER), ctypes.c_int),
    "sweeps_descend": ((*_OFFERED, _AT, _COUNT, _COUNT, ctypes.c_uint64), ctypes.c_int),
    "control_requests": ((_AT, _COUNT, _AT, _AT, _AT, _AT, _AT), _COUNT),
    "control_changes": ((_AT, _COUNT, _COUNT, _NUMBER, _NUMBER, _COUNT, _AT, _AT), _COUNT),
    "control_timetable": ((_AT, _COUNT, ctypes.c_int32, _COUNT, _AT, _AT, _AT, _AT), _COUNT),
    "control_start": ((_AT, _COUNT, _COUNT, _AT, _AT, _AT), _COUNT),
    "control_asked": ((_AT, _COUNT, _AT), _COUNT),
    "execution_times": ((_AT, _COUNT, _AT, _AT, _AT), None),
    "execution_iterate": (
        (_AT, _COUNT, _COUNT, _AT, _NUMBER, ctypes.c_int32, _AT, _AT, _AT, _AT),
        ctypes.c_int,
    ),
}
"""Types of the arguments and of the result."""


@cache
def library() -> ctypes.CDLL:
    """Load the compiled functions.

    Raises:
        ImportError: the package was installed without them.
    """
    try:
        loaded = ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"perseus_solver was installed without its compiled part ({error}). Wheels for Linux contain it; "
            "installing from source takes a C compiler"
        ) from None
    for name, (arguments, result) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.argtypes, function.restype = arguments, result
    return loaded


def at(array: npt.NDArray[Any], dtype: npt.DTypeLike = np.float64) -> int:
    """Return where an array begins, which must hold numbers of the type that the C code reads, without gaps."""
    assert array.dtype == dtype
    assert array.flags.c_contiguous
    return array.ctypes.data
