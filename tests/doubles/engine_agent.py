"""A light agent whose node runs engines: it takes orders for them, names what it holds, and sends windows of a machine.

What an engine does comes from the simulator's machine at the clock that the orders say, as fast as a test asks for it:
a window of a second takes no time.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from typing import Any

from tests.doubles.engine_pool import ENGINE, MACHINE, kv_share, window_of
from tests.doubles.fleet import Fleet
from tests.doubles.light_agent import LightAgent

from perseus_core.serving import ClockTable
from perseus_core.units import ppm_from_ratio, ratio_from_ppm
from perseus_operator.nodes.engines import EngineWindow
from perseus_proto.v1alpha1 import agent_pb2 as pb


class EngineAgent(LightAgent):
    """One node's agent. The pods of a lease each run an engine once they are started."""

    def __init__(self, node: str, fleet: Fleet) -> None:
        super().__init__(node, fleet)
        self.orders: dict[str, Any] = {}
        """By the UID of the job."""
        self.engines: dict[str, Any] = {}
        """By the UID of the pod."""
        self.resting: dict[str, int] = {}
        """The clock that a lease asks for, by the UID of the job: the GPUs of its pods are at it at once."""
        self.draws_w = 0.0
        """What all GPUs of each pod draw by their counters; 0: they have none."""
        self.tried: set[int] = set()
        """Clocks that orders have named."""

    async def crash(self) -> None:
        self.orders.clear()
        self.resting.clear()
        await super().crash()

    def start(self, pod_uid: str) -> None:
        """A pod's engine connects."""
        engine = pb.Engine(
            pod_uid=pod_uid,
            pid=1,
            name=ENGINE.name,
            version=ENGINE.version,
            model=ENGINE.model,
            parallelism=ENGINE.parallelism,
            flags=[pb.EngineFlag(name=name, value=value) for name, value in ENGINE.flags],
            gpu_uuids=[f"GPU-{self.node}-{number}" for number in range(MACHINE.parallel)],
        )
        self.engines[pod_uid] = engine
        self._put(pb.TelemetryEvent(engine_joined=engine))

    def stop_engine(self, pod_uid: str) -> None:
        """It has gone."""
        self._put(pb.TelemetryEvent(engine_left=self.engines.pop(pod_uid)))

    def clock_of(self, job_uid: str, pod_uid: str, running: int) -> int:
        """At what an engine runs now, by the orders; 0: the default clocks."""
        held: Any = self.orders.get(job_uid) or pb.OrderEnginesRequest()
        order: Any = next((each for each in held.orders if each.pod_uid == pod_uid), pb.EngineOrder())
        if not order.follow_table:
            return int(order.clock_mhz)
        return _table_of(held.table).clock_mhz(running, kv_share(MACHINE, running))

    def window(self, job_uid: str, number: int) -> None:
        """Every engine reports a window, of another load each time."""
        running = 4 << (number % 5)
        for pod_uid in self.engines:
            held = self.clock_of(job_uid, pod_uid, running)
            seen = window_of(MACHINE, pod_uid, running, held, prompt=number % 3 == 0)
            self._put(pb.TelemetryEvent(window=_message_of(seen)))

    def _put(self, event: Any) -> None:
        for readers in self._readers.values():
            for reader in readers:
                reader.put([event])

    async def AcquireLease(self, request: Any, context: Any) -> Any:
        self.resting[request.job_uid] = request.clock_mhz
        return await super().AcquireLease(request, context)

    async def OrderEngines(self, request: Any, context: Any) -> Any:
        def act() -> Any:
            self.leases.held(request.job_uid, request.epoch)
            self.orders[request.job_uid] = request
            self.tried |= {order.clock_mhz for order in request.orders if not order.follow_table}
            return pb.OrderEnginesResponse(orders_id=self._orders_id(request.job_uid))

        return await self._answer(context, act)

    def _orders_id(self, job_uid: str) -> str:
        held = self.orders.get(job_uid)
        return hashlib.sha256(held.SerializeToString()).hexdigest() if held else ""

    def _describe(self) -> Any:
        described = super()._describe()
        described.driver_version = "570"
        described.engines.extend(self.engines.values())
        for uuid in {uuid for engine in self.engines.values() for uuid in engine.gpu_uuids}:
            clocks = list(MACHINE.clocks_mhz)
            gpu = pb.Gpu(uuid=uuid, model="H100", supported_clocks_mhz=clocks, controllability="CONTROLLABILITY_YES")
            described.gpus.append(gpu)
        return described

    def _lease(self, lease: Any) -> Any:
        answered = super()._lease(lease)
        answered.orders_id = self._orders_id(lease.job_uid)
        if self.draws_w:
            used_mj = round(1000 * self.draws_w * time.monotonic())
            answered.energies.extend(pb.PodEnergy(pod_uid=uid, energy_mj=used_mj) for uid in lease.pods)
        if mhz := self.resting.get(lease.job_uid):
            held = [pb.LeasedGpu(pod_uid=uid, uuid=f"GPU-{uid}", applied_clock_mhz=mhz) for uid in lease.pods]
            answered.clock.CopyFrom(pb.LeaseClock(clock_mhz=mhz, gpus=held))
        return answered


def _table_of(message: Any) -> ClockTable:
    columns = len(message.kv_share_ppm)
    clocks = list(message.clocks_mhz)
    rows = tuple(tuple(clocks[at : at + columns]) for at in range(0, len(clocks), columns))
    shares = tuple(map(ratio_from_ppm, message.kv_share_ppm))
    return ClockTable(tuple(message.running), shares, rows, tuple(message.ladder_mhz), tuple(message.boost_mhz))


def _message_of(seen: EngineWindow) -> Any:
    return pb.EngineWindow(
        pod_uid=seen.pod_uid,
        pid=seen.pid,
        time_us=seen.time_us,
        clock_mhz=seen.clock_mhz,
        default_us=seen.default_us,
        mhz_us=seen.mhz_us,
        running_milli=round(1000 * seen.running),
        kv_share_ppm=ppm_from_ratio(seen.kv_share),
        steps=seen.steps,
        steps_us=seen.steps_us,
        prompt_steps=seen.prompt_steps,
        prompt_steps_us=seen.prompt_steps_us,
        prompt_tokens=seen.prompt_tokens,
        generated_tokens=seen.generated_tokens,
        energy_mj=seen.energy_mj or 0,
        has_energy=seen.energy_mj is not None,
        requests=seen.requests,
        first_tokens=_counted(seen.first_tokens),
        tokens=_counted(seen.tokens),
        lengths=_counted(seen.lengths),
        held=[pb.HeldFor(reason=reason, time_us=held_us) for reason, held_us in seen.held_us.items()],
    )


def _counted(counted: Mapping[int, int]) -> Any:
    return pb.Counted(places=sorted(counted), counts=[counted[place] for place in sorted(counted)])
