"""No body, however it is made, holds up the event loop, and with it everybody's tokens.

The same documents are decoded whole by msgspec and in pieces by ours, and bodies made to be slow come to an app whose
event loop is watched meanwhile.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from headrace.errors import RequestError
from headrace.server import json_pieces
from headrace.server.json_pieces import decode_json
from headrace.server.run import GC_THRESHOLDS
from tests.server.fake_engine import FakeEngine, make_app
from tests.server.loop_watch import GAP, TRIES, watching
from tests.speed import PATIENCE, slowness

SIZE = 12 * 2**20
"""Bytes of each body. What takes longer than GAP at this size in one piece is what these tests are about."""
CHUNK = 2**16
MESSAGE_BYTES = 1200


@dataclass
class Watched:
    """What one request met."""

    status: int
    body: bytes
    gap: float


async def _chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), CHUNK):
        yield body[start : start + CHUNK]


async def _watched(app: Starlette, path: str, body: bytes) -> Watched:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}
    client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE)
    async with client, watching() as watch:
        answer = await client.post(path, content=_chunks(body), headers=headers)
        gap = await watch.end()
    return Watched(answer.status_code, answer.content, gap)


def watched(app: Starlette, path: str, body: bytes) -> Watched:
    """The try in which the event loop stood still for the shortest time."""
    best = asyncio.run(_watched(app, path, body))
    for _ in range(TRIES - 1):
        if best.gap < GAP * slowness():
            break
        again = asyncio.run(_watched(app, path, body))
        best = min(best, again, key=lambda seen: seen.gap)
    return best


def full_of(item: bytes, before: bytes = b"[", after: bytes = b"]", between: bytes = b",") -> bytes:
    """As much of `item` as SIZE holds."""
    return before + between.join([item] * (SIZE // (len(item) + len(between)))) + after


def keys(make: Callable[[int], str], each: int) -> bytes:
    """An object of different keys, of some `each` bytes."""
    return b"{" + b",".join([b'"%b":1' % make(i).encode() for i in range(SIZE // each)]) + b"}"


VALUES: dict[str, Callable[[], bytes]] = {
    "nested lists": lambda: full_of(b"[[[[]]]]"),
    "deep lists": lambda: b"[" * (SIZE // 2) + b"]" * (SIZE // 2),
    "deep objects": lambda: b'{"a":' * (SIZE // 6) + b"1" + b"}" * (SIZE // 6),
    "objects": lambda: full_of(b'{"a":{}}'),
    "short texts": lambda: full_of(b'"ab"'),
    "ids": lambda: full_of(b"300"),
    "floats": lambda: full_of(b"1.5"),
    "literals": lambda: full_of(b"true"),
    "lists of ids": lambda: full_of(full_of(b"300")[:4000].rpartition(b",")[0] + b"]"),
    "one long text": lambda: full_of(b"a", b'"', b'"', b""),
    "a text of escapes": lambda: full_of(b"\\u00e9\\n", b'"', b'"', b""),
    "a text of pairs": lambda: full_of(b"\\ud83d\\ude00", b'"', b'"', b""),
    "a text of three bytes": lambda: full_of("中".encode(), b'"', b'"', b""),
    "half a character at the end": lambda: full_of(b"\\u0041", b'"', b'\\ud800"', b""),
    "invalid UTF-8 at the end": lambda: full_of(b"a", b'"', b'\xff"', b""),
    "no end": lambda: full_of(b"1", b"[", b""),
    "a wrong end": lambda: full_of(b"1", b"[", b"}"),
    "many digits": lambda: full_of(b"1", b"", b"", b""),
    "a huge exponent": lambda: full_of(b"1e999999"),
    "spaces": lambda: full_of(b" ", b"", b"1", b""),
    "different keys": lambda: keys(lambda i: f"{i:07d}", 12),
    "one key": lambda: b"{" + full_of(b'"a":1', b"", b"") + b"}",
    "keys of one hash": lambda: keys(lambda i: str(i * (2**61 - 1)), 27),
    "ids of one hash": lambda: b"[" + b",".join([b"%d" % (i * (2**61 - 1)) for i in range(SIZE // 24)]) + b"]",
}  # fmt: skip
NEEDED = {
    "/v1/completions": b'"prompt":"a","max_tokens":1,',
    "/v1/chat/completions": b'"messages":[{"role":"user","content":"a"}],"max_tokens":1,',
    "/tokenize": b"",
    "/detokenize": b"",
}
SHAPED: dict[str, tuple[str, Callable[[], bytes]]] = {
    "many messages": ("messages", lambda: full_of(b'{"role":"user","content":"a"}')),
    "many parts": ("messages", lambda: b'[{"role":"user","content":' + full_of(b'{"type":"text","text":"a"}') + b"}]"),
    "a long message": ("messages", lambda: full_of(b"a\\n", b'[{"role":"user","content":"', b'"}]', b"")),
    "a wrong role": ("messages", lambda: full_of(b"a", b'[{"content":"a","role":"', b'"}]', b"")),
    "a wrong type of part": (
        "messages",
        lambda: full_of(b"a", b'[{"role":"user","content":[{"type":"', b'"}]}]', b""),
    ),
    "long arguments": (
        "messages",
        lambda: full_of(
            b"[", b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":', b'"}}]}]', b""
        ),
    ),
    "arguments of many numbers": (
        "messages",
        lambda: full_of(
            b"1", b'[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{\\"a\\":[', b']}"}}]}]'
        ),
    ),
    "many tools": ("tools", lambda: full_of(b'{"function":{"name":"f"}}')),
    "a tool of many values": ("tools", lambda: full_of(b"0", b'[{"function":{"name":"f","a":[', b"]}}]")),
}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CASES = [
    # route, field, what it holds
    (COMPLETIONS, "prompt", "nested lists"),
    (COMPLETIONS, "prompt", "ids of one hash"),
    (COMPLETIONS, "prompt", "a text of escapes"),
    (COMPLETIONS, "logit_bias", "keys of one hash"),
    (COMPLETIONS, "response_format", "deep objects"),
    (COMPLETIONS, "temperature", "many digits"),
    (COMPLETIONS, "unknown", "invalid UTF-8 at the end"),
    (CHAT, "messages", "many messages"),
    (CHAT, "messages", "arguments of many numbers"),
    (CHAT, "chat_template_kwargs", "one key"),
    ("/tokenize", "prompt", "a text of three bytes"),
    ("/detokenize", "tokens", "ids"),
]
MORE = [
    (COMPLETIONS, "metadata", "different keys"),
    (COMPLETIONS, "unknown", "no end"),
    (COMPLETIONS, "prompt", "lists of ids"),
    (COMPLETIONS, "prompt", "a text of pairs"),
    (COMPLETIONS, "prompt", "short texts"),
    (COMPLETIONS, "stop", "short texts"),
    (COMPLETIONS, "bad_words", "floats"),
    (COMPLETIONS, "allowed_token_ids", "ids"),
    (COMPLETIONS, "logit_bias", "different keys"),
    (COMPLETIONS, "response_format", "nested lists"),
    (COMPLETIONS, "model", "one long text"),
    (COMPLETIONS, "unknown", "a wrong end"),
    (COMPLETIONS, "unknown", "half a character at the end"),
    (COMPLETIONS, "unknown", "a huge exponent"),
    (COMPLETIONS, "unknown", "spaces"),
    *((CHAT, name, made) for made, (name, _) in SHAPED.items() if (CHAT, name, made) not in CASES),
    (CHAT, "tool_choice", "objects"),
    (CHAT, "chat_template_kwargs", "different keys"),
    ("/detokenize", "tokens", "literals"),
]


def body_of(path: str, name: str, made: str) -> bytes:
    value = (VALUES.get(made) or SHAPED[made][1])()
    return b'{%b"%b":%b}' % (NEEDED[path], name.encode(), value)


@pytest.fixture(scope="module")
def app() -> Iterator[Starlette]:
    """What was made before the tests is no garbage, and is not looked through meanwhile, as in a server."""
    gc.collect()
    gc.freeze()
    threshold = gc.get_threshold()
    gc.set_threshold(*GC_THRESHOLDS)
    yield make_app(FakeEngine())
    gc.set_threshold(*threshold)


@pytest.mark.parametrize(
    ("path", "name", "made"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_a_large_body_holds_up_nobody(app: Starlette, path: str, name: str, made: str) -> None:
    seen = watched(app, path, body_of(path, name, made))
    assert seen.status in (400, 404)  # 404: a model that is not served
    assert len(seen.body) < MESSAGE_BYTES
    assert json.loads(seen.body)["error"]["message"]
    assert seen.gap < GAP * slowness()


def test_token_ids_of_a_body_take_less_memory_than_its_text() -> None:
    """A number of Python's takes nine times what it takes in JSON; equal ones are one object."""
    body = b'{"prompt":[' + b",".join([b"[" + b",".join([b"300", b"12345"] * 2000) + b"]"] * 100) + b"]}"
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    fields = decode_json(body)
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert sum(map(sum, fields["prompt"])) == 100 * 2000 * 12645
    assert held < 2 * len(body)


