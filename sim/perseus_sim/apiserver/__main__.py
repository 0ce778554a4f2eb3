"""The API server as a process: serves on loopback until SIGTERM or SIGINT, and writes a kubeconfig once it is ready."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
from pathlib import Path

import yaml
from aiohttp import web

from perseus_sim.apiserver.handler import ApiServer

_HOST = "127.0.0.1"


def kubeconfig(url: str) -> str:
    """A kubeconfig for a server that requires no credentials."""
    name = "perseus-sim"
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": name, "cluster": {"server": url}}],
            "users": [{"name": name, "user": {}}],
            "contexts": [{"name": name, "context": {"cluster": name, "user": name, "namespace": "default"}}],
            "current-context": name,
        },
        sort_keys=False,
    )


async def serve(port: int, path: Path | None) -> None:
    """Serve until SIGTERM or SIGINT. The kubeconfig appears, whole, only when the port answers."""
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    async with ApiServer() as handler:
        runner = web.ServerRunner(web.Server(handler, access_log=None), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, _HOST, port)
        await site.start()
        url = f"http://{_HOST}:{runner.addresses[0][1]}"
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            partial.write_text(kubeconfig(url))
            partial.replace(path)
        print(f"serving on {url}", flush=True)
        await stopped.wait()
        await runner.cleanup()


def main() -> None:
    """Entry point of ``python -m perseus_sim.apiserver``."""
    parser = argparse.ArgumentParser(prog="python -m perseus_sim.apiserver", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="TCP port on loopback; 0: any free one (default)")
    parser.add_argument("--kubeconfig", type=Path, help="where to write the kubeconfig, once the server answers")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, arguments.kubeconfig))


if __name__ == "__main__":
    main()
