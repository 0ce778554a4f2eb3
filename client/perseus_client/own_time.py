"""Where a rank has computed its own part of a step, and from where on it waits for the other ranks.

Data-parallel ranks wait at the end of the backward pass, until the gradients of all are reduced. PyTorch calls back
when a backward pass has computed its last gradient, in the order in which callbacks were queued.
DistributedDataParallel queues its wait during the pass, so what is queued when the pass begins runs before it, and a
mark there lies, in the GPU's stream, after the last kernel of the pass and before the wait.

Where ranks wait for each other inside the pass, nothing divides a step: ``waits_inside`` says so. Imports no framework.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

_INSIDE: Final = {
    "FSDPModule": "its parameters are sharded (FSDP)",
    "FullyShardedDataParallel": "its parameters are sharded (FSDP)",
    "DeepSpeedEngine": "DeepSpeed reduces gradients within the pass",
    "SyncBatchNorm": "it has SyncBatchNorm",
}
"""Classes of modules that communicate within a pass, by name: none is imported for this."""


def waits_inside(model: Any) -> str:
    """Say why ranks wait for each other within the passes of a model.

    Args:
        model: a torch module, as it is trained.

    Returns:
        A clause; empty: as far as is known, they do not.
    """
    for module in model.modules():
        for base in type(module).__mro__:
            if base.__name__ in _INSIDE:
                return _INSIDE[base.__name__]
    if any(type(parameter).__name__ == "DTensor" for parameter in model.parameters()):
        return "its parameters are distributed tensors"
    return ""


def on_backward_end(tensor: Any, call: Callable[[], None]) -> None:
    """Call back when the backward pass from a tensor has computed its last gradient. Nothing happens without a pass."""
    if getattr(tensor, "requires_grad", False):
        tensor.register_hook(lambda _: _queue(call))


def watch(model: Any, call: Callable[[], None]) -> Callable[[], None]:
    """Call back whenever a backward pass through a model has computed its last gradient; a pass from several of its
    outputs calls several times.

    Args:
        model: a torch module.
        call: what to call; on another thread than the training's where torch runs the pass there, while that waits.

    Returns:
        A function that ends this.
    """

    def forward_ended(_module: Any, _arguments: Any, output: Any) -> None:
        for tensor in _tensors(output):
            on_backward_end(tensor, call)

    remove: Callable[[], None] = model.register_forward_hook(forward_ended).remove
    return remove


def _queue(call: Callable[[], None]) -> None:
    sys.modules["torch"].autograd.Variable._execution_engine.queue_callback(call)


def _tensors(output: Any) -> Iterator[Any]:
    """The tensors of what a forward pass returns: alone, or in mappings and sequences."""
    if hasattr(output, "register_hook"):
        yield output
    elif isinstance(output, Mapping):
        for part in output.values():
            yield from _tensors(part)
    elif isinstance(output, Iterable) and not isinstance(output, str | bytes):
        for part in output:
            yield from _tensors(part)
