"""What the operator may do and what it did, by the API server's audit log."""

from __future__ import annotations

from collections.abc import Iterable

from perseus_core import keys
from perseus_sim.cluster.rbac import Permission, Request

OF_POD_GROUPS = {Permission("get", group, "podgroups") for group in ("scheduling.k8s.io", "scheduling.x-k8s.io")}
"""To find the group that pods of a class are scheduled with: ``tests/e2e/test_energy_class.py`` uses the second, and
``tests/chart/test_gated_apis.py`` the first, which an API server has behind a gate.
"""
OCCASIONAL = {
    *OF_POD_GROUPS,
    *(
        Permission(verb, keys.API_GROUP, plural)
        for plural in (keys.PROFILE_PLURAL, keys.FRONTIER_PLURAL)
        for verb in ("get", "create", "patch")
    ),
    Permission("patch", keys.API_GROUP, f"{keys.PROFILE_PLURAL}/status"),
    Permission("list", keys.API_GROUP, keys.PROFILE_PLURAL),
    Permission("delete", keys.API_GROUP, keys.PROFILE_PLURAL),
    *(Permission("create", keys.API_GROUP, plural) for plural in (keys.PLURAL, keys.POOL_PLURAL)),
    *(Permission("patch", keys.API_GROUP, plural) for plural in (keys.POOL_PLURAL, f"{keys.POOL_PLURAL}/status")),
    Permission("list", "autoscaling", "horizontalpodautoscalers"),
    Permission("get", "", "namespaces"),
    Permission("delete", keys.API_GROUP, keys.PLURAL),
}
"""To store profiles that are measured again, calibrations and frontiers, to find a profile in mode Observe and delete
old ones, to make jobs and pools of classes, to serve pools beside autoscalers, and to delete jobs that have finished.
``tests/e2e`` uses every one of the others.
"""


def lacking(requests: Iterable[Request]) -> set[tuple[str, str]]:
    """Return permission and path of the requests that were refused and never allowed.

    An API server learns of a role a moment after it was made. What is allowed may still not be there (404).
    """
    found = list(requests)
    allowed = {request.permission for request in found if request.code < 400 or request.code == 404}
    refused = (request for request in found if request.code in (401, 403) and request.permission not in allowed)
    return {(str(request.permission), request.path) for request in refused}
