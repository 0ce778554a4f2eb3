"""When a certificate ends, of chains as they are, and of anything else."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from perseus_runtime.certificate import end_of
from perseus_sim.cluster.pki import Authority

AUTHORITY = Authority("cluster")


@pytest.mark.parametrize("minutes", [-1, 10_000, 20_000_000])
def test_the_first_certificate_of_a_chain_counts(minutes: int) -> None:
    pair = AUTHORITY.issue("one", hosts=("a", "b"), lifetime=timedelta(minutes=minutes))
    expected = x509.load_pem_x509_certificate(pair.certificate).not_valid_after_utc
    assert end_of(b"a comment\n" + pair.certificate + AUTHORITY.certificate) == expected
    assert (end_of(pair.certificate) < datetime.now(UTC)) is (minutes < 0)


@given(st.data())
def test_what_is_no_certificate_is_one_error(data: st.DataObject) -> None:
    pem = bytearray(AUTHORITY.certificate)
    for _ in range(data.draw(st.integers(0, 4))):
        pem[data.draw(st.integers(0, len(pem) - 1))] = data.draw(st.integers(0, 255))
    del pem[data.draw(st.integers(0, len(pem))) :]
    try:
        end_of(bytes(pem))
    except ValueError:
        return
