"""The simulated job of a pod: which GPUs are its ranks', what is refused, and what it says of itself."""

from __future__ import annotations

import queue
from pathlib import Path

import pytest

from perseus_proto import keys
from perseus_sim.gpu import ENV_GPUS
from perseus_sim.job import PipelineIteration
from perseus_sim.pod_job import main, ranks_of, report

GIVEN = {ENV_GPUS: "/gpus", "NVIDIA_VISIBLE_DEVICES": "GPU-d,GPU-b,GPU-a,GPU-c", keys.ENV_SOCKET: "/run/agent.sock"}


def test_every_gpu_is_one_rank() -> None:
    ranks = ranks_of(GIVEN, pipelines=2, stages=2)
    assert [(rank.pipeline, rank.stage) for rank in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rank.gpu for rank in ranks] == [Path(f"/gpus/GPU-{letter}.gpu") for letter in "abcd"]
    assert {rank.socket for rank in ranks} == {"/run/agent.sock"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, ENV_GPUS),
        ({ENV_GPUS: "/gpus"}, "2 × 2 are needed, the pod has 0"),
        (GIVEN | {"NVIDIA_VISIBLE_DEVICES": "GPU-a"}, "the pod has 1"),
    ],
)
def test_other_gpus_than_the_job_needs_are_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ranks_of(environment, pipelines=2, stages=2)


def test_a_pod_without_gpus_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(ENV_GPUS, raising=False)
    code = main(["--profile", "x.csv", "--stages", "2", "--microbatches", "4", "--blocking-power", "80"])
    assert code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert ENV_GPUS in line


def test_what_it_says_is_the_mean_of_what_has_ended() -> None:
    samples: queue.SimpleQueue[PipelineIteration] = queue.SimpleQueue()
    assert report(samples) == ""
    samples.put(PipelineIteration(0, 7, 0, 900_000, 1_000_000, 2_000_000))
    samples.put(PipelineIteration(1, 8, 0, 900_000, 2_000_000, 4_000_000))
    assert report(samples) == "iteration 8: 1.500 s, 3000 J for each pipeline"
    assert samples.empty()
