"""A report as an SPDX 3.0.1 document: each row an AI package with the energy of its training or inference.

An SPDX document of the model itself may name these packages, or take their ``ai_energyConsumption``. What only a
model's publisher knows (download location, version, release time) is left to that document, so conformance to the
profile ``ai``, which wants it, is not claimed.
"""

from __future__ import annotations

import json
from typing import Final

from perseus_operator.objects.values import Json
from perseus_operator.report.figures import TOTAL, Row, rows
from perseus_operator.report.statement import FACTORS, JOB, METHOD, Statement, instant

CONTEXT: Final = "https://spdx.org/rdf/3.0.1/spdx-context.jsonld"
_CREATION: Final = "_:creation"


def write(statement: Statement, by: str, digest: str) -> str:
    """Format a statement; arguments as of ``table.write``."""
    space = f"urn:perseus.energy:{digest.replace(':', '-')}"
    measured = [row for row in rows(statement, by) if row.name != TOTAL and "energyKilowattHours" in row.measured]
    organization, tool = f"{space}:organization", f"{space}:tool"
    packages = [_package(statement, row, f"{space}:{index}", organization) for index, row in enumerate(measured)]
    elements = [
        {
            "type": "Organization",
            "spdxId": organization,
            "creationInfo": _CREATION,
            "name": statement.organization or "NOASSERTION",
        },
        {"type": "Tool", "spdxId": tool, "creationInfo": _CREATION, "name": statement.program},
        *packages,
    ]
    creation = {
        "type": "CreationInfo",
        "@id": _CREATION,
        "specVersion": "3.0.1",
        "created": instant(statement.taken_s),
        "createdBy": [organization],
        "createdUsing": [tool],
    }
    index = {
        "type": "SpdxDocument",
        "spdxId": f"{space}:document",
        "creationInfo": _CREATION,
        "name": f"Energy from {instant(statement.period.begin_s)} to {instant(statement.period.end_s)}",
        "comment": f"Computed from the statement with digest {digest}, read from {statement.origin}.",
        "profileConformance": ["core", "software"],
        "element": [element["spdxId"] for element in elements],
        "rootElement": [package["spdxId"] for package in packages] or [organization],
    }
    return json.dumps({"@context": CONTEXT, "@graph": [creation, index, *elements]}, indent=1, ensure_ascii=False)


def _package(statement: Statement, row: Row, spdx_id: str, organization: str) -> Json:
    stage = "ai_trainingEnergyConsumption" if row.kind == JOB else "ai_inferenceEnergyConsumption"
    kilowatt_hours = {
        "type": "ai_EnergyConsumptionDescription",
        "ai_energyQuantity": row.measured["energyKilowattHours"],
        "ai_energyUnit": "kilowattHour",
    }
    period = f"from {instant(statement.period.begin_s)} to {instant(statement.period.end_s)}"
    about = f"Energy was measured {period}, {statement.scope}. Boundary: {statement.boundary()}."
    figures = {
        **{f"measured.{name}": value for name, value in row.measured.items()},
        **{f"estimated.{name}": value for name, value in row.estimated.items()},
    }
    sources = [
        f"{name}: {FACTORS[name][0]}, {'by the hour' if factor.value is None else f'{factor.value:g}'}, {factor.source}"
        for name, factor in statement.factors.items()
    ]
    return {
        "type": "ai_AIPackage",
        "spdxId": spdx_id,
        "creationInfo": _CREATION,
        "name": row.name or "NOASSERTION",
        "suppliedBy": organization,
        "software_primaryPurpose": "model",
        "ai_energyConsumption": {"type": "ai_EnergyConsumption", stage: [kilowatt_hours]},
        "ai_metric": [{"type": "DictionaryEntry", "key": name, "value": repr(figures[name])} for name in figures],
        "ai_informationAboutTraining" if row.kind == JOB else "ai_informationAboutApplication": about,
        "ai_limitation": "; ".join(["Metrics that begin with estimated follow from factors", *sources, METHOD]),
    }
