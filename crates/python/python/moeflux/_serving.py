"""A model as a server: on a port, or as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, final

from ._closing import Closing

if TYPE_CHECKING:
    from ._native import NativeResponse, NativeRouter, NativeServer

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# Bytes of a body that are taken; the server refuses larger ones.
_MAX_BODY = 65 << 20


@final
class Server(Closing):
    """A server on a port, in threads of the package, until it is closed."""

    def __init__(self, model: object, native: NativeServer) -> None:
        # A model ends with its last reference.
        self._model = model
        self._native = native

    @property
    def url(self) -> str:
        """Its address: "http://127.0.0.1:8080"."""
        return self._native.url()

    def close(self) -> None:
        """Ends running answers and the server. The model goes on."""
        self._native.close()


class Asgi:
    """The server of `moeflux serve` as an ASGI application, to mount."""

    def __init__(self, model: object, native: NativeRouter) -> None:
        # A model ends with its last reference.
        self._model = model
        self._native = native

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        if scope["type"] == "lifespan":
            return await _lifespan(receive, send)
        if scope["type"] != "http":
            raise ValueError(f"expected an HTTP request, got {scope['type']}")
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False) or len(body) > _MAX_BODY:
                break
        root, path = scope.get("root_path", ""), scope["path"]
        if root and path.startswith(root):
            path = path[len(root) :] or "/"
        query = scope.get("query_string", b"").decode("latin-1")
        target = f"{path}?{query}" if query else path
        headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        response = self._native.request(scope["method"], target, headers, bytes(body))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await self._respond(response, gone, send)
        finally:
            gone.cancel()
            response.close()

    async def _respond(
        self, response: NativeResponse, gone: asyncio.Future[None], send: _Send
    ) -> None:
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        response.set_wake(lambda: loop.call_soon_threadsafe(ready.set))
        while not gone.done():
            ready.clear()
            state, head, data = response.try_next()
            if head is not None:
                status, headers = head
                named = [(name.encode("latin-1"), value) for name, value in headers]
                await send(
                    {"type": "http.response.start", "status": status, "headers": named}
                )
            elif data is not None:
                await send({"type": "http.response.body", "body": data, "more_body": True})
            elif state == "end":
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            else:
                waiting: asyncio.Future[Any] = asyncio.ensure_future(ready.wait())
                both: set[asyncio.Future[Any]] = {waiting, gone}
                await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()


async def _gone(receive: _Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _lifespan(receive: _Receive, send: _Send) -> None:
    while True:
        message = await receive()
        await send({"type": message["type"] + ".complete"})
        if message["type"] == "lifespan.shutdown":
            return
