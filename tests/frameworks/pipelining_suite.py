"""Pipelined training equals training without a pipeline: one rank that holds all stages, every schedule, on CPU.

A plain unittest file that knows nothing of the client; ``attach_everywhere.py`` runs it with the client attached.
"""

# ruff: noqa: PT009, PT027 - there is no pytest where the frameworks are installed

from __future__ import annotations

import copy
import tempfile
import unittest
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

WIDTH, MICROBATCHES = 16, 8
ORDER = "0F0,0F1,1F0,1I0,0I0,1W0,0W0,1F1,1B1,0B1,0F2,1F2,1B2,0I2,0W2,0F3,1F3,1B3,0B3\n"


class Layer(nn.Module):
    """Fails when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Any) -> Any:
        if self.fails:
            raise RuntimeError("the GPU has fallen off the bus")
        return x + self.outer(torch.relu(self.inner(x)))


class Pipelined(unittest.TestCase):
    def setUp(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.x, self.y = torch.randn(2 * MICROBATCHES, WIDTH), torch.randn(2 * MICROBATCHES, WIDTH)

    def tearDown(self) -> None:
        dist.destroy_process_group()

    def build(self, kind: Any, chunks: int, microbatches: int = MICROBATCHES) -> tuple[Any, nn.ModuleList]:
        layers = nn.ModuleList(Layer() for _ in range(chunks))
        stages = [PipelineStage(layer, k, chunks, torch.device("cpu")) for k, layer in enumerate(layers)]
        single = issubclass(kind, schedules.PipelineScheduleSingle)
        loss = nn.MSELoss(reduction="sum")
        return kind(stages[0] if single else stages, microbatches, loss_fn=loss, scale_grads=False), layers

    def check(self, schedule: Any, layers: nn.ModuleList, steps: int = 3) -> None:
        reference = copy.deepcopy(layers)
        for _ in range(steps):
            for module in (layers, reference):
                module.zero_grad()
            losses: list[Any] = []
            schedule.step(self.x, target=self.y, losses=losses)
            expected = nn.functional.mse_loss(nn.Sequential(*reference)(self.x), self.y, reduction="sum")
            expected.backward()
            torch.testing.assert_close(sum(losses), expected)
            for ours, theirs in zip(layers.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)

    def test_schedules(self) -> None:
        for name in ("GPipe", "1F1B"):
            with self.subTest(name):
                self.check(*self.build(schedules.get_schedule_class(name), 1))
        for name in ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"):
            with self.subTest(name):
                self.check(*self.build(schedules.get_schedule_class(name), 2))

    def test_order_from_a_file(self) -> None:
        schedule, layers = self.build(schedules._PipelineScheduleRuntime, 2, microbatches=4)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "order.csv"
            path.write_text(ORDER)
            schedule._load_csv(str(path), format="compute_only")
        self.check(schedule, layers)

    def test_custom_function(self) -> None:
        schedule, layers = self.build(schedules.ScheduleInterleaved1F1B, 2)
        seen = []

        def reduce(action: Any, context: Any) -> None:
            seen.append(str(action))

        schedule.register_custom_function(schedules.REDUCE_GRAD, reduce)
        self.check(schedule, layers)
        self.assertEqual(sorted(set(seen)), ["0REDUCE_GRAD", "1REDUCE_GRAD"])

    def test_failure_inside_a_step(self) -> None:
        schedule, layers = self.build(schedules.ScheduleInterleavedZeroBubble, 2)
        self.check(schedule, layers)
        layers[1].fails = True
        with self.assertRaisesRegex(RuntimeError, "failed to run forward"):
            schedule.step(self.x, target=self.y)
        layers[1].fails = False
        self.check(schedule, layers)

    def test_evaluation_between_steps(self) -> None:
        schedule, layers = self.build(schedules.ScheduleGPipe, 1)
        self.check(schedule, layers, steps=1)
        with torch.no_grad():
            output = schedule.eval(self.x, target=self.y)
        torch.testing.assert_close(output, nn.Sequential(*layers)(self.x))
        self.check(schedule, layers, steps=1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
