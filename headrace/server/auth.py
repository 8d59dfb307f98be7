"""API keys, checked in front of everything else. Pure ASGI; knows nothing of routes but the path of /health."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import AuthenticationError
from headrace.server.replies import error_response

FREE_PATH = "/health"
CLIENT = "headrace.client"
"""Of an ASGI scope: whose key came with the request, as the beginning of its digest."""


class RequireApiKey:
    """Refuses by default. Only http requests for exactly /health pass without a key.

    What is looked at is `scope["path"]`, the same string the router matches; nothing is rebuilt from the Host header.
    Keys and tokens are compared as digests, in constant time, with every key, whichever matched before.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], root_path: str = "") -> None:
        self.app = app
        self.digests = [hashlib.sha256(key.strip().encode()).digest() for key in keys]
        self.free_paths = frozenset((FREE_PATH, root_path.rstrip("/") + FREE_PATH))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        client = self._client(scope) if kind == "http" else ""
        if kind == "lifespan" or (kind == "http" and (scope["path"] in self.free_paths or client)):
            await self.app({**scope, CLIENT: client}, receive, send)
        elif kind == "http":
            error = AuthenticationError("a valid API key is needed: Authorization: Bearer KEY")
            await error_response(error, {"www-authenticate": "Bearer"})(scope, receive, send)
        elif kind == "websocket":
            await send({"type": "websocket.close", "code": 1008})

    def _client(self, scope: Scope) -> str:
        """Empty for one without a valid key."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        if len(given) != 1:  # two headers could be read differently by a proxy before us
            return ""
        scheme, _, token = given[0].partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self.digests]
        return digest.hex()[:16] if scheme.lower() == b"bearer" and any(matches) else ""
