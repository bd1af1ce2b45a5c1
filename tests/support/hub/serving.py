"""Two listening sockets and a thread that answers, quick to start and quick to stop.

uvicorn parses HTTP; its server class is left out, because it looks whether to stop ten times a
second and waits for connections that a fault keeps open. While the service is stopped its ports
stay taken but nobody listens: a client is refused, and no other process moves in.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any


class Service:
    """Serves an ASGI application on some sockets from a thread until it is stopped."""

    def __init__(self, application: Any, sockets: list[socket.socket]) -> None:
        from uvicorn import Config

        self._sockets = sockets
        self._config = Config(
            application,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            log_config=None,
            log_level="critical",
            access_log=False,
        )
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="local Hub")
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        """Break every connection and return when nothing of the service is left."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        finally:
            self._ready.set()  # should it have failed, nobody waits for ever

    async def _serve(self) -> None:
        from uvicorn.protocols.http.h11_impl import H11Protocol
        from uvicorn.server import ServerState

        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        state = ServerState()
        servers = [
            await self._loop.create_server(lambda: H11Protocol(self._config, state, {}), sock=sock)
            for sock in self._sockets
        ]
        self._ready.set()
        await self._stopping.wait()
        for server in servers:
            server.close()
        for connection in list(state.connections):
            connection.transport.abort()
        for task in list(state.tasks):
            task.cancel()
        await asyncio.gather(*state.tasks, return_exceptions=True)


def bound(port: int) -> socket.socket:
    """Return a socket that holds a port; connections are refused until somebody listens."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", port))
    return held
