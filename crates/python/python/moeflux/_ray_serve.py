"""Ray Serve: deployments whose replicas answer as `moeflux serve`."""

# Ray need not be installed where types are checked.
# mypy: ignore-errors

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import RequestRouter
from starlette.requests import Request
from starlette.responses import StreamingResponse

from ._model import Model
from ._serving import _MAX_BODY

# Members of a scope for an ASGI application. Serve's has others, which cannot be pickled.
_SCOPE = ("type", "method", "path", "root_path", "query_string", "headers")


class ConversationRouter(RequestRouter):
    """Ranks replicas by a hash of the session and of the replica's name, so that a replica that
    comes or goes moves its own sessions only. A full replica's requests go to the next in rank;
    requests without a session to the replica with the fewest."""

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        session = ""
        if pending_request is not None:
            session = pending_request.metadata.session_id
            # Else the base class asks full replicas again without a pause.
            pending_request.routing_context.should_backoff = True
        if not session:
            return [candidate_replicas]

        def rank(replica):
            name = f"{session}\0{replica.replica_id.unique_id}"
            return hashlib.blake2b(name.encode(), digest_size=8).digest()

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]


class Replica:
    """A model that answers in lists of ASGI messages."""

    def __init__(self, path, options):
        self._model = Model.open(path, **options)
        self._app = self._model.asgi()
        name = serve.get_replica_context().replica_id.unique_id
        self._name = (b"x-moeflux-replica", name.encode())

    async def answer(self, scope, body):
        received, sent = [{"type": "http.request", "body": body}], asyncio.Queue()

        async def receive():
            if not received:
                # Serve cancels the request of a client that goes.
                await asyncio.Event().wait()
            return received.pop()

        running = asyncio.ensure_future(self._app(scope, receive, sent.put))
        running.add_done_callback(sent.put_nowait)
        try:
            while not running.done() or not sent.empty():
                messages = [await sent.get()]
                while not sent.empty():
                    messages.append(sent.get_nowait())
                if messages[-1] is running:
                    messages.pop()
                if not messages:
                    break
                if messages[0]["type"] == "http.response.start":
                    messages[0]["headers"].append(self._name)
                yield messages
            running.result()
        finally:
            running.cancel()

    def check_health(self):
        self._model.stats()

    def __del__(self):
        # Absent if the model could not be opened.
        if model := getattr(self, "_model", None):
            model.close()


class Front:
    """Reads requests, and hands each to a replica by its conversation: Serve's proxies choose a
    replica before they read the body."""

    def __init__(self, replicas, conversation):
        self._replicas = replicas.options(method_name="answer", stream=True)
        self._conversation = conversation

    async def __call__(self, request: Request):
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > _MAX_BODY:
                break
        body = bytes(body)
        session = request.headers.get("x-session-id") or self._conversation(body)
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        answer = self._replicas.options(session_id=session).remote(scope, body)
        start, *rest = await anext(answer)

        async def parts():
            try:
                for message in rest:
                    yield message["body"]
                async for messages in answer:
                    for message in messages:
                        yield message["body"]
            finally:
                answer.cancel()

        response = StreamingResponse(parts(), start["status"])
        response.raw_headers = start["headers"]
        return response


def app(
    path: str,
    options: dict[str, Any],
    conversation: Callable[[bytes], str],
    fronts: int,
    deployment: dict[str, Any],
) -> Any:
    """The application of `moeflux.ray.app`."""
    router = RequestRouterConfig(request_router_class=ConversationRouter)
    replicas = serve.deployment(Replica, **{"request_router_config": router, **deployment})
    front = serve.deployment(
        Front,
        num_replicas=fronts,
        # Requests wait for replicas here.
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas.bind(path, options), conversation)
