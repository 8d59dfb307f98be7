"""Serves the page at `/`: a chat, and pictures of what the server does. One file, which asks this server alone."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.requests import Request
from starlette.responses import Response

from headrace.server.serving import Serving

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def _page() -> tuple[str, dict[str, str]]:
    """Return the page, and headers by which a browser runs what is written in it and nothing else."""
    text = (resources.files("headrace.server") / "page" / "index.html").read_text("utf-8")
    allowed: dict[str, str] = {}
    for kind, inside in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        allowed[kind] = f"'sha256-{digest}'"
    policy = (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = {
        "content-security-policy": policy, "x-content-type-options": "nosniff", "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }  # fmt: skip
    return text, headers


async def show_page(serving: Serving, http: Request) -> Response:
    text, headers = _page()
    return Response(text, 200, headers, "text/html")
