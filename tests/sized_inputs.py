"""Inputs that others may write, at every size up to the limits of their schema: what each costs its reader in memory.

Unlike small mutations of a good input, these are as large as is admissible, or say that they are, and a part of them
breaks one rule. A reader takes each or refuses it by the error that it promises; any other exception is a failure.
``python -m tests.sized_inputs SECONDS`` reads as many as it can and prints what it has tried and the largest memory.
"""

from __future__ import annotations

import json
import random
import struct
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from perseus_operator.api.budget import BudgetFigures, BudgetSpec
from perseus_operator.api.job import JobSpec
from perseus_operator.api.schema import openapi_of, parse_spec
from perseus_operator.api.status import GuardStatus, HardwareStatus
from perseus_operator.budgets.budget import decision_from_status
from perseus_operator.clients.agents.hardware import gpu_of
from perseus_operator.clients.agents.messages import event_of, is_valid, rank_of, schedule_of
from perseus_operator.errors import InvalidSpec
from perseus_operator.families.training.features.bound.guard import guard_from_status
from perseus_operator.families.training.features.hardware.hardware import hardware_from_status
from perseus_operator.families.training.features.stragglers.annotation import parse_annotation
from perseus_proto.hello import (
    HEAD_BYTES,
    MAX_INSTRUCTIONS,
    ChannelError,
    Hello,
    Instruction,
    InstructionKind,
    Timing,
    decode_hello,
    encode_hello,
)
from perseus_proto.planset import (
    MAX_ALL_INSTRUCTIONS,
    MAX_POINTS,
    MAX_STAGES,
    InvalidPlanSet,
    PlanPoint,
    StageSchedule,
    decode_plan_set,
    encode_plan_set,
)
from perseus_proto.v1alpha1 import agent_pb2 as pb

MAX_ANNOTATION_BYTES = 256 << 10
"""Of all annotations of one object, by the API server."""
MAX_REPORT_BYTES = 4 << 20


def size(random: random.Random, most: int) -> int:
    """Any size up to the most: a few, the most itself, one beyond, or any order of magnitude."""
    return random.choice([0, 1, most - 1, most, most + 1, int(most ** random.random())])


# ------------------------------------------------------------------------------------------------- the agent's socket


def hello(random: random.Random) -> bytes:
    count = min(max(1, size(random, MAX_INSTRUCTIONS)), MAX_INSTRUCTIONS)
    schedule = (Instruction(InstructionKind.FORWARD, number, 0) for number in range(count))
    body = bytearray(
        encode_hello(Hello(1, 0, 0, Timing.HOST, "G" * random.randint(0, 96), tuple(schedule)))[HEAD_BYTES:]
    )
    if random.random() < 0.5:  # a field of the head at a limit
        struct.pack_into("<I", body, random.choice([0, 4, 8, 16]), random.choice([0, 1, 65_537, 2**31, 2**32 - 1]))
    return bytes(body)


# ------------------------------------------------------------------------------------------------- agent and operator


