"""What a release was made from, as a SLSA provenance predicate (https://slsa.dev/spec/v1.0/provenance)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

LOCKS: Final = ("requirements-images.lock", "requirements.lock")
"""What decides which packages are in the images, and which built the wheels."""


def predicate(source: Path, home: str, version: str, commit: str, bases: Mapping[str, str]) -> dict[str, Any]:
    """Return where the release came from and how it was built. It has no times: the same sources give the same text.

    Args:
        source: folder of the project's files.
        home: address of the project.
        version: of the release.
        commit: of git, 40 hexadecimal digits.
        bases: base images by argument of the Dockerfiles; empty: a local one.
    """
    locks = [
        {"name": name, "digest": {"sha256": hashlib.sha256((source / name).read_bytes()).hexdigest()}} for name in LOCKS
    ]
    images = [
        {"uri": f"docker://{base}", "digest": {"sha256": base.rpartition("sha256:")[2]}}
        for base in bases.values()
        if "@sha256:" in base
    ]
    parameters = {"version": version, **{name: base or "local" for name, base in bases.items()}}
    return {
        "buildDefinition": {
            "buildType": f"{home}make-release/v1",
            "externalParameters": parameters,
            "internalParameters": {},
            "resolvedDependencies": [{"uri": f"git+{home}", "digest": {"gitCommit": commit}}, *locks, *images],
        },
        "runDetails": {"builder": {"id": f"{home}make-release"}, "metadata": {}},
    }
