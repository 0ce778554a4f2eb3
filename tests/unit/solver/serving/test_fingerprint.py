"""What makes two replicas the same."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from perseus_solver.serving import Fingerprint, step_flags

FINGERPRINT = Fingerprint("llama-3.1-70b", "vllm", "0.32.0", "NVIDIA H100 80GB HBM3", "560.1", "tp 4", (("a", "1"),))


def test_each_part_counts() -> None:
    others = [
        replace(FINGERPRINT, **{field.name: (("a", "2"),) if field.name == "flags" else "other"})
        for field in fields(Fingerprint)
    ]
    assert len({FINGERPRINT.digest, *(other.digest for other in others)}) == len(others) + 1
    assert replace(FINGERPRINT).digest == FINGERPRINT.digest


def test_flags_that_change_a_step_count_in_any_order_and_spelling() -> None:
    one = step_flags(["serve", "model", "--max-num-seqs", "64", "--port", "8000", "--enforce-eager", "-tp", "4"])
    other = step_flags(["-tp=4", "--enforce_eager", "--max_num_seqs=64", "--api-key", "secret", "--host", "::"])
    assert one == other == (("enforce-eager", ""), ("max-num-seqs", "64"), ("tp", "4"))
    assert step_flags(["--seed", "-1", "--lora-modules", "a", "b"]) == (("lora-modules", "a b"), ("seed", "-1"))


def test_bad_parts_are_named() -> None:
    with pytest.raises(ValueError, match="engine must have 1 to 1024 characters"):
        replace(FINGERPRINT, engine="")
    with pytest.raises(ValueError, match="flags must be in order"):
        replace(FINGERPRINT, flags=(("b", ""), ("a", "")))
    with pytest.raises(ValueError, match="arguments must be at most 512"):
        step_flags(["--a"] * 513)
