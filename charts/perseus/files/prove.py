"""``helm test``: plans a made-up job of two stages, from its manifest to a plan, and takes everything away again.

Runs in the operator's image under a service account of its own. No GPU and no agent is needed: mode Recommend.
"""

# ruff: noqa: T201  # what it prints is what `helm test --logs` shows

import asyncio
import os
import sys
import time

from kubernetes.aio import client, config

from perseus_proto import keys
from perseus_sim.gpus.model import profile_csv

NAMESPACE, NAME = os.environ["NAMESPACE"], os.environ["NAME"]
AGENTS, AGENT_NAMESPACE = os.environ.get("AGENTS"), os.environ.get("AGENT_NAMESPACE")
PLACE = (keys.API_GROUP, keys.API_VERSION, NAMESPACE, keys.PLURAL)
SPEC = {
    "pipeline": {"schedule": "1F1B", "stages": 2, "microbatches": 4},
    "profile": {"configMapRef": {"name": NAME}, "blockingPowerMilliwatts": 83640},
    "mode": "Recommend",
    "points": 20,
}


async def delete(core, jobs):
    for forget in (
        lambda: jobs.delete_namespaced_custom_object(*PLACE, NAME),
        lambda: core.delete_namespaced_config_map(NAME, NAMESPACE),
    ):
        try:
            await forget()
        except client.ApiException as error:
            if error.status != 404:
                raise


async def planned(jobs, timeout_s):
    """The job once it is Ready; what it says instead when the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        job = await jobs.get_namespaced_custom_object(*PLACE, NAME)
        said = {c["type"]: c for c in job.get("status", {}).get("conditions", [])}
        if said.get("Ready", {}).get("status") == "True":
            return job
        if time.monotonic() > deadline:
            sys.exit(f"FAILED: not Ready after {timeout_s} s. {said or 'The operator has said nothing: see its log.'}")
        await asyncio.sleep(0.5)


async def main():
    try:
        config.load_incluster_config()
    except config.ConfigException:
        await config.load_kube_config()
    async with client.ApiClient() as connection:
        await prove(client.CoreV1Api(connection), client.CustomObjectsApi(connection), client.AppsV1Api(connection))


async def prove(core, jobs, apps):
    await delete(core, jobs)  # what a test that was killed has left
    try:
        profile = {"metadata": {"name": NAME}, "data": {keys.PROFILE_KEY: profile_csv(stages=2)}}
        await core.create_namespaced_config_map(NAMESPACE, profile)
        api_version = f"{keys.API_GROUP}/{keys.API_VERSION}"
        job = {"apiVersion": api_version, "kind": keys.KIND, "metadata": {"name": NAME}, "spec": SPEC}
        await jobs.create_namespaced_custom_object(*PLACE, job)
        frontier = (await planned(jobs, 90))["status"]["frontier"]
        print(f"operator: planned a job; its frontier has {frontier['points']} points")
    finally:
        await delete(core, jobs)
    if AGENTS:
        agents = (await apps.read_namespaced_daemon_set(AGENTS, AGENT_NAMESPACE)).status
        print(f"agents: {agents.number_ready or 0} of {agents.desired_number_scheduled or 0} ready")
        if not agents.desired_number_scheduled:
            print("agents: no node looks like a GPU node; see agent.affinity")
        elif (agents.number_ready or 0) < agents.desired_number_scheduled:
            sys.exit("FAILED: an agent is not ready: kubectl logs it")


asyncio.run(main())
