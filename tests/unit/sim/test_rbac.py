"""The operator's rights, as the chart grants them."""

from __future__ import annotations

from perseus_core import keys
from perseus_operator.replicas.shard import SEATS, SHARDS, seat_lease, shard_lease
from perseus_sim.cluster import rbac

READING = {"get", "list", "watch"}


def test_the_operator_writes_no_config_map_and_no_lease_but_its_own() -> None:
    """It parses what tenants send: what it may write, they may write once they have taken it over."""
    manifest = rbac.operator_manifest("system")
    written = {
        (permission.group, permission.resource.partition("/")[0])
        for permission in rbac.granted(document for document in manifest if document["kind"] == "ClusterRole")
        if permission.verb not in READING
    }
    own = {keys.PLURAL, keys.BUDGET_PLURAL, keys.PROFILE_PLURAL, keys.FRONTIER_PLURAL, keys.CLASS_PLURAL}
    own |= {keys.POOL_PLURAL}
    assert written == {(keys.API_GROUP, plural) for plural in own} | {("", "events")}
    [role] = [document for document in manifest if document["kind"] == "Role"]
    assert role["metadata"]["namespace"] == "system"
    for rule in role["rules"]:
        assert rule["resources"] == ["leases"]
        assert set(rule["verbs"]) <= {"create", "list"} or set(rule["resourceNames"]) == {
            "perseus-epoch",
            *(seat_lease(seat) for seat in range(SEATS)),
            *(shard_lease(shard) for shard in range(SHARDS)),
        }
