"""The process of one rank of a simulated training job: ``python -m perseus_sim.training.trainer SPEC.json``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from perseus_sim.gpus.shared_gpu import SharedGpu
from perseus_sim.training.rank import JobLost
from perseus_sim.training.run_ahead import make_rank


def main() -> int:
    """Run one rank. Exit code 0: stopped on request; 3: another rank or the coordinator has gone."""
    try:
        spec = json.loads(Path(sys.argv[1]).read_text())
        make_rank(spec, SharedGpu(Path(spec["gpu"]))).run()
    except (JobLost, BrokenPipeError, ConnectionResetError):
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
