"""Refuses requests without a valid API key. The only routes it knows are those that need none."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import AuthenticationError
from headrace.server.replies import error_response, wire_of

FREE_PATHS = ("/health", "/")
"""The second is the page, which asks for a key itself."""
CLIENT = "headrace.client"
"""Key of an ASGI scope for the client: the beginning of its API key's hash."""


class RequireApiKey:
    """Refuses every request without a valid key, except HTTP requests for exactly FREE_PATHS. The path compared is
    `scope["path"]`, the same string that the router matches; nothing is taken from the Host header. Tokens are compared
    with every key as hashes, in constant time, even after one has matched."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys]
        prefix = root_path.rstrip("/")
        self.free_paths = frozenset((*FREE_PATHS, *(prefix + path for path in FREE_PATHS)))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        client = self._client(scope) if kind == "http" else ""
        if kind == "lifespan" or (kind == "http" and (scope["path"] in self.free_paths or client)):
            await self.app({**scope, CLIENT: client}, receive, send)
        elif kind == "http":
            error = AuthenticationError("a valid API key is needed: Authorization: Bearer KEY, or x-api-key: KEY")
            refusal = error_response(error, {"www-authenticate": "Bearer"}, wire=wire_of(scope["path"]))
            await refusal(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def _client(self, scope: Scope) -> str:
        """Return the client that a request's key belongs to; empty if it has no valid key."""
        sent = [(name, text) for name, text in scope["headers"] if name in (b"authorization", b"x-api-key")]
        clients = [self._client_of(name, text) for name, text in sent]
        # Of two headers of one name a proxy in front might read the other one; two names must mean the same client.
        alone = len({name for name, _ in sent}) == len(sent)
        return clients[0] if clients and alone and len({*clients}) == 1 else ""

    def _client_of(self, name: bytes, text: bytes) -> str:
        scheme, _, token = (b"bearer", b"", text) if name == b"x-api-key" else text.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest.hex()[:16] if scheme.lower() == b"bearer" and any(matches) else ""
