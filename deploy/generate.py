"""Regenerate every generated file of the repository; `make verify` fails if that changes a file.

The sources and what is generated from them:

proto/perseus_proto/v1alpha1/*.proto → *_pb2.py, *_pb2.pyi, *_pb2_grpc.py
operator/perseus_operator/api/*.py → deploy/crds/*.yaml, charts/perseus/templates/crd.yaml
charts/perseus/values.yaml → charts/perseus/values.schema.json, charts/perseus/README.md (``deploy/chart.py``)
metrics, rules, dashboards → charts/perseus/files/, docs/metrics.md (``deploy/observability.py``)
the CRDs → docs/{perseusjob,servingpool,energyclass,perseusprofile,powerbudget}.md (``deploy/reference.py``)
the parsers of perseus and kubectl perseus → docs/command-line.md (``deploy/command_reference.py``)
agent.proto, operator.proto → docs/agent-api.md, docs/operator-api.md (``deploy/wire_reference.py``)
mkdocs.yml → the lists of pages in README.md and docs/index.md (``deploy/front_door.py``)
"""

from __future__ import annotations

import sys
from pathlib import Path

from chart import write_chart
from command_reference import write_command_reference
from front_door import write_front_doors
from grpc_tools import protoc
from observability import write_observability
from reference import write_reference
from wire_reference import write_wire_reference

ROOT = Path(__file__).resolve().parent.parent
PROTO = ROOT / "proto"


def generate_stubs() -> None:
    """Compile every .proto file; imports in the generated modules follow the file's path below proto/."""
    sources = sorted(str(path.relative_to(PROTO)) for path in PROTO.rglob("*.proto"))
    well_known = Path(protoc.__file__).parent / "_proto"
    arguments = [
        "protoc",
        f"-I{PROTO}",
        f"-I{well_known}",
        f"--python_out={PROTO}",
        f"--pyi_out={PROTO}",
        f"--grpc_python_out={PROTO}",
    ]
    if protoc.main([*arguments, *sources]) != 0:
        sys.exit("deploy/generate.py: protoc failed")


def generate_crd_and_chart() -> None:
    """Write the CRDs from the operator's typed models, and the chart's files that are generated."""
    from perseus_operator.api.crd import definitions

    crds = definitions()
    folder = ROOT / "deploy" / "crds"
    folder.mkdir(exist_ok=True)
    for name, text in crds.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    write_chart(crds.values())


if __name__ == "__main__":
    generate_stubs()
    generate_crd_and_chart()
    write_observability()
    write_reference()
    write_command_reference()
    write_wire_reference()
    write_front_doors()
