"""Inputs as large as their schema allows are read or refused as promised, and cost a bounded memory."""

from __future__ import annotations

import pytest
from tests.sized_inputs import KINDS, read

INPUTS = 6
MOST_MIB = {"plan set": 128}
"""Of one read. A plan set comes from the operator alone, of whatever size its jobs have; others may write the rest."""


@pytest.mark.parametrize("name", KINDS)
def test_inputs_at_the_limits_of_their_schema_are_read_or_refused_within_a_bound(name: str) -> None:
    found = [read(name, seed) for seed in range(INPUTS)]
    assert max(peak_bytes for _, peak_bytes in found) <= MOST_MIB.get(name, 32) << 20
