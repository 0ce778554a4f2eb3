"""With a real GPU: whether clocks would change when its instructions do, though its host runs ahead.

The real agent controls a real GPU that computes, in all but one respect: writes of clocks are noted, with a latency,
and not carried out (``tests.doubles.untouched_gpu``). So no clock is changed, and instructions do not run faster or
slower. The worker's own events say what ran when. Figures are printed (``-s``), for docs/clocks-take-time.md.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

import pytest
from tests.doubles.recording_node import JOB, RecordingNode, plan_set_of, pod_uid, wait_for
from tests.doubles.untouched_gpu import Change, effects, in_effect, read_changes

from perseus_core.latency import SwitchLatency
from perseus_proto.v1alpha1 import agent_pb2 as messages
from perseus_sim.gpus.kubelet import AdmittedPod

HERE = Path(__file__).resolve().parent
STEPS, LEARNT = 120, 60
"""Iterations, and those after which the agent knows the GPU's pace and latency."""
WARM_UP, MICROBATCHES = 3, 8
SCHEDULE = [
    *(("forward", m, 0) for m in range(WARM_UP)),
    *(
        (kind, k + ahead, 0)
        for k in range(MICROBATCHES - WARM_UP)
        for kind, ahead in (("forward", WARM_UP), ("backward", 0))
    ),
    *(("backward", m, 0) for m in range(MICROBATCHES - WARM_UP, MICROBATCHES)),
]
"""The first stage of four."""
HIGH_MHZ, LOW_MHZ = 1755, 1200
PLANS = {
    "each instruction": [LOW_MHZ if kind == "forward" else HIGH_MHZ for kind, _, _ in SCHEDULE],
    "three runs": [LOW_MHZ] * WARM_UP + [HIGH_MHZ] * (len(SCHEDULE) - 2 * WARM_UP) + [LOW_MHZ] * WARM_UP,
}
LATENCIES_S = {"5/14 ms": (0.0054, 0.014, 0.0045), "30/100 ms": (0.03, 0.1, 0.0045)}
"""Median, 99th percentile, call: what is published for an A100, and assumed for Hopper."""

pytestmark = pytest.mark.gpu


class Share(NamedTuple):
    """Of the time in which the GPU computed."""

    as_planned: float
    below: float
    above: float


@pytest.mark.parametrize(
    ("plan", "latency", "layers"),
    [
        ("each instruction", "5/14 ms", 12),
        ("three runs", "5/14 ms", 12),
        ("three runs", "30/100 ms", 12),
        ("each instruction", "30/100 ms", 36),
        ("three runs", "30/100 ms", 36),
    ],
)
def test_clocks_would_be_as_planned_when_the_gpu_computes(
    python: Path, real_uuid: str, tmp_path: Path, plan: str, latency: str, layers: int
) -> None:
    """Beside them: a control that sets each clock when the host marks that the instruction before has ended."""
    said = _train(python, tmp_path, real_uuid, PLANS[plan], LATENCIES_S[latency], layers)
    launched_us, spans_us = said["launched_us"], said["spans_us"]
    clocks = PLANS[plan] * STEPS
    first = LEARNT * len(SCHEDULE)
    leads_ms = sorted((span[0] - at) / 1000 for at, span in zip(launched_us[first:], spans_us[first:], strict=True))
    lengths_ms = {
        kind: median(
            (end - begin) / 1000 for (begin, end), one in zip(spans_us, SCHEDULE * STEPS, strict=True) if one[0] == kind
        )
        for kind in ("forward", "backward")
    }
    ours = effects(read_changes(tmp_path / "gpu", real_uuid))
    by_host = effects(_by_host_marks(launched_us, clocks, LATENCIES_S[latency]))
    share, of_host = (_share(changes, spans_us[first:], clocks[first:]) for changes in (ours, by_host))
    changes = sum(spans_us[first][0] < change.effect_us for change in ours)
    print(
        f"{plan}, latency {latency}: forward {lengths_ms['forward']:.1f} ms, backward {lengths_ms['backward']:.1f}, "
        f"host ahead by {median(leads_ms):.0f} ms; at the planned clock {share.as_planned:.1%} of the time, below it "
        f"{share.below:.2%}, above {share.above:.1%}, {changes} changes; by the host's marks {of_host.as_planned:.1%}, "
        f"{of_host.below:.1%}, {of_host.above:.1%}"
    )
    assert median(leads_ms) > lengths_ms["forward"], "this host is not ahead of its GPU"
    assert share.below < 0.02
    assert share.below < of_host.below / 2
    if plan == "three runs" and latency == "5/14 ms":
        assert share.as_planned > 0.9


