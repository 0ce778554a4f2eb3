"""The CustomResourceDefinitions, written from the typed models.

Fields are declared in ``job``, ``budget``, ``status`` and ``stored``; here are conditions, columns and the frame.
"""

from __future__ import annotations

from typing import Any

import yaml

from perseus_core import keys
from perseus_operator.api.budget import BudgetFigures, BudgetSpec
from perseus_operator.api.energy_class import ClassFigures, ClassSpec
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import openapi_of
from perseus_operator.api.serving.spec import PoolSpec
from perseus_operator.api.serving.status import PoolFigures
from perseus_operator.api.status import StatusFigures
from perseus_operator.api.stored import MAX_CALIBRATION_BYTES, FrontierSpec, ProfileSpec
from perseus_operator.objects.values import Json

_CONDITION: Json = {
    "type": "object",
    "required": ["type", "status", "reason", "message", "lastTransitionTime"],
    "properties": {
        "type": {
            "type": "string",
            "description": "Type of the condition, in CamelCase.",
            "maxLength": 64,
            "pattern": "^[A-Z][A-Za-z]+$",
        },
        "status": {
            "type": "string",
            "description": "Whether the condition holds.",
            "enum": ["True", "False", "Unknown"],
        },
        "reason": {
            "type": "string",
            "description": "Why, in one CamelCase word.",
            "maxLength": 64,
            "pattern": "^[A-Z][A-Za-z]+$",
        },
        "message": {"type": "string", "description": "Why, in one line.", "maxLength": 1024},
        "observedGeneration": {
            "type": "integer",
            "format": "int64",
            "minimum": 0,
            "description": "Generation of the spec that the condition describes.",
        },
        "lastTransitionTime": {"type": "string", "format": "date-time", "description": "When the status last changed."},
    },
}


