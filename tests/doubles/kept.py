"""How much an object keeps, as a number of values: what tests hold to a bound where what is kept must not grow."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Mapping
from enum import Enum
from typing import Any

_SCALARS = (int, float, type(None), bool, Enum, type)


def kept(root: object) -> int:
    """Count the values that can be reached from an object: elements of containers, fields, characters, numbers.

    Each object counts once, however many refer to it.
    """
    found, seen, left = 0, set[int](), [root]
    while left:
        one = left.pop()
        found += 1
        if isinstance(one, _SCALARS) or id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, str | bytes | array):
            found += len(one)
        elif isinstance(one, Mapping):
            left += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset | deque):
            left += one
        else:
            left += _fields(one)
    return found


def _fields(one: object) -> list[Any]:
    slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*getattr(one, "__dict__", {}).values(), *(getattr(one, name) for name in slots if hasattr(one, name))]
