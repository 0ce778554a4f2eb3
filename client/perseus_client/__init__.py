"""The client for training code: it marks where each pipeline instruction begins and ends, and decides nothing.

The agent on the node reads the marks and sets the GPU's clock. Nothing here raises into the training loop or blocks it:
without an agent, or after any failure, every call does nothing. So this example runs anywhere:

>>> import perseus_client
>>> schedule = [("forward", 0, 0), ("forward", 1, 0), ("backward", 0, 0), ("backward", 1, 0)]
>>> session = perseus_client.connect(dp=0, stage=3, schedule=schedule)
>>> for iteration in range(2):
...     with session.step():
...         for kind, microbatch, chunk in schedule:
...             with session.instruction(kind, microbatch, chunk):
...                 pass  # compute it
>>> session.close()

Training frameworks need one line instead: ``attach`` of ``perseus_client.torch_pipelining``,
``perseus_client.megatron`` or ``perseus_client.deepspeed``. Jobs without pipeline stages mark whole iterations:
``steps`` around any loop, ``attach`` of ``perseus_client.hugging_face`` or ``perseus_client.lightning``; or the phases
of each, such as a rollout and a training: ``Phases``. This package imports nothing but the standard library: training
images pin the rest.

What the training thread calls stores a mark and nothing else; a background thread does all that may wait:

    training thread ──► session ──► marks ──store──► memory that the agent reads too
    background thread: connector ──hello: rank and schedule──► agent, which answers with that memory

``gpu_events`` and ``gpu_marks`` add when instructions really ran on the GPU, ``own_time`` where a rank waits for
others. Begin with ``session``, then ``marks``.
"""

from perseus_client.entry import connect
from perseus_client.loops import steps
from perseus_client.phases import Phases
from perseus_client.session import Session

__all__ = ["Phases", "Session", "connect", "steps"]
