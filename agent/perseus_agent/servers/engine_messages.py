"""Messages about serving engines: orders as they come, engines and their windows as they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from perseus_agent.clocks.telemetry import Counted, EngineSummary, ServingEngine
from perseus_agent.errors import InvalidRequest
from perseus_agent.node.leases import MAX_PODS
from perseus_core.serving import FOLLOW_TABLE, MOST_EDGES, ClockTable, EngineOrders, PageAddress, ServingLimits
from perseus_proto.frames import ChannelError
from perseus_proto.reader_link import ReadPage, is_address
from perseus_proto.v1alpha1 import agent_pb2 as messages

_MOST_MHZ: Final = 1 << 16
_PPM: Final = 1_000_000


def decode_orders(request: messages.OrderEnginesRequest) -> EngineOrders:
    """Orders, checked but for the clocks of this node's GPUs.

    Raises:
        InvalidRequest: a field breaks a rule.
    """
    clocks_mhz: dict[str, int] = {}
    if len(request.orders) > MAX_PODS:
        raise InvalidRequest(f"orders: must name at most {MAX_PODS} pods")
    for order in request.orders:
        if not order.pod_uid or order.pod_uid in clocks_mhz:
            raise InvalidRequest("orders.pod_uid: must name a pod, and none twice")
        if order.follow_table and order.clock_mhz:
            raise InvalidRequest("orders.clock_mhz: must be 0 with follow_table")
        if order.clock_mhz > _MOST_MHZ:
            raise InvalidRequest(f"orders.clock_mhz: must be at most {_MOST_MHZ}")
        clocks_mhz[order.pod_uid] = FOLLOW_TABLE if order.follow_table else order.clock_mhz
    table = _table(request.table) if request.HasField("table") else None
    with _named("limits"):
        limits = ServingLimits(
            first_token_s=request.limits.first_token_us / _PPM or None,
            per_token_s=request.limits.per_token_us / _PPM or None,
            attainment=request.limits.attainment_ppm / _PPM,
        )
    pages = _pages(request.pages)
    with _named("orders"):
        return EngineOrders(limits, table, clocks_mhz, pages)


def _pages(messages_: Sequence[messages.EnginePage]) -> dict[str, PageAddress]:
    pages: dict[str, PageAddress] = {}
    if len(messages_) > MAX_PODS:
        raise InvalidRequest(f"pages: must name at most {MAX_PODS} pods")
    for page in messages_:
        if not page.pod_uid or page.pod_uid in pages:
            raise InvalidRequest("pages.pod_uid: must name a pod, and none twice")
        if not is_address(page.host):
            raise InvalidRequest("pages.host: must be an IP address")
        try:
            ReadPage(0, page.host, page.port, page.path)
        except ChannelError as error:
            raise InvalidRequest(f"pages.{error}") from None
        pages[page.pod_uid] = PageAddress(page.host, page.port, page.path)
    return pages


def _table(message: messages.ClockTable) -> ClockTable:
    for name in ("running", "kv_share_ppm", "ladder_mhz", "boost_mhz"):
        if not 1 <= len(getattr(message, name)) <= MOST_EDGES:
            raise InvalidRequest(f"table.{name}: must have 1 to {MOST_EDGES} values")
    columns = len(message.kv_share_ppm)
    if len(message.clocks_mhz) != len(message.running) * columns:
        raise InvalidRequest("table.clocks_mhz: must have for each edge of running a clock for each edge of kv_share")
    rows = range(0, len(message.clocks_mhz), columns)
    with _named("table"):
        return ClockTable(
            running=tuple(message.running),
            kv_share=tuple(ppm / _PPM for ppm in message.kv_share_ppm),
            clocks_mhz=tuple(tuple(message.clocks_mhz[row : row + columns]) for row in rows),
            ladder_mhz=tuple(message.ladder_mhz),
            boost_mhz=tuple(message.boost_mhz),
        )


@contextmanager
def _named(part: str) -> Iterator[None]:
    """Say in which part of a request a rule is broken."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequest(f"{part}.{error}") from None


def engine_message(engine: ServingEngine) -> messages.Engine:
    """An engine, as it is reported."""
    hello = engine.hello
    return messages.Engine(
        pod_uid=engine.pod_uid,
        pid=engine.pid,
        name=hello.name,
        version=hello.version,
        model=hello.model,
        parallelism=hello.parallelism,
        flags=[messages.EngineFlag(name=name, value=value) for name, value in hello.flags],
        gpu_uuids=engine.gpu_uuids,
    )


def window_message(window: EngineSummary) -> messages.EngineWindow:
    """What an engine did, as it is reported."""
    return messages.EngineWindow(
        pod_uid=window.engine.pod_uid,
        pid=window.engine.pid,
        number=window.number,
        time_us=window.time_us,
        clock_mhz=window.clock_mhz,
        changed=window.changed,
        default_us=window.default_us,
        mhz_us=window.mhz_us,
        running_milli=window.running_milli,
        kv_share_ppm=window.kv_share_ppm,
        steps=window.steps,
        steps_us=window.steps_us,
        prompt_steps=window.prompt_steps,
        prompt_steps_us=window.prompt_steps_us,
        prompt_tokens=window.prompt_tokens,
        generated_tokens=window.generated_tokens,
        energy_mj=window.energy_mj or 0,
        has_energy=window.energy_mj is not None,
        median_clock_mhz=window.median_clock_mhz,
        waiting=window.waiting,
        preempted=window.preempted,
        requests=window.requests,
        first_tokens=_counted(window.first_tokens),
        tokens=_counted(window.tokens),
        lengths=_counted(window.lengths),
        held=[messages.HeldFor(reason=why, time_us=held_us) for why, held_us in window.held_us.items() if held_us],
    )


def _counted(counted: Counted) -> messages.Counted:
    places: Sequence[int] = [place for place, _ in counted]
    return messages.Counted(places=places, counts=[count for _, count in counted])
