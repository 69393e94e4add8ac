"""The thread on which a server speaks HTTP, by uvicorn."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

import uvicorn

# Seconds in which the last answers leave.
LAST_SECONDS = 5


class HttpThread:
    """A context in which an application answers on a socket.

    Args:
        app: the application.
        listening: the socket, bound to an address.
    """

    def __init__(self, app: Any, listening: socket.socket) -> None:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        self._server = _Server(config)
        self._thread = Thread(target=self._server.run, args=([listening],), daemon=True)

    def __enter__(self) -> HttpThread:
        self._thread.start()
        self._server.is_ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join(LAST_SECONDS + 1)

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the thread, soon."""
        loop = self._server.loop
        assert loop is not None, "it has started"
        loop.call_soon_threadsafe(function, *args)

    def call_later(self, seconds: float, function: Callable[..., Any], *args: Any) -> None:
        """Call a function on the thread, on which this runs, too, after so long."""
        asyncio.get_running_loop().call_later(seconds, function, *args)


class _Server(uvicorn.Server):
    """Says when it listens, and on which loop."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.is_ready = Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self.loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.is_ready.set()