def plan_set(random: random.Random) -> pb.PlanSet:
    stages = max(1, size(random, MAX_STAGES)) if random.random() < 0.5 else random.randint(1, 8)
    points = min(max(1, size(random, MAX_POINTS)), MAX_POINTS)
    count = min(stages, MAX_STAGES)
    width = max(1, min(MAX_INSTRUCTIONS, MAX_ALL_INSTRUCTIONS // count, (1 << 22) // (count * points)))
    if random.random() < 0.3:  # a bomb: it says that it is small
        small = encode_plan_set([StageSchedule(0, (1,), (0,), (0,))], [PlanPoint(1, 1)], [[[900]]])
        small.clock_indices = zlib.compress(bytes(1 << random.randint(10, 26)), 9)
        return small
    schedules = [StageSchedule(s, (1,) * width, tuple(range(width)), (0,) * width) for s in range(count)]
    rows = [[[900] * width] * points for _ in schedules]
    made = encode_plan_set(schedules, [PlanPoint(1 + p, 1) for p in range(points)], rows)
    if random.random() < 0.3:
        made.points.add(iteration_time_us=2**63, energy_mj=2**64 - 1)
    return made


def telemetry(random: random.Random) -> pb.TelemetryEvent:
    count = size(random, MAX_REPORT_BYTES // 8)
    extreme = random.choice([0, 1, 2**31 - 1, 2**32 - 1])
    huge = random.choice([0, 1, 2**53, 2**63, 2**64 - 1])
    report = pb.IterationReport(
        data_parallel_rank=extreme, stage=extreme, iteration=huge, iteration_time_us=huge, compute_span_us=huge,
        energy_mj=huge, has_energy=True, durations_us=[extreme] * count, leads_us=[-(2**31)] * (count // 2),
        instruction_energy_mj=[extreme] * (count // 2), below_plan_us=huge, marks=random.randint(0, 9), control=2,
    )  # fmt: skip
    return pb.TelemetryEvent(iteration=report)


def description(random: random.Random) -> pb.NodeDescription:
    count = size(random, 256)
    schedule = pb.StageSchedule(kinds=[1] * size(random, MAX_INSTRUCTIONS), microbatches=[2**32 - 1] * 9)
    transition = pb.ClockTransition(p50_us=2**32 - 1, p99_us=2**32 - 1)
    gpu = pb.Gpu(uuid="G" * size(random, 4096), model="M" * size(random, 1 << 20), max_power_mw=2**32 - 1)
    gpu.clock_latency.transitions.extend([transition] * size(random, 4096))
    ranks = [pb.Rank(pod_uid="p" * size(random, 600), iteration=2**64 - 1, schedule=schedule)] * min(count, 8)
    return pb.NodeDescription(gpus=[gpu] * min(count, 16), ranks=ranks)


def read_description(message: pb.NodeDescription) -> None:
    for gpu in message.gpus:
        gpu_of(gpu, message.driver_version)
    for rank in message.ranks:
        rank_of(rank)
        schedule_of(rank.schedule)


def read_event(message: pb.TelemetryEvent) -> None:
    event = event_of(message)
    if event is not None:
        is_valid(event)


# ------------------------------------------------------------------------------------------------- the API server


def annotation(random: random.Random) -> str:
    entry = random.choice(
        ["1:0:1.2", "GPU-" + "0" * 60 + ":9999999.999999:999.999999", ",", "1:0:1.2," + " " * 999, "é"]
    )
    text = ",".join([entry] * (size(random, MAX_ANNOTATION_BYTES) // len(entry)))
    return text[:MAX_ANNOTATION_BYTES]


def at_limits(random: random.Random, schema: dict[str, Any]) -> Any:
    """A value at the limits of its schema, of which now and then one is exceeded."""
    beyond = random.random() < 0.02
    match schema.get("type"):
        case "integer":
            return random.choice([schema.get("minimum", 0), schema.get("maximum", 2**63 - 1)]) + beyond
        case "boolean":
            return random.random() < 0.5
        case "string" if "enum" in schema:
            return random.choice(schema["enum"])
        case "string":
            most = schema.get("maxLength", 64)
            text = random.choice(["a", "1", "9" * 3 + "%", "2030-01-01T00:00:00Z", "A"])
            return (text * most)[: most + beyond] if random.random() < 0.6 else text
        case "array":
            most = schema.get("maxItems", 64)
            one = at_limits(random, schema["items"])
            return [
                one if random.random() < 0.9 else at_limits(random, schema["items"])
                for _ in range(min(size(random, most), most + 1))
            ]
        case "object" if "additionalProperties" in schema:
            most = schema.get("maxProperties", 64)
            return {f"k{i}": at_limits(random, schema["additionalProperties"]) for i in range(size(random, most))}
        case _:
            required = schema.get("required", ())
            return {
                name: at_limits(random, inner)
                for name, inner in schema.get("properties", {}).items()
                if name in required or random.random() < 0.6
            }


def job(random: random.Random) -> Any:
    """A valid spec, some of whose fields are at the limits of their schema."""
    good = {
        "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
        "profile": {"configMapRef": {"name": "p"}, "blockingPowerMilliwatts": 80_000},
    }
    schema = openapi_of(JobSpec)["properties"]
    for part in (good, *good.values()):
        known = schema if part is good else schema[next(name for name in good if good[name] is part)]["properties"]
        for name in random.sample(sorted(known), random.randint(0, 1)):
            if name not in good:
                part[name] = at_limits(random, known[name])
    return good


def resource_of(model: type[Any]) -> Callable[[random.Random], Any]:
    schema = openapi_of(model)
    return lambda random: at_limits(random, schema)


def read_guard(raw: Any) -> None:
    guard_from_status(raw, now_s=0.0, wall_s=0.0)


Kind = tuple[Callable[[random.Random], Any], Callable[[Any], object], tuple[type[Exception], ...]]
KINDS: dict[str, Kind] = {
    "hello": (hello, decode_hello, (ChannelError,)),
    "plan set": (plan_set, decode_plan_set, (InvalidPlanSet,)),
    "telemetry": (telemetry, read_event, ()),
    "node description": (description, read_description, ()),
    "annotation": (annotation, parse_annotation, (InvalidSpec,)),
    "PerseusJob": (job, partial(parse_spec, JobSpec), (InvalidSpec,)),
    "PowerBudget": (resource_of(BudgetSpec), partial(parse_spec, BudgetSpec), (InvalidSpec,)),
    "PowerBudget's status": (resource_of(BudgetFigures), decision_from_status, ()),
    "guard's status": (resource_of(GuardStatus), read_guard, ()),
    "hardware's status": (resource_of(HardwareStatus), hardware_from_status, ()),
}


def read(name: str, seed: int) -> tuple[bool, int]:
    """Make one input and read it; whether it was refused, by a promised error, and the largest memory that took."""
    make, reader, promised = KINDS[name]
    made = make(random.Random(f"{name} {seed}"))
    refused = False
    tracemalloc.start()
    try:
        reader(made)
    except promised:
        refused = True
    finally:
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return refused, peak_bytes


def drive(seconds: float, inputs: int) -> Iterator[tuple[str, bool, int]]:
    """Read inputs of all kinds in turn, until the time or their number is used up."""
    end_s, seed = time.monotonic() + seconds, 0
    while seed < inputs and time.monotonic() < end_s:
        for name in KINDS:
            yield name, *read(name, seed)
        seed += 1


def main() -> None:
    """Print, by kind, what was tried, what was refused, and the largest memory that reading one has taken."""
    tried, refused, peak_bytes = Counter[str](), Counter[str](), Counter[str]()
    for name, was_refused, taken in drive(float(sys.argv[1]), int(sys.argv[2])):
        tried[name] += 1
        refused[name] += was_refused
        peak_bytes[name] = max(peak_bytes[name], taken)
    print(json.dumps({"tried": tried, "refused": refused, "peak_bytes": peak_bytes}))


if __name__ == "__main__":
    main()
