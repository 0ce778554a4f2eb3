"""Forward TCP connections with a delay: slow_proxy.py PORT TARGET TARGET_PORT DELAY_MS. Standard library only."""

from __future__ import annotations

import asyncio
import sys


async def main() -> None:
    port, target, target_port, delay_s = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]) / 1000
    tasks: set[asyncio.Task[None]] = set()

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                if not data:
                    break
                writer.write(data)
            writer.close()

        delivering = asyncio.create_task(deliver())
        while True:
            try:
                data = await reader.read(1 << 16)
            except OSError:
                data = b""
            waiting.put_nowait((asyncio.get_running_loop().time() + delay_s, data))
            if not data:
                break
        await delivering

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(target, target_port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(copy(source, sink))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(serve, None, port)
    await server.serve_forever()


asyncio.run(main())
