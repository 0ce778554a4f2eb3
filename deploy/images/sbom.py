"""Prints a CycloneDX bill of the Python packages of the environment it runs in; called while an image is built.

The base image's own packages are not in it: a builder that can attest (``docker buildx --sbom``) adds them.
"""

# ruff: noqa: T201  # its output is its product

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
        said = package.metadata
        if licence := said.get("License-Expression"):
            component["licenses"] = [{"expression": licence}]  # type: ignore[assignment]
        components.append(component)
    root = {"type": "container", "name": image, "version": metadata.version("perseus-k8s")}
    bill = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": root}}
    print(json.dumps({**bill, "components": components}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1])
