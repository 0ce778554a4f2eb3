"""Print a CycloneDX bill of the Python packages in this environment: ``python sbom.py perseus-agent``.

It does not list the base image's own packages: a builder that attests images (``docker buildx --sbom``) adds them.
"""

# ruff: noqa: T201  # a command-line program

from __future__ import annotations

import json
import sys
from importlib import metadata


def main(image: str) -> None:
    components = []
    for package in sorted(metadata.distributions(), key=lambda found: found.name.lower()):
        name = package.name.lower().replace("_", "-")
        component = {"type": "library", "name": name, "version": package.version}
        component["purl"] = component["bom-ref"] = f"pkg:pypi/{name}@{package.version}"
        if licence := package.metadata.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]  # type: ignore[assignment]
        components.append(component)
    root = {"type": "container", "name": image, "version": metadata.version("perseus-k8s")}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": root}}
    print(json.dumps({**bill, "components": components}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1])
