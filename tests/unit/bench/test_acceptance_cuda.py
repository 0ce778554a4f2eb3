"""The workload's process: its protocol against a stand-in, and its loop against events of a GPU that is not there."""

from __future__ import annotations

import io
import mmap
import struct
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import eventually

from perseus_bench import cuda, cuda_items
from perseus_bench.cuda import CudaWorkload
from perseus_bench.workload import WorkloadFailed

STAND_IN = """
import json, mmap, struct, sys
file = open(sys.argv[1], "r+b")
progress = mmap.mmap(file.fileno(), 8)
print(json.dumps({"name": "stand-in"}), flush=True)
for line in sys.stdin:
    command, *given = line.split()
    if command == "start":
        items = 3 if given[0] == "-" else int(given[0])
        progress[:8] = struct.pack("q", items)
    elif command == "finish":
        print(json.dumps({"begin_us": 1000.0, "durations_us": [500.0, 600.0, 700.0][:items]}), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "stand_in.py"
    path.write_text(STAND_IN)
    return path


def test_items_come_back_without_gaps_in_the_host_s_time(script: Path) -> None:
    workload = CudaWorkload("GPU-0", sys.executable, script)
    for items, count in ((2, 2), (None, 3)):
        workload.start(items)
        eventually(lambda count=count: workload.completed() >= count, "the items are not done", every_s=0.001)
        done = workload.finish()
        assert len(done) == count
        assert done[0].begin_us == 1000
        for before, after in pairwise(done):
            assert after.begin_us == before.begin_us + before.duration_us
    workload.close()


def test_without_pytorch_it_says_so(tmp_path: Path) -> None:
    script = tmp_path / "no_torch.py"
    script.write_text("import a_library_that_is_not_there")
    with pytest.raises(WorkloadFailed, match="No module named 'a_library_that_is_not_there'"):
        CudaWorkload("GPU-0", sys.executable, script)
    with pytest.raises(WorkloadFailed, match="No such file"):
        CudaWorkload("GPU-0", str(tmp_path / "no-python"), script)


def test_a_process_that_dies_is_noticed(script: Path) -> None:
    workload = CudaWorkload("GPU-0", sys.executable, script)
    workload._process.kill()
    workload._process.wait()
    with pytest.raises(WorkloadFailed):
        workload.completed()
    with pytest.raises(WorkloadFailed):
        workload.finish()
    workload.close()


@pytest.mark.parametrize(
    ("answer", "rule"),
    [
        ("[" * 100_000, "no JSON"),
        ("not JSON", "no JSON"),
        ("[]", "begin_us must be a positive number"),
        ('{"begin_us": "soon", "durations_us": []}', "begin_us must be a positive number"),
        ('{"begin_us": NaN, "durations_us": []}', "begin_us must be a positive number"),
        ('{"begin_us": 1}', "durations_us must be a list of positive numbers"),
        *(
            (f'{{"begin_us": 1, "durations_us": [{one}]}}', "durations_us must be a list of positive numbers")
            for one in ("0", "-1", "NaN", "Infinity", "1e400", "true", "null", '"1"', "[]", "9" * 400)
        ),
    ],
)
def test_what_cannot_be_true_is_one_error_that_names_its_rule(tmp_path: Path, answer: str, rule: str) -> None:
    script = tmp_path / "absurd.py"
    script.write_text(f'print(\'{{"name": "absurd"}}\', flush=True); print({answer!r}, flush=True); input()')
    workload = CudaWorkload("GPU-0", sys.executable, script)
    with pytest.raises(WorkloadFailed, match=rule):
        workload.finish()
    workload.close()


def test_a_process_that_never_ends_its_answer_takes_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "MAX_ANSWER_BYTES", 1 << 20)
    script = tmp_path / "endless.py"
    script.write_text("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    with pytest.raises(WorkloadFailed, match="longer than 1048576 bytes"):
        CudaWorkload("GPU-0", sys.executable, script)


def test_a_process_that_talks_without_an_end_has_no_longer_than_one_that_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "START_S", 0.5)
    script = tmp_path / "drip.py"
    script.write_text("import sys, time\nwhile True: print('x', end='', flush=True); time.sleep(0.05)")
    with pytest.raises(WorkloadFailed, match=r"does not answer within 0\.5 s"):
        CudaWorkload("GPU-0", sys.executable, script)


class Event:
    """A moment of a GPU that takes ``Gpu.item_us`` for each item."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.at_us = gpu.launched * gpu.item_us * gpu.fast

    def synchronize(self) -> None:
        self._gpu.waited += 1

    def elapsed_time(self, later: Event) -> float:
        return (later.at_us - self.at_us) / 1000


class Gpu:
    """Its clock runs faster than the host's by the factor ``fast``."""

    item_us, fast = 500.0, 1.01

    def __init__(self) -> None:
        self.launched = self.waited = 0

    def launch(self) -> None:
        self.launched += 1

    def mark(self) -> Event:
        return Event(self)

    def anchor(self) -> tuple[Event, float]:
        return Event(self), 7000.0 + self.launched * self.item_us


@pytest.mark.parametrize("limit", [1, 2, 50])
def test_events_become_the_host_s_time_and_progress_is_published(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("finish\n"))
    gpu: Any = Gpu()
    progress = mmap.mmap(-1, 8)
    answer = cuda_items.run(gpu, limit, progress)
    assert answer == {"begin_us": 7000.0, "durations_us": [pytest.approx(Gpu.item_us)] * limit}
    assert struct.unpack("q", progress[:8]) == (limit,)
    assert gpu.waited >= limit - cuda_items.DEPTH  # the queue never held more
