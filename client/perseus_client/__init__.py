"""What training code imports: say which pipeline instruction begins and ends, and nothing else. Standard library only.

    session = perseus_client.connect(pipeline=0, stage=3, schedule=[("forward", 0, 0), ("backward", 0, 0)])
    with session.step():
        with session.instruction("forward", 0, 0): ...

Nothing here raises into, or blocks, the training loop: without an agent, or after any failure, every call does
nothing. Do not add anything that imports more than the standard library, or that makes a decision: those are the
agent's.
"""

from perseus_client.entry import connect
from perseus_client.session import Session

__all__ = ["Session", "connect"]