def _status(figures: Json) -> Json:
    return {
        "type": "object",
        "description": "What the operator observes and does. Only the operator writes it.",
        "properties": {
            "observedGeneration": {
                "type": "integer",
                "format": "int64",
                "minimum": 0,
                "description": "Generation of the spec that the status describes.",
            },
            "conditions": {
                "type": "array",
                "description": "One condition of each type.",
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


_AGE: Json = _column("Age", ".metadata.creationTimestamp", "date", "Time since creation.")
_SHORT_NAME: Json = {
    "rule": "size(self.metadata.name) <= 63",
    "message": "metadata.name must be at most 63 characters: it is a label value",
}


def crd() -> Json:
    """The CRD of PerseusJob as a document."""
    columns = [
        _column("Ready", _condition_path("Ready"), "string", "Whether the plan is in force."),
        _column("Reason", _condition_path("Ready", "reason"), "string", "Reason of the condition Ready."),
        _column("Mode", ".spec.mode", "string", "Enforce, Canary, Recommend or Observe."),
        _column("Objective", ".spec.objective.type", "string", "What is chosen from the frontier."),
        _column("Saved", ".status.savings.energy", "string", "Measured energy saved per iteration."),
        _column("Slowdown", ".status.savings.slowdown", "string", "Measured slowdown against the baseline."),
        _column("Straggler", _condition_path("StragglerDetected"), "string", "Whether a pipeline is a straggler."),
        _column("Points", ".status.frontier.points", "integer", "Plans on the frontier.", wide=True),
    ]
    return _definition(
        kind=keys.KIND,
        plural=keys.PLURAL,
        short=keys.SHORT_NAME,
        scope="Namespaced",
        description="A pipeline-parallel training job and the GPU clocks it should run at.",
        rules=[_SHORT_NAME],
        spec={**openapi_of(JobSpec), "description": "What the user wants."},
        status=_status(openapi_of(StatusFigures)),
        columns=columns,
    )


def budget_crd() -> Json:
    """The CRD of PowerBudget as a document."""
    columns = [
        _column("Watts", ".status.watts", "integer", "Power that all selected jobs together may draw now."),
        _column("Granted", ".status.grantedWatts", "integer", "Sum of the granted shares."),
        _column(
            "Wanted",
            ".status.wantedWatts",
            "integer",
            "Power that the jobs would draw if their own objectives decided.",
        ),
        _column("Jobs", ".status.jobs", "integer", "Jobs that share it now."),
        _column("Kept", _condition_path("Kept"), "string", "Whether the jobs' plans fit the budget."),
        _column("Reason", _condition_path("Kept", "reason"), "string", "Reason of the condition Kept.", wide=True),
    ]
    return _definition(
        kind=keys.BUDGET_KIND,
        plural=keys.BUDGET_PLURAL,
        short=keys.BUDGET_SHORT_NAME,
        scope="Cluster",
        description="A power limit that training jobs share, divided so that together they train the most.",
        rules=[],
        spec={**openapi_of(BudgetSpec), "description": "The power limit and the jobs that share it."},
        status=_status(openapi_of(BudgetFigures)),
        columns=columns,
    )


def class_crd() -> Json:
    """The CRD of EnergyClass as a document."""
    columns = [
        _column("Objective", ".spec.objective.type", "string", "What is chosen from the frontier."),
        _column("Mode", ".spec.mode", "string", "Enforce, Canary, Recommend or Observe."),
        _column("Jobs", ".status.jobs", "integer", "PerseusJobs that were made of it and exist now."),
        _column("Pools", ".status.pools", "integer", "ServingPools that were made of it and exist now."),
        _column("Accepted", _condition_path("Accepted"), "string", "Whether the manifest is valid."),
    ]
    rule = {
        "rule": f"size(self.metadata.name) <= 63 && self.metadata.name != '{keys.NO_CLASS}'",
        "message": f"metadata.name must be at most 63 characters and not {keys.NO_CLASS}: it is a label value",
    }
    return _definition(
        kind=keys.CLASS_KIND,
        plural=keys.CLASS_PLURAL,
        short=keys.CLASS_SHORT_NAME,
        scope="Cluster",
        description="Of which PerseusJobs and ServingPools are made for workloads with the label perseus.energy/class.",
        rules=[rule],
        spec={**openapi_of(ClassSpec), "description": "What the PerseusJobs and ServingPools of the class are like."},
        status=_status(openapi_of(ClassFigures)),
        columns=columns,
    )


def pool_crd() -> Json:
    """The CRD of ServingPool as a document."""
    columns = [
        _column("Ready", _condition_path("Ready"), "string", "Whether the pool is as its mode asks for."),
        _column("Reason", _condition_path("Ready", "reason"), "string", "Reason of the condition Ready.", wide=True),
        _column("Mode", ".spec.mode", "string", "Enforce, Canary, Recommend or Observe."),
        _column("Replicas", ".status.replicaCount", "integer", "Replicas whose engine says what it does."),
        _column("Kept", _condition_path("ObjectiveKept"), "string", "Whether requests keep the limits."),
        _column("First token", ".status.attainment.timeToFirstToken", "string", "Share that kept this limit."),
        _column("Tokens", ".status.attainment.timePerOutputToken", "string", "Share that kept this limit."),
        _column("Saved", ".status.savings.energy", "string", "Measured energy saved per generated token."),
    ]
    return _definition(
        kind=keys.POOL_KIND,
        plural=keys.POOL_PLURAL,
        short=keys.POOL_SHORT_NAME,
        scope="Namespaced",
        description="Replicas of a language model's engine, and the GPU clocks that follow their load.",
        rules=[_SHORT_NAME],
        spec={**openapi_of(PoolSpec), "description": "What the user wants."},
        status=_status(openapi_of(PoolFigures)),
        columns=columns,
    )


def profile_crd() -> Json:
    """The CRD of PerseusProfile as a document."""
    columns = [
        _column("Measured on", ".spec.measuredOn", "string", "Shape of the pipeline that was measured."),
        _column("GPU", ".spec.gpuModel", "string", "Model of the GPUs that were measured."),
        _column("Engine", ".spec.serving.engine", "string", "Engine that was measured."),
        _column("Model", ".spec.serving.model", "string", "Model that it served."),
        _column("Blocking", ".spec.blockingPowerMilliwatts", "integer", "Power of a waiting GPU, in milliwatts."),
    ]
    calibrations = {
        "type": "object",
        "description": "Calibrations of later jobs' models on iterations of earlier ones, by schedule.",
        "additionalProperties": {"type": "string", "maxLength": MAX_CALIBRATION_BYTES},
        "maxProperties": 16,
    }
    return _definition(
        kind=keys.PROFILE_KIND,
        plural=keys.PROFILE_PLURAL,
        short=keys.PROFILE_SHORT_NAME,
        scope="Namespaced",
        description="Time and energy of a pipeline's instructions, or of an engine's steps, measured by the operator or"
        " given by a user.",
        rules=[],
        spec={**openapi_of(ProfileSpec), "description": "The profile and what was measured with it."},
        status={
            "type": "object",
            "description": "What jobs with this profile have taught. Only the operator writes it.",
            "properties": {"calibrations": calibrations},
        },
        columns=columns,
    )


def frontier_crd() -> Json:
    """The CRD of PerseusFrontier as a document."""
    columns = [
        _column("Points", ".spec.points", "integer", "Plans on the frontier."),
        _column("Solved in", ".spec.solveMilliseconds", "integer", "Time that the solver took, in milliseconds."),
    ]
    return _definition(
        kind=keys.FRONTIER_KIND,
        plural=keys.FRONTIER_PLURAL,
        short=keys.FRONTIER_SHORT_NAME,
        scope="Namespaced",
        description="What the operator has worked out for the PerseusJob of the same name, which owns it.",
        rules=[],
        spec={**openapi_of(FrontierSpec), "description": "Only the operator writes it, and verifies it when it reads."},
        status=None,
        columns=columns,
    )


def _definition(
    *,
    kind: str,
    plural: str,
    short: str,
    scope: str,
    description: str,
    rules: list[Json],
    spec: Json,
    status: Json | None,
    columns: list[Json],
) -> Json:
    schema = {
        "type": "object",
        "description": description,
        "required": ["spec"],
        **({"x-kubernetes-validations": rules} if rules else {}),
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": spec,
            **({"status": status} if status else {}),
        },
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{keys.API_GROUP}"},
        "spec": {
            "group": keys.API_GROUP,
            "scope": scope,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": [short],
                "categories": ["perseus"],
            },
            "versions": [
                {
                    "name": keys.API_VERSION,
                    "served": True,
                    "storage": True,
                    **({"subresources": {"status": {}}} if status else {}),
                    "additionalPrinterColumns": [*columns, _AGE],
                    "schema": {"openAPIV3Schema": schema},
                }
            ],
        },
    }


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002  # shared sub-schemas are written out: kubectl users read this file
        return True


def definitions() -> dict[str, str]:
    """Every CRD as YAML, with the line that says where it comes from, by the plural of its kind."""
    return {
        keys.PLURAL: _yaml(crd(), "api/job.py"),
        keys.POOL_PLURAL: _yaml(pool_crd(), "api/serving/spec.py"),
        keys.BUDGET_PLURAL: _yaml(budget_crd(), "api/budget.py"),
        keys.CLASS_PLURAL: _yaml(class_crd(), "api/energy_class.py"),
        keys.PROFILE_PLURAL: _yaml(profile_crd(), "api/stored.py"),
        keys.FRONTIER_PLURAL: _yaml(frontier_crd(), "api/stored.py"),
    }


def _yaml(document: Json, source: str) -> str:
    body = yaml.dump(document, Dumper=_Dumper, sort_keys=False, width=140, allow_unicode=True)
    return f"# Generated from operator/perseus_operator/{source} by `make generate`; do not edit.\n{body}"
