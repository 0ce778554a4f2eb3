"""What KubeRay needs of Ray in the pods of a RayJob, where there is no Ray: the job API of the head's dashboard, and in
the submitter's pod what ``ray job submit`` does.

usage: python -c PROGRAM head
       python -c PROGRAM submit

It runs as text in the trainer's image. The head runs the entrypoint of a job as Ray does, as a process of its own pod;
workers are started by their pods, as no Ray is there to do it.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PORT = 8265
ENTRYPOINT = "ENTRYPOINT"
"""Variable of the submitter: what the job runs."""
JOBS: dict[str, Job] = {}


class Job:
    """One submitted job."""

    def __init__(self, name: str, entrypoint: str) -> None:
        self._name, self._entrypoint = name, entrypoint
        self._process = subprocess.Popen(shlex.split(entrypoint))

    def stop(self) -> bool:
        """Whether it ran until now."""
        running = self._process.poll() is None
        self._process.terminate()
        return running

    def described(self) -> dict[str, Any]:
        code = self._process.poll()
        status = "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"
        return {"submission_id": self._name, "entrypoint": self._entrypoint, "status": status}


class Dashboard(BaseHTTPRequestHandler):
    """``/api/jobs/``, ``/api/jobs/ID`` and ``/api/jobs/ID/stop``."""

    def do_GET(self) -> None:
        job = JOBS.get(self.path.rstrip("/").rpartition("/")[2])
        self._answer(200 if job else 404, job.described() if job else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        [_, _, _, name, *action] = self.path.split("/")
        if action:
            self._answer(200, {"stopped": name in JOBS and JOBS[name].stop()})
            return
        asked = json.loads(body)
        JOBS[asked["submission_id"]] = Job(asked["submission_id"], asked["entrypoint"])
        self._answer(200, {"job_id": asked["submission_id"], "submission_id": asked["submission_id"]})

    def _answer(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Of either family of addresses."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET


def submit() -> int:
    """Submit the job that KubeRay names and wait for its end."""
    jobs, name = f"http://{os.environ['RAY_DASHBOARD_ADDRESS']}/api/jobs/", os.environ["RAY_JOB_SUBMISSION_ID"]
    asked = json.dumps({"submission_id": name, "entrypoint": os.environ[ENTRYPOINT]}).encode()
    urllib.request.urlopen(jobs, asked).close()
    status = "RUNNING"
    while status == "RUNNING":
        time.sleep(0.5)
        with urllib.request.urlopen(jobs + name) as answer:
            status = json.load(answer)["status"]
    return status != "SUCCEEDED"


if __name__ == "__main__":
    if sys.argv[1] == "submit":
        sys.exit(submit())
    Server(("", PORT), Dashboard).serve_forever()
