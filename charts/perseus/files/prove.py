"""The program of ``helm test``: create a small job of two stages, wait for its plan, and delete everything again.

It runs in the operator's image under its own service account. The job's mode is Recommend, so it needs no GPU and no
agent.
"""

# ruff: noqa: T201  # `helm test --logs` shows the output

import asyncio
import os
import sys
import time

from kubernetes.aio import client, config

from perseus_core import keys
from perseus_sim.profiles import profile_csv

NAMESPACE, NAME = os.environ["NAMESPACE"], os.environ["NAME"]
AGENTS, AGENT_NAMESPACE = os.environ.get("AGENTS"), os.environ.get("AGENT_NAMESPACE")
JOBS = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.PLURAL)
SPEC = {
    "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
    "profile": {"configMapRef": {"name": NAME}, "blockingPowerMilliwatts": 83640},
    "mode": "Recommend",
    "points": 20,
}


async def delete(core, jobs):
    """Delete the job and its profile, if they exist."""
    for delete_object in (
        lambda: jobs.delete_namespaced_custom_object(*JOBS, NAME),
        lambda: core.delete_namespaced_config_map(NAME, NAMESPACE),
    ):
        try:
            await delete_object()
        except client.ApiException as error:
            if error.status != 404:
                raise


async def planned(jobs, timeout_s):
    """Wait until the job is Ready and return it; end the program with its conditions after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = await jobs.get_namespaced_custom_object(*JOBS, NAME)
        conditions = {c["type"]: c for c in job.get("status", {}).get("conditions", [])}
        if conditions.get("Ready", {}).get("status") == "True":
            return job
        if time.monotonic() > deadline:
            found = conditions or "The operator has written no status: see its log."
            sys.exit(f"FAILED: the job is not Ready after {timeout_s} s. {found}")
        await asyncio.sleep(0.5)


async def main():
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    async with client.ApiClient() as connection:
        await prove(client.CoreV1Api(connection), client.CustomObjectsApi(connection), client.AppsV1Api(connection))


async def prove(core, jobs, apps):
    """Run the test, and delete its objects in any case."""
    await delete(core, jobs)  # left by a test that was killed
    try:
        profile = {"metadata": {"name": NAME}, "data": {keys.PROFILE_KEY: profile_csv(stages=2)}}
        await core.create_namespaced_config_map(NAMESPACE, profile)
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        job = {"apiVersion": api_version, "kind": keys.KIND, "metadata": {"name": NAME}, "spec": SPEC}
        await jobs.create_namespaced_custom_object(*JOBS, job)
        frontier = (await planned(jobs, 90))["status"]["frontier"]
        print(f"operator: planned a job; its frontier has {frontier['points']} points")
    finally:
        await delete(core, jobs)
    if AGENTS:
        agents = (await apps.read_namespaced_daemon_set(AGENTS, AGENT_NAMESPACE)).status
        print(f"agents: {agents.number_ready or 0} of {agents.desired_number_scheduled or 0} ready")
        if not agents.desired_number_scheduled:
            print("agents: no node has a label of a GPU node; see the value agent.affinity")
        elif (agents.number_ready or 0) < agents.desired_number_scheduled:
            sys.exit(f"FAILED: an agent is not ready: see kubectl -n {AGENT_NAMESPACE} logs daemonset/{AGENTS}")


asyncio.run(main())
