"""A rank that trains with each schedule of torch.distributed.pipelining: first without the client, then with it.

``python torch_worker.py FOLDER SCHEDULE …`` under ``perseus_sim.training.live``. ``DualPipeV+`` is DualPipeV with a
custom function that runs an overlapped forward and backward on two threads, as training frameworks register one.
Imported by nobody; see ``conftest.Harness`` for the files it writes.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

import perseus_client.torch_pipelining as perseus

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "torch_pipelining"))
import train

COMPARED_STEPS = 3
NO_EVAL = {"ZBVZeroBubble", "DualPipeV", "DualPipeV+"}
"""torch 2.13's own eval() asserts in these (it asks for gradients that it did not compute)."""
HOOKED = {
    "_perseus_attachment",
    "step",
    "register_custom_function",
    "_maybe_compute_loss",
    "clear_runtime_states",
    "forward_one_chunk",
    "backward_one_chunk",
    "backward_weight_one_chunk",
}
RECOMPUTED = {"GPipe", "1F1B", "Interleaved1F1B"}


class Rank:
    """This process."""

    def __init__(self, folder: Path) -> None:
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.folder = folder
        self.rank = dist.get_rank()
        self.followed = 0
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(train.VOCABULARY, (8, train.LENGTH), generator=generator)

    def build(self, name: str) -> tuple[Any, list[Any]]:
        plain = name.removesuffix("+")
        schedule, modules = train.build(
            plain,
            microbatches=8 if plain == "DualPipeV" else 4,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            recompute=plain in RECOMPUTED,
        )
        if name.endswith("+"):
            schedule.register_custom_function(torch_schedules.OVERLAP_F_B, overlap)
        return schedule, modules

    def steps(self, schedule: Any, modules: list[Any], count: int) -> list[Any]:
        """Losses, then the gradients and parameters at the end."""
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.05)
        losses = []
        for _ in range(count):
            losses.append(train.train_step(schedule, modules, self.tokens))
            optimizer.step()
        parameters = [p for module in modules for p in module.parameters()]
        return [torch.tensor(losses), *(p.detach().clone() for p in parameters), *(p.grad.clone() for p in parameters)]

    def run(self, name: str) -> dict[str, Any]:
        reference = self.steps(*self.build(name), COMPARED_STEPS)
        schedule, modules = self.build(name)
        stages = getattr(schedule, "_stages", None) or [schedule._stage]
        attachment = perseus.attach(stages[0] if name == "GPipe" else schedule)
        result: dict[str, Any] = {"attached": attachment.active}
        if name == "GPipe":  # by its stage alone: the schedule is found in a first step
            train.train_step(schedule, modules, self.tokens)
        result["idempotent"] = perseus.attach(schedule) is attachment
        attachment.session.wait_connected(30)
        if self.rank == 0:
            (self.folder / f"{name}.csv").write_text(perseus.schedule_csv(schedule))
        seen = self.steps(schedule, modules, COMPARED_STEPS)
        result["bit_identical"] = all(
            torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(reference, seen, strict=True)
        )
        ready = self.folder / f"{name}.{self.rank}.ready"
        partial = ready.with_suffix(".partial")
        partial.write_text(json.dumps({"first_iteration": self.followed}))
        os.replace(partial, ready)
        self.followed += COMPARED_STEPS + self.train_until_done(name, schedule, modules)
        if name not in NO_EVAL:
            self.evaluate(schedule, stages)
        attachment.detach()
        result["left_behind"] = [name for owner in (schedule, *stages) for name in vars(owner) if name in HOOKED]
        train.train_step(schedule, modules, self.tokens)
        result["actions"] = self.actions(schedule, modules)
        return result

    def train_until_done(self, name: str, schedule: Any, modules: list[Any]) -> int:
        steps = 0
        while True:
            done = torch.tensor((self.folder / f"{name}.done").exists())
            dist.broadcast(done, 0)  # all ranks end with the same step
            if done:
                return steps
            train.train_step(schedule, modules, self.tokens)
            steps += 1

    def evaluate(self, schedule: Any, stages: list[Any]) -> None:
        arguments = (self.tokens,) if any(stage.is_first for stage in stages) else ()
        last = {"target": self.tokens} if any(stage.is_last for stage in stages) else {}
        with torch.no_grad():
            schedule.eval(*arguments, **last)

    def actions(self, schedule: Any, modules: list[Any]) -> list[str]:
        """What torch's own profiler sees the runtime execute in one step."""
        names: list[str] = []

        class Spy:
            def __init__(self, name: str) -> None:
                names.append(name.removeprefix("PP:"))

            def __enter__(self) -> None: ...

            def __exit__(self, *_: object) -> None: ...

        original = torch_schedules.record_function
        torch_schedules.record_function = Spy
        try:
            train.train_step(schedule, modules, self.tokens)
        finally:
            torch_schedules.record_function = original
        return names


def overlap(action: Any, context: Any) -> None:
    """Run a forward and a backward at the same time; receives are waited for first."""
    schedule, (ahead, back) = context.schedule_ref, action.sub_actions
    stages = {stage.stage_index: stage for stage in schedule._stages}
    forward, backward = stages[ahead.stage_index], stages[back.stage_index]
    if not forward.is_first and ahead.stage_index - 1 not in stages:
        torch_schedules._wait_batch_p2p(schedule.fwd_recv_ops.pop((ahead.stage_index, ahead.microbatch_index)))
    if not backward.is_last and back.stage_index + 1 not in stages:
        torch_schedules._wait_batch_p2p(schedule.bwd_recv_ops.pop((back.stage_index, back.microbatch_index)))

    def run_backward() -> None:
        schedule.backward_counter[back.stage_index] += 1
        backward.backward_one_chunk(
            back.microbatch_index,
            loss=schedule._maybe_get_loss(backward, back.microbatch_index),
            full_backward=back.computation_type == torch_schedules.FULL_BACKWARD,
            last_backward=schedule.backward_counter[back.stage_index] == schedule._n_microbatches,
        )
        if back.stage_index - 1 in stages:
            gradient = backward.get_local_bwd_output(back.microbatch_index)
            stages[back.stage_index - 1].set_local_bwd_input(gradient, back.microbatch_index)

    thread = threading.Thread(target=run_backward)
    thread.start()
    microbatch = ahead.microbatch_index
    output = forward.forward_one_chunk(microbatch, context.arg_mbs[microbatch], context.kwarg_mbs[microbatch])
    schedule._maybe_compute_loss(forward, output, context.target_mbs, microbatch)
    if ahead.stage_index + 1 in stages:
        stages[ahead.stage_index + 1].set_local_fwd_input(output, microbatch)
    thread.join()


if __name__ == "__main__":
    rank = Rank(Path(sys.argv[1]))
    for schedule_name in sys.argv[2:]:
        found = rank.run(schedule_name)
        (rank.folder / f"{schedule_name}.{rank.rank}.result").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
