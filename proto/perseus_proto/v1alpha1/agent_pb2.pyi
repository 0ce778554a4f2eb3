from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Controllability(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CONTROLLABILITY_UNSPECIFIED: _ClassVar[Controllability]
    CONTROLLABILITY_YES: _ClassVar[Controllability]
    CONTROLLABILITY_NO_PERMISSION: _ClassVar[Controllability]
    CONTROLLABILITY_NOT_SUPPORTED: _ClassVar[Controllability]
    CONTROLLABILITY_MIG: _ClassVar[Controllability]
    CONTROLLABILITY_SHARED: _ClassVar[Controllability]
    CONTROLLABILITY_LOST: _ClassVar[Controllability]
    CONTROLLABILITY_FOREIGN: _ClassVar[Controllability]

class InstructionKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INSTRUCTION_KIND_UNSPECIFIED: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_FORWARD: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_BACKWARD: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_INPUT_GRADIENT: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_WEIGHT_GRADIENT: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_CONSTANT: _ClassVar[InstructionKind]
    INSTRUCTION_KIND_STEP: _ClassVar[InstructionKind]

class MarkSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MARK_SOURCE_UNSPECIFIED: _ClassVar[MarkSource]
    MARK_SOURCE_HOST: _ClassVar[MarkSource]
    MARK_SOURCE_SYNCHRONISED: _ClassVar[MarkSource]
    MARK_SOURCE_EVENTS: _ClassVar[MarkSource]
    MARK_SOURCE_GPU: _ClassVar[MarkSource]

class ClockControl(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOCK_CONTROL_UNSPECIFIED: _ClassVar[ClockControl]
    CLOCK_CONTROL_TIMETABLE: _ClassVar[ClockControl]
    CLOCK_CONTROL_MARKS: _ClassVar[ClockControl]
    CLOCK_CONTROL_HELD: _ClassVar[ClockControl]
CONTROLLABILITY_UNSPECIFIED: Controllability
CONTROLLABILITY_YES: Controllability
CONTROLLABILITY_NO_PERMISSION: Controllability
CONTROLLABILITY_NOT_SUPPORTED: Controllability
CONTROLLABILITY_MIG: Controllability
CONTROLLABILITY_SHARED: Controllability
CONTROLLABILITY_LOST: Controllability
CONTROLLABILITY_FOREIGN: Controllability
INSTRUCTION_KIND_UNSPECIFIED: InstructionKind
INSTRUCTION_KIND_FORWARD: InstructionKind
INSTRUCTION_KIND_BACKWARD: InstructionKind
INSTRUCTION_KIND_INPUT_GRADIENT: InstructionKind
INSTRUCTION_KIND_WEIGHT_GRADIENT: InstructionKind
INSTRUCTION_KIND_CONSTANT: InstructionKind
INSTRUCTION_KIND_STEP: InstructionKind
MARK_SOURCE_UNSPECIFIED: MarkSource
MARK_SOURCE_HOST: MarkSource
MARK_SOURCE_SYNCHRONISED: MarkSource
MARK_SOURCE_EVENTS: MarkSource
MARK_SOURCE_GPU: MarkSource
CLOCK_CONTROL_UNSPECIFIED: ClockControl
CLOCK_CONTROL_TIMETABLE: ClockControl
CLOCK_CONTROL_MARKS: ClockControl
CLOCK_CONTROL_HELD: ClockControl

class DescribeNodeRequest(_message.Message):
    __slots__ = ("with_schedules",)
    WITH_SCHEDULES_FIELD_NUMBER: _ClassVar[int]
    with_schedules: bool
    def __init__(self, with_schedules: _Optional[bool] = ...) -> None: ...

class NodeDescription(_message.Message):
    __slots__ = ("node_name", "agent_version", "driver_version", "gpus", "ranks", "leases", "engines")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    AGENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    DRIVER_VERSION_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    agent_version: str
    driver_version: str
    gpus: _containers.RepeatedCompositeFieldContainer[Gpu]
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    leases: _containers.RepeatedCompositeFieldContainer[Lease]
    engines: _containers.RepeatedCompositeFieldContainer[Engine]
    def __init__(self, node_name: _Optional[str] = ..., agent_version: _Optional[str] = ..., driver_version: _Optional[str] = ..., gpus: _Optional[_Iterable[_Union[Gpu, _Mapping]]] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., leases: _Optional[_Iterable[_Union[Lease, _Mapping]]] = ..., engines: _Optional[_Iterable[_Union[Engine, _Mapping]]] = ...) -> None: ...

class Gpu(_message.Message):
    __slots__ = ("uuid", "model", "supported_clocks_mhz", "current_clock_mhz", "locked_clock_mhz", "controllability", "controllability_message", "energy_mj", "has_energy_counter", "clock_latency", "max_power_mw", "power_policy")
    UUID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SUPPORTED_CLOCKS_MHZ_FIELD_NUMBER: _ClassVar[int]
    CURRENT_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    LOCKED_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CONTROLLABILITY_FIELD_NUMBER: _ClassVar[int]
    CONTROLLABILITY_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    HAS_ENERGY_COUNTER_FIELD_NUMBER: _ClassVar[int]
    CLOCK_LATENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_POWER_MW_FIELD_NUMBER: _ClassVar[int]
    POWER_POLICY_FIELD_NUMBER: _ClassVar[int]
    uuid: str
    model: str
    supported_clocks_mhz: _containers.RepeatedScalarFieldContainer[int]
    current_clock_mhz: int
    locked_clock_mhz: int
    controllability: Controllability
    controllability_message: str
    energy_mj: int
    has_energy_counter: bool
    clock_latency: ClockLatency
    max_power_mw: int
    power_policy: PowerPolicy
    def __init__(self, uuid: _Optional[str] = ..., model: _Optional[str] = ..., supported_clocks_mhz: _Optional[_Iterable[int]] = ..., current_clock_mhz: _Optional[int] = ..., locked_clock_mhz: _Optional[int] = ..., controllability: _Optional[_Union[Controllability, str]] = ..., controllability_message: _Optional[str] = ..., energy_mj: _Optional[int] = ..., has_energy_counter: _Optional[bool] = ..., clock_latency: _Optional[_Union[ClockLatency, _Mapping]] = ..., max_power_mw: _Optional[int] = ..., power_policy: _Optional[_Union[PowerPolicy, _Mapping]] = ...) -> None: ...

class PowerPolicy(_message.Message):
    __slots__ = ("requested_profiles", "enforced_profiles", "floor_w", "secondary_floor_w")
    REQUESTED_PROFILES_FIELD_NUMBER: _ClassVar[int]
    ENFORCED_PROFILES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_W_FIELD_NUMBER: _ClassVar[int]
    SECONDARY_FLOOR_W_FIELD_NUMBER: _ClassVar[int]
    requested_profiles: _containers.RepeatedScalarFieldContainer[str]
    enforced_profiles: _containers.RepeatedScalarFieldContainer[str]
    floor_w: int
    secondary_floor_w: int
    def __init__(self, requested_profiles: _Optional[_Iterable[str]] = ..., enforced_profiles: _Optional[_Iterable[str]] = ..., floor_w: _Optional[int] = ..., secondary_floor_w: _Optional[int] = ...) -> None: ...

class ClockLatency(_message.Message):
    __slots__ = ("p50_us", "p99_us", "call_p50_us", "call_p99_us", "changes", "source", "shared_lock", "transitions")
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    CALL_P50_US_FIELD_NUMBER: _ClassVar[int]
    CALL_P99_US_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SHARED_LOCK_FIELD_NUMBER: _ClassVar[int]
    TRANSITIONS_FIELD_NUMBER: _ClassVar[int]
    p50_us: int
    p99_us: int
    call_p50_us: int
    call_p99_us: int
    changes: int
    source: str
    shared_lock: bool
    transitions: _containers.RepeatedCompositeFieldContainer[ClockTransition]
    def __init__(self, p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ..., call_p50_us: _Optional[int] = ..., call_p99_us: _Optional[int] = ..., changes: _Optional[int] = ..., source: _Optional[str] = ..., shared_lock: _Optional[bool] = ..., transitions: _Optional[_Iterable[_Union[ClockTransition, _Mapping]]] = ...) -> None: ...

class ClockTransition(_message.Message):
    __slots__ = ("from_mhz", "to_mhz", "changes", "p50_us", "p99_us")
    FROM_MHZ_FIELD_NUMBER: _ClassVar[int]
    TO_MHZ_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    from_mhz: int
    to_mhz: int
    changes: int
    p50_us: int
    p99_us: int
    def __init__(self, from_mhz: _Optional[int] = ..., to_mhz: _Optional[int] = ..., changes: _Optional[int] = ..., p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("pod_uid", "gpu_uuid", "data_parallel_rank", "stage", "tensor_parallel_rank", "iteration", "pid", "schedule")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    SCHEDULE_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    gpu_uuid: str
    data_parallel_rank: int
    stage: int
    tensor_parallel_rank: int
    iteration: int
    pid: int
    schedule: StageSchedule
    def __init__(self, pod_uid: _Optional[str] = ..., gpu_uuid: _Optional[str] = ..., data_parallel_rank: _Optional[int] = ..., stage: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., iteration: _Optional[int] = ..., pid: _Optional[int] = ..., schedule: _Optional[_Union[StageSchedule, _Mapping]] = ...) -> None: ...

class AcquireLeaseRequest(_message.Message):
    __slots__ = ("job_uid", "job_name", "epoch", "ttl_ms", "pods", "clock_mhz", "keep_clock_ms", "named_gpus", "number")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    JOB_NAME_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    PODS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    KEEP_CLOCK_MS_FIELD_NUMBER: _ClassVar[int]
    NAMED_GPUS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    job_name: str
    epoch: int
    ttl_ms: int
    pods: _containers.RepeatedCompositeFieldContainer[Pod]
    clock_mhz: int
    keep_clock_ms: int
    named_gpus: _containers.RepeatedCompositeFieldContainer[NamedGpu]
    number: int
    def __init__(self, job_uid: _Optional[str] = ..., job_name: _Optional[str] = ..., epoch: _Optional[int] = ..., ttl_ms: _Optional[int] = ..., pods: _Optional[_Iterable[_Union[Pod, _Mapping]]] = ..., clock_mhz: _Optional[int] = ..., keep_clock_ms: _Optional[int] = ..., named_gpus: _Optional[_Iterable[_Union[NamedGpu, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class NamedGpu(_message.Message):
    __slots__ = ("pool", "device", "uuid")
    POOL_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    pool: str
    device: str
    uuid: str
    def __init__(self, pool: _Optional[str] = ..., device: _Optional[str] = ..., uuid: _Optional[str] = ...) -> None: ...

class Pod(_message.Message):
    __slots__ = ("uid", "namespace", "name", "containers")
    UID_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    CONTAINERS_FIELD_NUMBER: _ClassVar[int]
    uid: str
    namespace: str
    name: str
    containers: _containers.RepeatedCompositeFieldContainer[Container]
    def __init__(self, uid: _Optional[str] = ..., namespace: _Optional[str] = ..., name: _Optional[str] = ..., containers: _Optional[_Iterable[_Union[Container, _Mapping]]] = ...) -> None: ...

class Container(_message.Message):
    __slots__ = ("name", "id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    id: str
    def __init__(self, name: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("job_uid", "epoch", "remaining_ms", "plan_id", "selections", "clock", "description", "orders_id", "engine_faults", "energies")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    SELECTIONS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    ORDERS_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FAULTS_FIELD_NUMBER: _ClassVar[int]
    ENERGIES_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    remaining_ms: int
    plan_id: str
    selections: _containers.RepeatedCompositeFieldContainer[Selection]
    clock: LeaseClock
    description: int
    orders_id: str
    engine_faults: _containers.RepeatedCompositeFieldContainer[EngineFault]
    energies: _containers.RepeatedCompositeFieldContainer[PodEnergy]
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., remaining_ms: _Optional[int] = ..., plan_id: _Optional[str] = ..., selections: _Optional[_Iterable[_Union[Selection, _Mapping]]] = ..., clock: _Optional[_Union[LeaseClock, _Mapping]] = ..., description: _Optional[int] = ..., orders_id: _Optional[str] = ..., engine_faults: _Optional[_Iterable[_Union[EngineFault, _Mapping]]] = ..., energies: _Optional[_Iterable[_Union[PodEnergy, _Mapping]]] = ...) -> None: ...

class PodEnergy(_message.Message):
    __slots__ = ("pod_uid", "energy_mj")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    energy_mj: int
    def __init__(self, pod_uid: _Optional[str] = ..., energy_mj: _Optional[int] = ...) -> None: ...

class EngineFault(_message.Message):
    __slots__ = ("pod_uid", "message")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    message: str
    def __init__(self, pod_uid: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class LeaseClock(_message.Message):
    __slots__ = ("clock_mhz", "gpus")
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    clock_mhz: int
    gpus: _containers.RepeatedCompositeFieldContainer[LeasedGpu]
    def __init__(self, clock_mhz: _Optional[int] = ..., gpus: _Optional[_Iterable[_Union[LeasedGpu, _Mapping]]] = ...) -> None: ...

class LeasedGpu(_message.Message):
    __slots__ = ("pod_uid", "uuid", "applied_clock_mhz", "message")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    UUID_FIELD_NUMBER: _ClassVar[int]
    APPLIED_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    uuid: str
    applied_clock_mhz: int
    message: str
    def __init__(self, pod_uid: _Optional[str] = ..., uuid: _Optional[str] = ..., applied_clock_mhz: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("job_uid", "epoch", "ttl_ms")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    ttl_ms: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseLeaseRequest(_message.Message):
    __slots__ = ("job_uid", "epoch")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseLeaseResponse(_message.Message):
    __slots__ = ("restored_gpu_uuids",)
    RESTORED_GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    restored_gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, restored_gpu_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class StageSchedule(_message.Message):
    __slots__ = ("stage", "kinds", "microbatches", "chunks", "joined")
    STAGE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    MICROBATCHES_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    stage: int
    kinds: _containers.RepeatedScalarFieldContainer[InstructionKind]
    microbatches: _containers.RepeatedScalarFieldContainer[int]
    chunks: _containers.RepeatedScalarFieldContainer[int]
    joined: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stage: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[InstructionKind, str]]] = ..., microbatches: _Optional[_Iterable[int]] = ..., chunks: _Optional[_Iterable[int]] = ..., joined: _Optional[_Iterable[int]] = ...) -> None: ...

class PlanPoint(_message.Message):
    __slots__ = ("iteration_time_us", "energy_mj")
    ITERATION_TIME_US_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    iteration_time_us: int
    energy_mj: int
    def __init__(self, iteration_time_us: _Optional[int] = ..., energy_mj: _Optional[int] = ...) -> None: ...

class PlanSet(_message.Message):
    __slots__ = ("plan_id", "stages", "points", "clocks_mhz", "clock_indices")
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    POINTS_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_MHZ_FIELD_NUMBER: _ClassVar[int]
    CLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    stages: _containers.RepeatedCompositeFieldContainer[StageSchedule]
    points: _containers.RepeatedCompositeFieldContainer[PlanPoint]
    clocks_mhz: _containers.RepeatedScalarFieldContainer[int]
    clock_indices: bytes
    def __init__(self, plan_id: _Optional[str] = ..., stages: _Optional[_Iterable[_Union[StageSchedule, _Mapping]]] = ..., points: _Optional[_Iterable[_Union[PlanPoint, _Mapping]]] = ..., clocks_mhz: _Optional[_Iterable[int]] = ..., clock_indices: _Optional[bytes] = ...) -> None: ...

class PushPlanSetRequest(_message.Message):
    __slots__ = ("job_uid", "epoch", "plan_set", "changes", "number")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_SET_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    plan_set: PlanSet
    changes: _containers.RepeatedCompositeFieldContainer[ClockChange]
    number: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., plan_set: _Optional[_Union[PlanSet, _Mapping]] = ..., changes: _Optional[_Iterable[_Union[ClockChange, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class ClockChange(_message.Message):
    __slots__ = ("clock_mhz", "p50_us", "p99_us")
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    P50_US_FIELD_NUMBER: _ClassVar[int]
    P99_US_FIELD_NUMBER: _ClassVar[int]
    clock_mhz: int
    p50_us: int
    p99_us: int
    def __init__(self, clock_mhz: _Optional[int] = ..., p50_us: _Optional[int] = ..., p99_us: _Optional[int] = ...) -> None: ...

class PushPlanSetResponse(_message.Message):
    __slots__ = ("plan_id",)
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    plan_id: str
    def __init__(self, plan_id: _Optional[str] = ...) -> None: ...

class Selection(_message.Message):
    __slots__ = ("data_parallel_rank", "point", "no_plan")
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    POINT_FIELD_NUMBER: _ClassVar[int]
    NO_PLAN_FIELD_NUMBER: _ClassVar[int]
    data_parallel_rank: int
    point: int
    no_plan: bool
    def __init__(self, data_parallel_rank: _Optional[int] = ..., point: _Optional[int] = ..., no_plan: _Optional[bool] = ...) -> None: ...

class SelectPlanRequest(_message.Message):
    __slots__ = ("job_uid", "epoch", "plan_id", "selections", "from_iteration", "number")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    SELECTIONS_FIELD_NUMBER: _ClassVar[int]
    FROM_ITERATION_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    plan_id: str
    selections: _containers.RepeatedCompositeFieldContainer[Selection]
    from_iteration: int
    number: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., plan_id: _Optional[str] = ..., selections: _Optional[_Iterable[_Union[Selection, _Mapping]]] = ..., from_iteration: _Optional[int] = ..., number: _Optional[int] = ...) -> None: ...

class SelectPlanResponse(_message.Message):
    __slots__ = ("furthest_iteration",)
    FURTHEST_ITERATION_FIELD_NUMBER: _ClassVar[int]
    furthest_iteration: int
    def __init__(self, furthest_iteration: _Optional[int] = ...) -> None: ...

class Engine(_message.Message):
    __slots__ = ("pod_uid", "pid", "name", "version", "model", "parallelism", "flags", "gpu_uuids")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PARALLELISM_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    GPU_UUIDS_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    pid: int
    name: str
    version: str
    model: str
    parallelism: str
    flags: _containers.RepeatedCompositeFieldContainer[EngineFlag]
    gpu_uuids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pod_uid: _Optional[str] = ..., pid: _Optional[int] = ..., name: _Optional[str] = ..., version: _Optional[str] = ..., model: _Optional[str] = ..., parallelism: _Optional[str] = ..., flags: _Optional[_Iterable[_Union[EngineFlag, _Mapping]]] = ..., gpu_uuids: _Optional[_Iterable[str]] = ...) -> None: ...

class EngineFlag(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class ClockTable(_message.Message):
    __slots__ = ("running", "kv_share_ppm", "clocks_mhz", "ladder_mhz", "boost_mhz")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_PPM_FIELD_NUMBER: _ClassVar[int]
    CLOCKS_MHZ_FIELD_NUMBER: _ClassVar[int]
    LADDER_MHZ_FIELD_NUMBER: _ClassVar[int]
    BOOST_MHZ_FIELD_NUMBER: _ClassVar[int]
    running: _containers.RepeatedScalarFieldContainer[int]
    kv_share_ppm: _containers.RepeatedScalarFieldContainer[int]
    clocks_mhz: _containers.RepeatedScalarFieldContainer[int]
    ladder_mhz: _containers.RepeatedScalarFieldContainer[int]
    boost_mhz: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, running: _Optional[_Iterable[int]] = ..., kv_share_ppm: _Optional[_Iterable[int]] = ..., clocks_mhz: _Optional[_Iterable[int]] = ..., ladder_mhz: _Optional[_Iterable[int]] = ..., boost_mhz: _Optional[_Iterable[int]] = ...) -> None: ...

class ServingLimits(_message.Message):
    __slots__ = ("first_token_us", "per_token_us", "attainment_ppm")
    FIRST_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    PER_TOKEN_US_FIELD_NUMBER: _ClassVar[int]
    ATTAINMENT_PPM_FIELD_NUMBER: _ClassVar[int]
    first_token_us: int
    per_token_us: int
    attainment_ppm: int
    def __init__(self, first_token_us: _Optional[int] = ..., per_token_us: _Optional[int] = ..., attainment_ppm: _Optional[int] = ...) -> None: ...

class EngineOrder(_message.Message):
    __slots__ = ("pod_uid", "follow_table", "clock_mhz")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_TABLE_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    follow_table: bool
    clock_mhz: int
    def __init__(self, pod_uid: _Optional[str] = ..., follow_table: _Optional[bool] = ..., clock_mhz: _Optional[int] = ...) -> None: ...

class OrderEnginesRequest(_message.Message):
    __slots__ = ("job_uid", "epoch", "table", "limits", "orders", "pages", "number")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ORDERS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    epoch: int
    table: ClockTable
    limits: ServingLimits
    orders: _containers.RepeatedCompositeFieldContainer[EngineOrder]
    pages: _containers.RepeatedCompositeFieldContainer[EnginePage]
    number: int
    def __init__(self, job_uid: _Optional[str] = ..., epoch: _Optional[int] = ..., table: _Optional[_Union[ClockTable, _Mapping]] = ..., limits: _Optional[_Union[ServingLimits, _Mapping]] = ..., orders: _Optional[_Iterable[_Union[EngineOrder, _Mapping]]] = ..., pages: _Optional[_Iterable[_Union[EnginePage, _Mapping]]] = ..., number: _Optional[int] = ...) -> None: ...

class EnginePage(_message.Message):
    __slots__ = ("pod_uid", "host", "port", "path")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    host: str
    port: int
    path: str
    def __init__(self, pod_uid: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., path: _Optional[str] = ...) -> None: ...

class OrderEnginesResponse(_message.Message):
    __slots__ = ("orders_id",)
    ORDERS_ID_FIELD_NUMBER: _ClassVar[int]
    orders_id: str
    def __init__(self, orders_id: _Optional[str] = ...) -> None: ...

class WatchTelemetryRequest(_message.Message):
    __slots__ = ("job_uid", "combine_ranks")
    JOB_UID_FIELD_NUMBER: _ClassVar[int]
    COMBINE_RANKS_FIELD_NUMBER: _ClassVar[int]
    job_uid: str
    combine_ranks: bool
    def __init__(self, job_uid: _Optional[str] = ..., combine_ranks: _Optional[bool] = ...) -> None: ...

class TelemetryBatch(_message.Message):
    __slots__ = ("dropped", "events")
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    dropped: int
    events: _containers.RepeatedCompositeFieldContainer[TelemetryEvent]
    def __init__(self, dropped: _Optional[int] = ..., events: _Optional[_Iterable[_Union[TelemetryEvent, _Mapping]]] = ...) -> None: ...

class TelemetryEvent(_message.Message):
    __slots__ = ("rank_joined", "rank_left", "iteration", "gpu", "engine_joined", "engine_left", "window")
    RANK_JOINED_FIELD_NUMBER: _ClassVar[int]
    RANK_LEFT_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    GPU_FIELD_NUMBER: _ClassVar[int]
    ENGINE_JOINED_FIELD_NUMBER: _ClassVar[int]
    ENGINE_LEFT_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    rank_joined: Rank
    rank_left: Rank
    iteration: IterationReport
    gpu: GpuEvent
    engine_joined: Engine
    engine_left: Engine
    window: EngineWindow
    def __init__(self, rank_joined: _Optional[_Union[Rank, _Mapping]] = ..., rank_left: _Optional[_Union[Rank, _Mapping]] = ..., iteration: _Optional[_Union[IterationReport, _Mapping]] = ..., gpu: _Optional[_Union[GpuEvent, _Mapping]] = ..., engine_joined: _Optional[_Union[Engine, _Mapping]] = ..., engine_left: _Optional[_Union[Engine, _Mapping]] = ..., window: _Optional[_Union[EngineWindow, _Mapping]] = ...) -> None: ...

class EngineWindow(_message.Message):
    __slots__ = ("pod_uid", "pid", "number", "time_us", "clock_mhz", "changed", "default_us", "mhz_us", "running_milli", "kv_share_ppm", "steps", "steps_us", "prompt_steps", "prompt_steps_us", "prompt_tokens", "generated_tokens", "energy_mj", "has_energy", "median_clock_mhz", "waiting", "preempted", "requests", "first_tokens", "tokens", "held", "lengths")
    POD_UID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_US_FIELD_NUMBER: _ClassVar[int]
    MHZ_US_FIELD_NUMBER: _ClassVar[int]
    RUNNING_MILLI_FIELD_NUMBER: _ClassVar[int]
    KV_SHARE_PPM_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEPS_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEPS_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    HAS_ENERGY_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    pod_uid: str
    pid: int
    number: int
    time_us: int
    clock_mhz: int
    changed: bool
    default_us: int
    mhz_us: int
    running_milli: int
    kv_share_ppm: int
    steps: int
    steps_us: int
    prompt_steps: int
    prompt_steps_us: int
    prompt_tokens: int
    generated_tokens: int
    energy_mj: int
    has_energy: bool
    median_clock_mhz: int
    waiting: int
    preempted: int
    requests: int
    first_tokens: Counted
    tokens: Counted
    held: _containers.RepeatedCompositeFieldContainer[HeldFor]
    lengths: Counted
    def __init__(self, pod_uid: _Optional[str] = ..., pid: _Optional[int] = ..., number: _Optional[int] = ..., time_us: _Optional[int] = ..., clock_mhz: _Optional[int] = ..., changed: _Optional[bool] = ..., default_us: _Optional[int] = ..., mhz_us: _Optional[int] = ..., running_milli: _Optional[int] = ..., kv_share_ppm: _Optional[int] = ..., steps: _Optional[int] = ..., steps_us: _Optional[int] = ..., prompt_steps: _Optional[int] = ..., prompt_steps_us: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., energy_mj: _Optional[int] = ..., has_energy: _Optional[bool] = ..., median_clock_mhz: _Optional[int] = ..., waiting: _Optional[int] = ..., preempted: _Optional[int] = ..., requests: _Optional[int] = ..., first_tokens: _Optional[_Union[Counted, _Mapping]] = ..., tokens: _Optional[_Union[Counted, _Mapping]] = ..., held: _Optional[_Iterable[_Union[HeldFor, _Mapping]]] = ..., lengths: _Optional[_Union[Counted, _Mapping]] = ...) -> None: ...

class Counted(_message.Message):
    __slots__ = ("places", "counts")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    places: _containers.RepeatedScalarFieldContainer[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, places: _Optional[_Iterable[int]] = ..., counts: _Optional[_Iterable[int]] = ...) -> None: ...

class HeldFor(_message.Message):
    __slots__ = ("reason", "time_us")
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIME_US_FIELD_NUMBER: _ClassVar[int]
    reason: str
    time_us: int
    def __init__(self, reason: _Optional[str] = ..., time_us: _Optional[int] = ...) -> None: ...

class IterationReport(_message.Message):
    __slots__ = ("data_parallel_rank", "stage", "tensor_parallel_rank", "gpu_uuid", "iteration", "iteration_time_us", "compute_span_us", "energy_mj", "has_energy", "plan_id", "point", "planned", "durations_us", "clock_changes", "instruction_energy_mj", "instruction_energy_iterations", "quiet_us", "quiet_energy_mj", "marks", "control", "leads_us", "below_plan_us", "above_plan_us", "median_clock_mhz", "power_limited", "own_time", "tensor_parallel_ranks", "computing_us")
    DATA_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANK_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ITERATION_FIELD_NUMBER: _ClassVar[int]
    ITERATION_TIME_US_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SPAN_US_FIELD_NUMBER: _ClassVar[int]
    ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    HAS_ENERGY_FIELD_NUMBER: _ClassVar[int]
    PLAN_ID_FIELD_NUMBER: _ClassVar[int]
    POINT_FIELD_NUMBER: _ClassVar[int]
    PLANNED_FIELD_NUMBER: _ClassVar[int]
    DURATIONS_US_FIELD_NUMBER: _ClassVar[int]
    CLOCK_CHANGES_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_ENERGY_ITERATIONS_FIELD_NUMBER: _ClassVar[int]
    QUIET_US_FIELD_NUMBER: _ClassVar[int]
    QUIET_ENERGY_MJ_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    CONTROL_FIELD_NUMBER: _ClassVar[int]
    LEADS_US_FIELD_NUMBER: _ClassVar[int]
    BELOW_PLAN_US_FIELD_NUMBER: _ClassVar[int]
    ABOVE_PLAN_US_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_CLOCK_MHZ_FIELD_NUMBER: _ClassVar[int]
    POWER_LIMITED_FIELD_NUMBER: _ClassVar[int]
    OWN_TIME_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_RANKS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_US_FIELD_NUMBER: _ClassVar[int]
    data_parallel_rank: int
    stage: int
    tensor_parallel_rank: int
    gpu_uuid: str
    iteration: int
    iteration_time_us: int
    compute_span_us: int
    energy_mj: int
    has_energy: bool
    plan_id: str
    point: int
    planned: bool
    durations_us: _containers.RepeatedScalarFieldContainer[int]
    clock_changes: int
    instruction_energy_mj: _containers.RepeatedScalarFieldContainer[int]
    instruction_energy_iterations: int
    quiet_us: int
    quiet_energy_mj: int
    marks: MarkSource
    control: ClockControl
    leads_us: _containers.RepeatedScalarFieldContainer[int]
    below_plan_us: int
    above_plan_us: int
    median_clock_mhz: int
    power_limited: bool
    own_time: bool
    tensor_parallel_ranks: _containers.RepeatedScalarFieldContainer[int]
    computing_us: int
    def __init__(self, data_parallel_rank: _Optional[int] = ..., stage: _Optional[int] = ..., tensor_parallel_rank: _Optional[int] = ..., gpu_uuid: _Optional[str] = ..., iteration: _Optional[int] = ..., iteration_time_us: _Optional[int] = ..., compute_span_us: _Optional[int] = ..., energy_mj: _Optional[int] = ..., has_energy: _Optional[bool] = ..., plan_id: _Optional[str] = ..., point: _Optional[int] = ..., planned: _Optional[bool] = ..., durations_us: _Optional[_Iterable[int]] = ..., clock_changes: _Optional[int] = ..., instruction_energy_mj: _Optional[_Iterable[int]] = ..., instruction_energy_iterations: _Optional[int] = ..., quiet_us: _Optional[int] = ..., quiet_energy_mj: _Optional[int] = ..., marks: _Optional[_Union[MarkSource, str]] = ..., control: _Optional[_Union[ClockControl, str]] = ..., leads_us: _Optional[_Iterable[int]] = ..., below_plan_us: _Optional[int] = ..., above_plan_us: _Optional[int] = ..., median_clock_mhz: _Optional[int] = ..., power_limited: _Optional[bool] = ..., own_time: _Optional[bool] = ..., tensor_parallel_ranks: _Optional[_Iterable[int]] = ..., computing_us: _Optional[int] = ...) -> None: ...

class GpuEvent(_message.Message):
    __slots__ = ("kind", "gpu_uuid", "active", "message")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[GpuEvent.Kind]
        KIND_THERMAL_SLOWDOWN: _ClassVar[GpuEvent.Kind]
        KIND_POWER_BRAKE: _ClassVar[GpuEvent.Kind]
        KIND_HARDWARE_SLOWDOWN: _ClassVar[GpuEvent.Kind]
        KIND_POWER_CAP: _ClassVar[GpuEvent.Kind]
        KIND_DRIFT: _ClassVar[GpuEvent.Kind]
        KIND_FOREIGN_WRITE: _ClassVar[GpuEvent.Kind]
        KIND_LOST: _ClassVar[GpuEvent.Kind]
        KIND_CLOCKS_RESTORED: _ClassVar[GpuEvent.Kind]
        KIND_BOARD_LIMIT: _ClassVar[GpuEvent.Kind]
        KIND_RELIABILITY: _ClassVar[GpuEvent.Kind]
    KIND_UNSPECIFIED: GpuEvent.Kind
    KIND_THERMAL_SLOWDOWN: GpuEvent.Kind
    KIND_POWER_BRAKE: GpuEvent.Kind
    KIND_HARDWARE_SLOWDOWN: GpuEvent.Kind
    KIND_POWER_CAP: GpuEvent.Kind
    KIND_DRIFT: GpuEvent.Kind
    KIND_FOREIGN_WRITE: GpuEvent.Kind
    KIND_LOST: GpuEvent.Kind
    KIND_CLOCKS_RESTORED: GpuEvent.Kind
    KIND_BOARD_LIMIT: GpuEvent.Kind
    KIND_RELIABILITY: GpuEvent.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    GPU_UUID_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    kind: GpuEvent.Kind
    gpu_uuid: str
    active: bool
    message: str
    def __init__(self, kind: _Optional[_Union[GpuEvent.Kind, str]] = ..., gpu_uuid: _Optional[str] = ..., active: _Optional[bool] = ..., message: _Optional[str] = ...) -> None: ...
