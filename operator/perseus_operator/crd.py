"""The CustomResourceDefinition, written from the typed model.

``crd_yaml`` is called by ``deploy/generate.py``. Fields are declared in ``api``, not here.
"""

from __future__ import annotations

from typing import Any

import yaml

from perseus_operator.api import JobSpec
from perseus_operator.api_status import StatusFigures
from perseus_operator.schema import openapi_of
from perseus_proto import keys

Json = dict[str, Any]

_CONDITION: Json = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {
            "type": "string",
            "description": "What is said, in CamelCase.",
            "maxLength": 64,
            "pattern": "^[A-Z][A-Za-z]+$",
        },
        "status": {"type": "string", "description": "Whether it is so.", "enum": ["True", "False", "Unknown"]},
        "reason": {"type": "string", "description": "Why, one word.", "maxLength": 64, "pattern": "^[A-Z][A-Za-z]+$"},
        "message": {"type": "string", "description": "Why, one line for people.", "maxLength": 1024},
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "minimum": 0,
            "description": "Generation of the spec that this was said about.",
        },
        "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
    },
}


def _status() -> Json:
    figures = openapi_of(StatusFigures)
    return {
        "type": "object",
        "description": "What the operator sees and does. Written by the operator alone.",
        "properties": {
            "observedGeneration": {
                "type": "integer",
                "format": "int64",
                "minimum": 0,
                "description": "Generation of the spec that the status describes.",
            },
            "conditions": {
                "type": "array",
                "description": "One per aspect; Ready is their summary.",
                "maxItems": 16,
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["type"],
                "items": _CONDITION,
            },
            **figures["properties"],
        },
    }


def _column(name: str, path: str, kind: str, description: str, *, wide: bool = False) -> Json:
    return {
        "name": name,
        "jsonPath": path,
        "type": kind,
        "description": description,
        **({"priority": 1} if wide else {}),
    }


def _condition_path(kind: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


def crd() -> Json:
    """The CRD as a document."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{keys.PLURAL}.{keys.API_GROUP}"},
        "spec": {
            "group": keys.API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": keys.KIND,
                "listKind": f"{keys.KIND}List",
                "plural": keys.PLURAL,
                "singular": keys.KIND.lower(),
                "shortNames": [keys.SHORT_NAME],
                "categories": ["perseus"],
            },
            "versions": [
                {
                    "name": keys.API_VERSION,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [
                        _column("Ready", _condition_path("Ready"), "string", "Whether the plan asked for is in force."),
                        _column("Reason", _condition_path("Ready", "reason"), "string", "Why it is not.", wide=True),
                        _column("Mode", ".spec.mode", "string", "Enforce or Recommend."),
                        _column("Objective", ".spec.objective.type", "string", "What is chosen from the frontier."),
                        _column("Saved", ".status.savings.energy", "string", "Measured energy saved per iteration."),
                        _column(
                            "Slowdown", ".status.savings.slowdown", "string", "Measured slowdown against the baseline."
                        ),
                        _column(
                            "Straggler", _condition_path("StragglerDetected"), "string", "Whether a pipeline is slow."
                        ),
                        _column("Points", ".status.frontier.points", "integer", "Plans on the frontier.", wide=True),
                        _column("Age", ".metadata.creationTimestamp", "date", "Time since creation."),
                    ],
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": "A pipeline-parallel training job and the GPU clocks it should run at.",
                            "required": ["spec"],
                            "x-kubernetes-validations": [
                                {
                                    "rule": "size(self.metadata.name) <= 63",
                                    "message": "metadata.name must be at most 63 characters: it is a label value",
                                }
                            ],
                            "properties": {
                                "apiVersion": {"type": "string"},
                                "kind": {"type": "string"},
                                "metadata": {"type": "object"},
                                "spec": {**openapi_of(JobSpec), "description": "What the user wants."},
                                "status": _status(),
                            },
                        }
                    },
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # shared sub-schemas are written out: kubectl users read this file
        return True


def crd_yaml() -> str:
    """The CRD as YAML, with the line that says where it comes from."""
    body = yaml.dump(crd(), Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)
    return f"# Generated from operator/perseus_operator/api.py by `make generate`; do not edit.\n{body}"