def test_a_wrong_byte_is_named_by_its_place_in_the_body() -> None:
    body = b'{"prompt":[' + b"1," * 200_000 + b"x]}"
    with pytest.raises(msgspec.DecodeError, match=rf"byte {len(body) - 3}\b"):
        decode_json(body)


def test_a_limit_names_the_field() -> None:
    body = b'{"model":"tiny","tools":' + full_of(b"[]") + b"}"
    with pytest.raises(RequestError, match="at most") as caught:
        decode_json(body)
    assert caught.value.param == "tools"


def _value(draw: random.Random, levels: int) -> Any:
    kind = draw.random()
    if levels and kind < 0.3:
        return [_value(draw, levels - 1) for _ in range(draw.randrange(6))]
    if levels and kind < 0.5:
        return {draw.choice(["a", "", 'é"\\x', "b1"]): _value(draw, levels - 1) for _ in range(draw.randrange(5))}
    if kind < 0.7:
        return "".join(draw.choices(["a", '"', "\\", "\n", "é", "中", "😀", ",", "[", "}"], k=draw.randrange(20)))
    return draw.choice([1, 300, -5, 2**40, 1.5, True, False, None, 10**25])


def _damaged(draw: random.Random, text: bytes) -> bytes:
    at = draw.randrange(len(text))
    return (
        text[:at] + draw.choice([b"", *(b"%c" % c for c in b',:[]{}"\\1 \xff\x80u')]) + text[at + draw.randrange(2) :]
    )


def _decoded(decode: Callable[[bytes], Any], text: bytes) -> Any:
    try:
        return decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return "refused"


@pytest.mark.parametrize("piece", [40, 50, 64, 100])
def test_pieces_say_what_the_whole_says(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Of documents that are JSON, and of such that are so no more after a byte was changed."""
    monkeypatch.setattr(json_pieces, "PIECE", piece)
    draw = random.Random(piece)
    for _ in range(1000):
        ascii_only, indent = draw.random() < 0.5, draw.choice([None, 1])
        text = json.dumps(_value(draw, 5), ensure_ascii=ascii_only, indent=indent).encode()
        assert _decoded(decode_json, text) == msgspec.json.decode(text)
        damaged = _damaged(draw, text)
        found = _decoded(decode_json, damaged)
        assert found == _decoded(msgspec.json.decode, damaged), damaged
