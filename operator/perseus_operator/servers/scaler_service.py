"""KEDA's external scaler: how many replicas a pool needs at their highest clock.

A HorizontalPodAutoscaler with the target AverageValue 1 asks for as many replicas as the metric says, however many
there are. Where nothing is advised the call fails, and KEDA keeps the replicas, or goes to its fallback: no answer ever
stands for 0. KEDA says of which namespace a ScaledObject is; its pool must be there, too, so a tenant learns nothing of
pools of others. Only KEDA's certificate may ask.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from typing import Any, Final

from perseus_operator.api.schema import DNS_NAME
from perseus_operator.errors import InvalidSpec, NotAllowed
from perseus_operator.servers.grpc_service import answering
from perseus_operator.servers.rpc_server import authorise
from perseus_proto.externalscaler import externalscaler_pb2 as messages
from perseus_proto.externalscaler import externalscaler_pb2_grpc as stubs

METRIC: Final = "perseus-advised-replicas"
MOST_CALLS: Final = 1_024
"""At a time: KEDA holds a stream for each ScaledObject of the type external-push, and tenants make those."""
_LONGEST_NAME: Final = 253
_AGAIN_S: Final = 5.0
"""How often a stream looks whether there is still an advice."""

Advised = Callable[[str, str], int]
"""Replicas that are advised for a pool, by its namespace and name. Raises UnknownJob, NoAdvice."""


class ScalerService(stubs.ExternalScalerServicer):
    """``externalscaler.ExternalScaler``. A pool of which anything is known is active."""

    def __init__(self, advised: Advised, allowed_sans: frozenset[str]) -> None:
        """Answer callers of these names."""
        self._advised = advised
        self._allowed_sans = allowed_sans

    async def IsActive(self, request: messages.ScaledObjectRef, context: Any) -> messages.IsActiveResponse:  # noqa: N802
        """Say that the pool is active."""
        async with answering(context):
            return messages.IsActiveResponse(result=self._replicas(request, context) > 0)
        raise AssertionError("the call was aborted")

    async def StreamIsActive(  # noqa: N802
        self, request: messages.ScaledObjectRef, context: Any
    ) -> AsyncIterator[messages.IsActiveResponse]:
        """Say that the pool is active, and fail as soon as nothing is advised any more."""
        async with answering(context):
            self._replicas(request, context)
            yield messages.IsActiveResponse(result=True)
            while True:
                await asyncio.sleep(_AGAIN_S)
                self._replicas(request, context)

    async def GetMetricSpec(  # noqa: N802
        self, request: messages.ScaledObjectRef, context: Any
    ) -> messages.GetMetricSpecResponse:
        """Name the metric; whether the pool exists does not matter yet."""
        async with answering(context):
            authorise(context, self._allowed_sans)
            _pool_of(request)
            return messages.GetMetricSpecResponse(
                metricSpecs=[messages.MetricSpec(metricName=METRIC, targetSizeFloat=1.0)]
            )
        raise AssertionError("the call was aborted")

    async def GetMetrics(  # noqa: N802
        self, request: messages.GetMetricsRequest, context: Any
    ) -> messages.GetMetricsResponse:
        """Say how many replicas are advised."""
        async with answering(context):
            replicas = self._replicas(request.scaledObjectRef, context)
            if request.metricName != METRIC:
                raise InvalidSpec(f"metricName: must be {METRIC}")
            value = messages.MetricValue(metricName=METRIC, metricValueFloat=float(replicas))
            return messages.GetMetricsResponse(metricValues=[value])
        raise AssertionError("the call was aborted")

    def _replicas(self, ref: messages.ScaledObjectRef, context: Any) -> int:
        authorise(context, self._allowed_sans)
        return self._advised(*_pool_of(ref))


def _pool_of(ref: messages.ScaledObjectRef) -> tuple[str, str]:
    """Namespace and name of the pool that a ScaledObject asks for.

    Raises:
        InvalidSpec: a name cannot be one.
        NotAllowed: the pool is of another namespace.
    """
    pool = ref.scalerMetadata.get("pool", "")
    for field, value in (("namespace", ref.namespace), ("metadata.pool", pool)):
        if len(value) > _LONGEST_NAME or not re.fullmatch(DNS_NAME, value):
            raise InvalidSpec(f"{field}: must be the name of a {'ServingPool' if value is pool else 'namespace'}")
    namespace = ref.scalerMetadata.get("namespace", ref.namespace)
    if namespace != ref.namespace:
        raise NotAllowed(f"metadata.namespace: must be that of the ScaledObject, {ref.namespace}, or left out")
    return namespace, pool
