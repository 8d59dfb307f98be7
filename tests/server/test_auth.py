"""Every route but /health asks for a key, whatever the path looks like."""

from __future__ import annotations

import ast
import asyncio
import hmac
import inspect
import types
from typing import Any

import pytest
from starlette.routing import Route

from headrace.errors import ConfigError
from headrace.server import auth
from tests.server.fake_engine import error_of, make_app, send
from tests.server.raw_http import serving

KEYS = ["first-key", "second-key"]
APP = make_app(api_key=KEYS)
ROUTES = sorted(
    (method, route.path) for route in APP.routes if isinstance(route, Route) for method in route.methods or ()
)


def concrete(path: str) -> str:
    return path.replace("{model_id:path}", "tiny").replace("{response_id}", "resp-1")


def test_the_table_is_not_empty() -> None:
    paths = {path for _, path in ROUTES}
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/metrics", "/version",
            "/docs", "/openapi.json", "/ping", "/health"} <= paths  # fmt: skip


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_no_route_without_key(method: str, path: str) -> None:
    answer = send(APP, method, concrete(path))
    if path in ("/health", "/"):
        assert answer.status_code == 200
    elif method == "HEAD":
        assert (answer.status_code, answer.content) == (401, b"")
    else:
        assert answer.headers["www-authenticate"] == "Bearer"
        if path.startswith("/v1/messages"):
            assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
        else:
            assert error_of(answer, 401)["code"] == "invalid_api_key"


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("key", KEYS)
def test_every_route_with_a_key(method: str, path: str, key: str) -> None:
    assert send(APP, method, concrete(path), headers={"authorization": f"Bearer {key}"}).status_code in (
        (404,) if "{response_id}" in path else (200, 415)
    )


WRONG = [
    "Bearer",
    "Bearer ",
    "Bearer first",
    "Bearer first-key-and-more",
    "Bearer FIRST-KEY",
    "Bearer first-key second-key",
    "Bearer first-key,second-key",
    "Basic first-key",
    "first-key",
    "Bearerfirst-key",
    "Bearer \x80\xff",
]


@pytest.mark.parametrize("value", WRONG)
def test_wrong_keys(value: str) -> None:
    headers = {b"authorization": value.encode("latin-1")}
    error_of(send(APP, "GET", "/v1/models", headers=headers), 401)


def test_scheme_is_case_insensitive_and_two_headers_are_refused() -> None:
    assert send(APP, "GET", "/v1/models", headers={"authorization": "bearer first-key"}).status_code == 200
    twice = [("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")]
    error_of(send(APP, "GET", "/v1/models", headers=twice), 401)


def test_other_places_for_a_key_do_not_count() -> None:
    for path in ("/v1/models?api_key=first-key", "/v1/models?key=first-key"):
        error_of(send(APP, "GET", path), 401)
    error_of(send(APP, "GET", "/v1/models", headers={"api-key": "first-key", "cookie": "key=first-key"}), 401)


def asgi(app: Any, path: str, kind: str = "http", headers: list[tuple[bytes, bytes]] | None = None, **more: Any) -> Any:
    """The messages sent for a hand-made scope: paths and headers no client library would let through."""
    sent: list[dict[str, Any]] = []
    scope = {"type": kind, "method": "GET", "path": path, "raw_path": path.encode(), "query_string": b"",
             "headers": headers or [], "http_version": "1.1", "scheme": "http", "server": ("test", 80),
             "client": ("1.2.3.4", 5), "root_path": "", **more}  # fmt: skip

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def collect(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, collect))
    return sent


TRICKS = [
    "/health/", "/health/../v1/models", "/v1/models/../../health", "//health", "/health;/v1/models", "/HEALTH",
    "/health%2f..%2fv1/models", "/health\x00", "/health ", " /health", "/v1/models/health", "health", "", "/.//health",
    "/health?x", "/health#/v1/models", "http://test/health", "/v1/../health", "\\health", "/health\n",
]  # fmt: skip


@pytest.mark.parametrize("path", TRICKS, ids=repr)
def test_path_tricks(path: str) -> None:
    """Nothing that is not exactly /health passes; nothing is rebuilt from Host, as CVE-2026-48746 was."""
    for headers in ([], [(b"host", b"test/health?")], [(b"host", b"test"), (b"x-forwarded-prefix", b"/health"),
                                                       (b"x-original-url", b"/health")]):  # fmt: skip
        assert asgi(APP, path, headers=headers)[0]["status"] == 401


def test_host_header_cannot_free_a_route() -> None:
    for host in (b"test/health?", b"test/health#", b"/health", b"test:80/health?x="):
        assert asgi(APP, "/v1/models", headers=[(b"host", host)])[0]["status"] == 401


def test_root_path_cannot_free_a_route() -> None:
    assert asgi(APP, "/health/v1/models", root_path="/health")[0]["status"] == 401
    app = make_app(api_key=KEYS, root_path="/api")
    assert asgi(app, "/api/health")[0]["status"] == 200
    assert asgi(app, "/health")[0]["status"] == 200
    for path in ("/api/v1/models", "/v1/models", "/api/api/health", "/api/health/v1/models", "/apihealth"):
        assert asgi(app, path)[0]["status"] == 401


