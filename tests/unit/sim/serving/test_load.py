"""Load that is made up has the rate and the lengths that it says, and can be read again."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from perseus_sim.serving.load import Chat, write_trace
from perseus_sim.serving.traces import read_trace


def test_rate_and_lengths_are_those_that_it_says() -> None:
    requests = Chat(per_second=5.0, prompt_tokens=400, output_tokens=100).requests(2_000.0, seed=1)
    assert len(requests) / 2_000.0 == pytest.approx(5.0, rel=0.05)
    assert median(one.prompt_tokens for one in requests) == pytest.approx(400, rel=0.05)
    assert median(one.output_tokens for one in requests) == pytest.approx(100, rel=0.05)
    assert all(1 <= one.prompt_tokens <= 4_000 for one in requests)
    arrivals = [one.arrival_s for one in requests]
    assert arrivals == sorted(arrivals)


def test_another_seed_is_another_load_and_the_same_is_the_same() -> None:
    chat = Chat(per_second=2.0)
    assert chat.requests(60.0, seed=1) == chat.requests(60.0, seed=1)
    assert chat.requests(60.0, seed=1) != chat.requests(60.0, seed=2)


def test_a_written_trace_is_read_again(tmp_path: Path) -> None:
    requests = Chat(per_second=2.0).requests(60.0, seed=1)
    write_trace(tmp_path / "trace.csv", requests)
    read = read_trace(tmp_path / "trace.csv")
    begin_s = requests[0].arrival_s
    assert [one.arrival_s for one in read] == pytest.approx([one.arrival_s - begin_s for one in requests], abs=1e-5)
    assert [one.prompt_tokens for one in read] == [one.prompt_tokens for one in requests]