def _train(
    python: Path, folder: Path, uuid: str, clocks_mhz: Sequence[int], latency_s: Sequence[float], layers: int
) -> dict[str, list[list[float]]]:
    """What the worker says of its time under this plan."""
    result = folder / "result.json"
    plans = plan_set_of([[clocks_mhz]], schedule=SCHEDULE)
    with RecordingNode.open(folder) as node:
        (folder / "gpu" / "latency").write_text(json.dumps(latency_s))
        node.start_agent(f"--devices=tests.doubles.untouched_gpu:open_devices:{folder / 'gpu'}")
        pod = messages.Pod(uid=pod_uid(0), namespace="training", name="pod-0")
        node.kubelet.admit(AdmittedPod(pod.uid, pod.namespace, pod.name, (uuid,)))
        arguments = [str(result), str(STEPS), json.dumps(SCHEDULE), str(layers)]
        trainer = subprocess.Popen(
            [str(python), str(HERE / "gpu_control_worker.py"), *arguments],
            env=os.environ | {"PERSEUS_SOCKET": node.socket},
            stdin=subprocess.PIPE,
        )
        try:
            node.kubelet.place([trainer.pid], pod.uid)
            with node.stub() as stub:
                held = {"job_uid": JOB, "epoch": 1}
                stub.AcquireLease(messages.AcquireLeaseRequest(**held, job_name="a/b", ttl_ms=200_000, pods=[pod]))
                stub.PushPlanSet(messages.PushPlanSetRequest(**held, plan_set=plans))
                chosen = [messages.Selection(data_parallel_rank=0, point=0)]
                stub.SelectPlan(messages.SelectPlanRequest(**held, plan_id=plans.plan_id, selections=chosen))
                assert trainer.stdin
                trainer.stdin.write(b"go\n")
                trainer.stdin.close()
                wait_for(lambda: result.exists() or trainer.poll() is not None, "the worker is done", 200)
        finally:
            trainer.kill()
            trainer.wait()
    said: dict[str, list[list[float]]] = json.loads(result.read_text())
    return said


def _by_host_marks(launched_us: Sequence[float], clocks: Sequence[int], latency_s: Sequence[float]) -> list[Change]:
    """Changes that are asked for when the host launches the first kernel of an instruction, without a queue."""
    latency = SwitchLatency.of_seconds(*latency_s, shared_lock=True, source="as above")
    draw = random.Random(1)
    found, before = [], 0
    for at_us, mhz in zip(launched_us, clocks, strict=True):
        if mhz != before:
            found.append(Change(round(at_us + 1e6 * latency.p50_s * draw.lognormvariate(0, latency.sigma)), mhz))
        before = mhz
    return found


def _share(changes: Sequence[Change], spans_us: Sequence[Sequence[float]], clocks: Sequence[int]) -> Share:
    """How the clocks in effect compare with those planned."""
    found = [0.0, 0.0, 0.0]
    effects_us = [change.effect_us for change in changes]
    for (begin_us, end_us), mhz in zip(spans_us, clocks, strict=True):
        inside = [at for at in effects_us if begin_us < at < end_us]
        for since_us, until_us in pairwise([begin_us, *inside, end_us]):
            real = in_effect(changes, since_us)
            assert real is not None
            found[0 if real == mhz else 1 if real < mhz else 2] += until_us - since_us
    return Share(*(each / sum(found) for each in found))