TARGETS = {
    b"/health": 200,
    b"/%68ealth": 200,
    b"http://test/health": 200,
    b"http://user@test:80/health?a=b": 200,
    b"//health": 401,
    b"/.//health": 401,
    b"/health/": 401,
    b"/health/../v1/models": 401,
    b"/health%2f..%2fv1/models": 401,
    b"/health%3fx/../v1/models": 401,
    b"/health%00": 401,
    b"/health%0a": 401,
    b"/v1%2fmodels": 401,
    b"/%76%31/models": 401,
    b"/%252e%252e/health": 401,
    b"http://test/v1/models": 401,
    b"http://test/health/../v1/models": 401,
    b"http://test//health": 401,
    b"http://health/v1/models": 401,
    b"/http://test/health": 401,
    b"/v1/models#/health": 401,
    b"/v1/models?/health": 401,
    b"/v1/models;/health": 401,
    b"http://test": 400,
    b"health": 400,
    b"\\health": 400,
    b"/health\xff": 400,
    b"*": 401,
}
"""What a request line may name -> the status without a key. 200 is /health itself, whose body is empty."""


@pytest.mark.parametrize("root_path", ["", "/api", "/v1"])
async def test_request_targets_as_they_come_from_the_wire(root_path: str) -> None:
    """The same tricks through the real parser: what it makes of a target is what router and keys see."""
    async with serving(api_key=KEYS, root_path=root_path) as server:
        for target, status in TARGETS.items():
            client = await server.connect(b"GET " + target + b" HTTP/1.0\r\nX-Original-URL: /health\r\n\r\n")
            answer = await client.rest()
            assert answer.startswith(b"HTTP/1.1 %d " % status), (target, answer[:200])
            assert status != 200 or answer.endswith(b"\r\n\r\n"), target


@pytest.mark.parametrize("token", ["first-key", "second-key", "neither"])
def test_each_key_is_compared_in_constant_time(token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every key, whichever matched before, and as digests of one length."""
    compared: list[tuple[int, int]] = []

    def compare(given: bytes, known: bytes) -> bool:
        compared.append((len(given), len(known)))
        return hmac.compare_digest(given, known)

    monkeypatch.setattr(auth, "hmac", types.SimpleNamespace(compare_digest=compare))
    answer = send(APP, "GET", "/v1/models", headers={"authorization": f"Bearer {token}"})
    assert answer.status_code == (401 if token == "neither" else 200)
    assert compared == [(32, 32)] * len(KEYS)


def test_secrets_are_compared_by_nothing_else() -> None:
    """Of what holds a secret, auth.py compares no value, looks none up and calls no method that searches."""
    secret = {"token", "digest", "digests", "known", "keys", "key", "value"}
    allowed = {
        "hashlib.sha256",
        "hmac.compare_digest",
        "key.strip().encode",
        "key.strip",
        "token.strip",
        "hashlib.sha256(token.strip()).digest",
        "hashlib.sha256(key.strip().encode()).digest",
        "digest.hex",
    }

    def names(node: ast.AST) -> set[str]:
        found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}

    for node in ast.walk(ast.parse(inspect.getsource(auth))):
        looks_up = isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Slice)
        if isinstance(node, ast.Compare | ast.Match) or looks_up:
            assert not names(node) & secret, ast.unparse(node)
        elif isinstance(node, ast.Call) and names(node) & secret:
            assert ast.unparse(node.func) in allowed, ast.unparse(node)


def test_websockets_are_closed() -> None:
    assert asgi(APP, "/health", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    assert asgi(APP, "/v1/models", kind="websocket")[0]["type"] == "websocket.close"


def test_an_unknown_kind_of_connection_does_nothing() -> None:
    assert asgi(APP, "/v1/models", kind="webtransport") == []


def test_key_comes_before_the_body() -> None:
    """Without key nothing of the body is read, however large it says it is."""
    answer = send(APP, "POST", "/v1/completions", content=b"x" * 100, headers={"content-length": "99999999999"})
    error_of(answer, 401)


def test_cors_preflight_needs_no_key_and_the_request_does() -> None:
    app = make_app(api_key=KEYS, allowed_origins=["https://page.example"])
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    answer = send(app, "OPTIONS", "/v1/completions", headers=asked)
    assert answer.headers["access-control-allow-origin"] == "https://page.example"
    error_of(send(app, "OPTIONS", "/v1/completions"), 401)
    refused = send(app, "GET", "/v1/models", headers={"origin": "https://page.example"})
    error_of(refused, 401)
    assert refused.headers["access-control-allow-origin"] == "https://page.example"


@pytest.mark.parametrize("keys", [[""], ["good", " "]])
def test_an_empty_key_is_refused_at_start(keys: list[str]) -> None:
    with pytest.raises(ConfigError, match="must not be empty"):
        make_app(api_key=keys)


def test_without_keys_all_is_open() -> None:
    assert send(make_app(), "GET", "/v1/models").status_code == 200
