"""Names that people and programs meet in the cluster: API group, labels, annotations, environment, ports.

One closed list, so that a typo is an import error. Nothing but strings lives here.
"""

from __future__ import annotations

from typing import Final

API_GROUP: Final = "perseus.energy"
API_VERSION: Final = "v1alpha1"
KIND: Final = "PerseusJob"
PLURAL: Final = "perseusjobs"
SHORT_NAME: Final = "pj"
BUDGET_KIND: Final = "PowerBudget"
BUDGET_PLURAL: Final = "powerbudgets"
BUDGET_SHORT_NAME: Final = "pb"
PROFILE_KIND: Final = "PerseusProfile"
PROFILE_PLURAL: Final = "perseusprofiles"
PROFILE_SHORT_NAME: Final = "pp"
FRONTIER_KIND: Final = "PerseusFrontier"
FRONTIER_PLURAL: Final = "perseusfrontiers"
FRONTIER_SHORT_NAME: Final = "pf"
CLASS_KIND: Final = "EnergyClass"
CLASS_PLURAL: Final = "energyclasses"
CLASS_SHORT_NAME: Final = "ec"
POOL_KIND: Final = "ServingPool"
POOL_PLURAL: Final = "servingpools"
POOL_SHORT_NAME: Final = "sp"
PLURALS: Final = (PLURAL, PROFILE_PLURAL, FRONTIER_PLURAL, BUDGET_PLURAL, CLASS_PLURAL, POOL_PLURAL)
"""Of all kinds that have a CustomResourceDefinition."""

# Labels and annotations.
LABEL_JOB: Final = "perseus.energy/job"
"""On pods: the name of the PerseusJob or ServingPool, in the same namespace, that may drive their GPUs (the opt-in)."""
LABEL_CLASS: Final = "perseus.energy/class"
"""On a namespace or a pod: the EnergyClass of which the operator makes PerseusJobs and ServingPools; a pod's counts
first."""
NO_CLASS: Final = "none"
"""Value of that label with which a pod has no class, though its namespace has one."""
LABEL_MODEL: Final = "perseus.energy/model"
"""On a PerseusJob or ServingPool: the model that it trains or serves, by which reports of energy add up."""
LABEL_SERVING: Final = "perseus.energy/serving"
"""On a pod of a server: ``true`` where the webhook saw that its EnergyClass makes ServingPools. On a PerseusProfile:
``true`` where the operator has stored it of an engine that serves."""
LABEL_COMPONENT: Final = "app.kubernetes.io/component"
COMPONENT_AGENT: Final = "perseus-agent"
LABEL_RELEASE_GPUS: Final = "perseus.energy/release-gpus"
"""On a node: ``true`` sends its agent away, with all clocks returned and the driver closed, until it is removed."""
ANNOTATION_STRAGGLER: Final = "perseus.energy/straggler"
"""On a PerseusJob: ``<id>:<delay seconds>:<degree>``, the paper's set_straggler; degree 1 means back to normal."""
ANNOTATION_PLANNED_SLOWDOWN: Final = "perseus.energy/planned-slowdown"
"""On a PerseusJob: the ratio by which the operator slows it on purpose, for other straggler detectors to read."""
ANNOTATION_CONTAINERS: Final = "perseus.energy/containers"
"""On training pods: the containers, separated by commas, to which the webhook gives the agent's socket; absent: all."""
ANNOTATION_TRACE: Final = "perseus.energy/traceparent"
"""On a PerseusJob: the W3C trace context of the user who edited it, to which the operator's spans then belong."""
ANNOTATION_PROFILE: Final = "perseus.energy/profile"
"""On training pods of an EnergyClass: the PerseusProfile that their PerseusJob names; absent: it measures its own."""
ANNOTATION_POWER_LIMIT: Final = "dynamo.nvidia.com/gpu-power-limit"
"""On pods of NVIDIA Dynamo: the watts to which its power agent limits each of their GPUs. Read, never written."""
ANNOTATION_GROUP_SIZE: Final = "leaderworkerset.sigs.k8s.io/size"
"""On pods of a LeaderWorkerSet: how many are one group. Read, never written."""
ANNOTATION_ADDRESS: Final = "perseus.energy/address"
"""Of a replica's Lease: host:port at which other replicas reach it."""
ANNOTATION_NAMESPACES: Final = "perseus.energy/namespaces"
"""Of a replica's Lease: the namespaces that it serves, separated by commas; absent: all."""
RESOURCE_AGENT: Final = "perseus.energy/agent"
"""Extended resource of nodes with an agent: a container that requests 1 gets the agent's socket, without a hostPath."""
DRA_DRIVER: Final = "gpu.nvidia.com"
"""NVIDIA's driver of dynamic resources, by which pods hold GPUs that they claim."""
FINALIZER: Final = "perseus.energy/release-clocks"

# Environment of a training process.
ENV_SOCKET: Final = "PERSEUS_SOCKET"
"""Path of the node agent's Unix socket inside the pod; absent means: no agent, every client call is a no-op."""

AGENT_GRPC_PORT_NAME: Final = "grpc"
DEFAULT_SOCKET_PATH: Final = "/run/perseus/agent.sock"
DEFAULT_GRPC_PORT: Final = 50071
DEFAULT_AGENT_METRICS_PORT: Final = 9471
DEFAULT_OPERATOR_METRICS_PORT: Final = 9472
DEFAULT_WEB_PORT: Final = 9473
DEFAULT_SOLVER_PORT: Final = 9477
DEFAULT_SOLVER_METRICS_PORT: Final = 9478

PROFILE_KEY: Final = "profile.csv"
"""Default key of the profile inside its ConfigMap."""
SCHEDULE_KEY: Final = "schedule.csv"
"""Default key of a schedule inside its ConfigMap."""
