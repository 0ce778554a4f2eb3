"""One process that trains transformer layers on a real GPU in a pipeline of one rank, with marks by the GPU itself.

``python gpu_marks_worker.py RESULT.json SCHEDULE plain|graphs|captured TIMING`` with PERSEUS_SOCKET. ``graphs``: the
layers are CUDA graphs, replayed between the marks; ``captured``: an iteration becomes one. Changes no clock.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore")
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from said import listen  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.pipelining import PipelineStage, schedules  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

import perseus_client.torch_pipelining as perseus  # noqa: E402

WIDTH, HEADS, LENGTH, BATCH, LAYERS = 2048, 16, 1024, 4, 2
MICROBATCHES, WARM_UP, STEPS, CHUNKS = 8, 3, 12, 2


class Layer(nn.Module):
    """A transformer layer without dropout, so that it may become a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.project, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Any) -> Any:
        batch, length, _ = x.shape
        parts = self.project(self.norm_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm_2(x))


def follow(attachment: Any, step: Callable[[], Any], result: Path) -> None:
    """Train as these tests do: most steps without waiting for the GPU, so that the host runs ahead."""
    step()  # Megatron's and DeepSpeed's say hello in it
    connected = attachment.session.wait_connected(30) if attachment.active else False
    time.sleep(0.2)  # the first mark of the GPU's own is seen by then
    for _ in range(WARM_UP):
        step()
    torch.cuda.synchronize()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    for _ in range(WARM_UP):  # what the GPU has done is known at the end of later steps
        step()
        torch.cuda.synchronize()
    result.write_text(json.dumps({"connected": connected}))
    attachment.detach()


def capture(attachment: Any, step: Callable[[], Any], result: Path) -> None:
    """Make one iteration a graph, and replay it; the GPU has ended each replay when the next is launched."""
    lines = listen()
    attachment.session.wait_connected(30)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(STEPS):
        graph.replay()
        torch.cuda.synchronize()
    result.write_text(json.dumps({"said": lines, "replays": STEPS}))
    attachment.detach()


def main() -> None:
    name, mode, timing = sys.argv[2:5]
    graphs = mode == "graphs"
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.set_default_dtype(torch.bfloat16)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    kind = getattr(schedules, name)
    chunks = 1 if issubclass(kind, schedules.PipelineScheduleSingle) else CHUNKS
    modules = []
    for _ in range(chunks):
        layers = [Layer().to(device) for _ in range(LAYERS)]
        if graphs:
            samples = [torch.randn(BATCH, LENGTH, WIDTH, device=device, requires_grad=k > 0) for k in range(LAYERS)]
            layers = list(torch.cuda.make_graphed_callables(tuple(layers), tuple((sample,) for sample in samples)))
        modules.append(nn.Sequential(*layers))
    stages = [PipelineStage(module, k, chunks, device) for k, module in enumerate(modules)]
    schedule = kind(stages if chunks > 1 else stages[0], 1 if graphs else MICROBATCHES, loss_fn=nn.MSELoss())
    attachment = perseus.attach(schedule, timing=timing)
    x = torch.randn((1 if graphs else MICROBATCHES) * BATCH, LENGTH, WIDTH, device=device)
    if mode == "captured":
        capture(attachment, lambda: schedule.step(x, target=x), Path(sys.argv[1]))
    else:
        follow(attachment, lambda: schedule.step(x, target=x), Path(sys.argv[1]))


if __name__ == "__main__":
    main()
