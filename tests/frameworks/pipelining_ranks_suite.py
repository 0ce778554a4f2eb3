"""Two ranks that train over gloo what frameworks build by hand: traced models, keyword arguments, stages spread
unevenly, orders of their own. Each rank checks its gradients against training without a pipeline.

``pipelining_ranks_suite.py DIGESTS.json`` with RANK, WORLD_SIZE and MASTER_PORT. Knows nothing of the client;
``attach_everywhere.py`` runs it with the client attached, and the test compares the digests.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules  # noqa: E402

WIDTH, MICROBATCHES, STEPS = 16, 4, 3
CPU = torch.device("cpu")
ORDERS = {
    "down and back up": "0F0,3F0,3B0,0F1,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n",
    "unevenly spread": "0F0,1F0,4F0,4B0,0F1,1F1,4F1,4B1,1B0,0B0,1B1,0B1\n2F0,3F0,3B0,2F1,3F1,2B0,3B1,2B1\n",
    "backwards late": "0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n",
    # In columns that happen together: the older runtime exchanges at the end of each.
    "split backwards": "0F0,,2F0,,,2I0,2W0,0I0,0W0,0F1,,2F1,,,2I1,2W1,0I1,0W1\n"
    ",1F0,,3F0,3I0,3W0,1I0,1W0,,,1F1,,3F1,3I1,3W1,1I1,1W1,\n",
}


class Layer(nn.Module):
    """One stage; takes something beside its input where it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, bias: Any = None) -> Any:
        y = x + self.outer(torch.relu(self.inner(x)))
        return y if bias is None else y + bias


class Chain(nn.Module):
    """All stages in turn, the first with the keyword argument."""

    def __init__(self, stages: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(stages))

    def forward(self, x: Any, bias: Any = None) -> Any:
        for number, layer in enumerate(self.layers):
            x = layer(x, bias) if number == 0 else layer(x)
        return x


class Undeclared(schedules.PipelineScheduleMulti):  # type: ignore[misc]
    """Runs an order on the older runtime, which does not declare it."""

    def __init__(self, stages: list[Any], order: str, **options: Any) -> None:
        super().__init__(stages, **options)
        rows = [[schedules._Action.from_str(cell) for cell in row.split(",")] for row in order.splitlines()]
        self._validate_and_set_stage_mapping(dict(enumerate(rows)))
        self.pipeline_order = dict(enumerate(rows))


class Suite:
    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.rank = dist.get_rank()
        self.digests: dict[str, str] = {}
        self.loss = nn.MSELoss(reduction="sum")

    def data(self, stages: int, microbatches: int) -> tuple[Chain, Any, Any, Any]:
        torch.manual_seed(stages)
        x, bias, y = (torch.randn(2 * microbatches, WIDTH) for _ in range(3))
        return Chain(stages), x, bias, y

    def check(self, name: str, schedule: Any, model: Chain, mine: dict[str, Any], x: Any, y: Any, **extra: Any) -> None:
        """Train, and compare this rank's gradients and, where the last stage is, output and losses."""
        reference = copy.deepcopy(model)
        held = getattr(schedule, "_stages", None) or [schedule._stage]
        for _ in range(STEPS):
            for module in (*mine.values(), reference):
                module.zero_grad()
            losses: list[Any] = []
            first, last = any(stage.is_first for stage in held), any(stage.is_last for stage in held)
            given: dict[str, Any] = {"target": y, "losses": losses} if last else {}
            output = schedule.step(*([x] if first else []), **(extra if first else {}), **given)
            expected = reference(x, **extra)
            self.loss(expected, y).backward()
            if last:
                torch.testing.assert_close(sum(losses), self.loss(expected, y))
                torch.testing.assert_close(output, expected)
        found = [p.grad for module in mine.values() for p in module.parameters()]
        wanted = [p.grad for key in mine for p in reference.get_submodule(key).parameters()]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        self.digests[name] = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in found)).hexdigest()

    def traced(self, kind: Any, *, with_bias: bool) -> None:
        """Stages cut by torch's tracer out of a whole model."""
        model, x, bias, y = self.data(2, MICROBATCHES)
        extra = {"bias": bias} if with_bias else {}
        one = {key: value[:2] for key, value in extra.items()}
        pipe = pipeline(model, (x[:2],), one, split_spec={"layers.1": SplitPoint.BEGINNING})
        stage = pipe.build_stage(self.rank, CPU)
        mine = {f"layers.{self.rank}": pipe.get_stage_module(self.rank).get_submodule(f"layers.{self.rank}")}
        schedule = kind(stage, MICROBATCHES, loss_fn=self.loss, scale_grads=False)
        self.check(f"traced {kind.__name__} {with_bias}", schedule, model, mine, x, y, **extra)

    def forward_only(self) -> None:
        """Inference: nothing to follow."""
        model, x, _, _ = self.data(2, MICROBATCHES)
        stage = PipelineStage(model.layers[self.rank], self.rank, 2, CPU)
        schedule = schedules._ScheduleForwardOnly(stage, MICROBATCHES)
        for _ in range(STEPS):
            output = schedule.step(*([x] if self.rank == 0 else []))
        if self.rank == 1:
            torch.testing.assert_close(output, model(x))

    def by_hand(self, name: str, order: str, *, declared: bool) -> None:
        """An order of our own; once through torch's file of all actions, communication included."""
        rows = [[cell for cell in row.split(",") if cell] for row in order.splitlines()]
        held = sorted({int(cell[0]) for cell in rows[self.rank]})
        count = 1 + max(int(cell[0]) for row in rows for cell in row)
        model, x, _, y = self.data(count, 2)
        stages = [PipelineStage(model.layers[index], index, count, CPU) for index in held]
        options: dict[str, Any] = {"n_microbatches": 2, "loss_fn": self.loss, "scale_grads": False}
        if declared:
            lowered = schedules._PipelineScheduleRuntime(stages, **options)
            schedule = schedules._PipelineScheduleRuntime(stages, **options)
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "order.csv").write_text(order)
                lowered._load_csv(f"{folder}/order.csv", format="compute_only")
                lowered._dump_csv(f"{folder}/lowered.csv", format="compute_comms")
                schedule._load_csv(f"{folder}/lowered.csv", format="compute_comms")
        else:
            schedule = Undeclared(stages, order, **options)
        mine = {f"layers.{index}": model.layers[index] for index in held}
        self.check(f"{name} {declared}", schedule, model, mine, x, y)

    def run(self) -> None:
        for kind in (schedules.ScheduleGPipe, schedules.Schedule1F1B):
            for with_bias in (False, True):
                self.traced(kind, with_bias=with_bias)
        self.forward_only()
        for name, order in ORDERS.items():
            self.by_hand(name, order, declared=True)
        self.by_hand("split backwards", ORDERS["split backwards"], declared=False)
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    suite = Suite()
    suite.run()
    Path(sys.argv[1]).write_text(json.dumps(suite.digests))
