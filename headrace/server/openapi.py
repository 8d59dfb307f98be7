"""Describes the HTTP API: an OpenAPI document made from the routes and their msgspec shapes, and a page that shows it.

The page needs neither scripts nor the internet, so it also works on a machine that is cut off.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace import __version__
from headrace.server.replies import ErrorObject

Handler = Callable[[Any, Request], Coroutine[None, None, Response]]
"""Answers a request; the first argument is what all routes share (serving.Serving)."""
REF = "#/components/schemas/{name}"
_PATH_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace API</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
summary{{cursor:pointer}}pre{{background:#f4f4f4;padding:1em;overflow:auto}}b{{display:inline-block;width:4em}}</style>
<h1>headrace {version}</h1><p>The machine-readable form is at <a href="{openapi}">openapi.json</a>.</p>
<h2>Routes</h2>{routes}<h2>Shapes</h2>{shapes}</html>"""


@dataclass(frozen=True)
class Operation:
    """Describes one route: what it takes, what it answers, and the errors that it may answer instead."""

    path: str
    """Starlette's pattern, e.g. `/v1/models/{model_id:path}`."""
    handler: Handler
    summary: str
    answer: type | None
    """The shape of the JSON answer; None where the answer is no JSON."""
    errors: tuple[int, ...]
    body: type | None = None
    """The shape of the request's body. A route with a body is a POST, every other one a GET, unless `verb` says so."""
    events: tuple[type, ...] = ()
    """The shapes of server-sent events, where the answer can be streamed."""
    needs_key: bool = True
    error: type = ErrorObject
    """The shape of an error's body."""
    verb: str | None = None
    of_first: bool = False
    """Of several HTTP processes the first one answers for all: what it takes is known there alone."""

    @property
    def method(self) -> str:
        return self.verb or ("GET" if self.body is None else "POST")

    def describe(self) -> dict[str, Any]:
        """Return the OpenAPI operation object."""
        found: dict[str, Any] = {
            "summary": self.summary,
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{self.path}").strip("_"),
            "responses": {"200": {"description": "OK"}} | {
                str(status): {"description": "Error", "content": _content(self.error)} for status in self.errors
            },
        }  # fmt: skip
        if self.answer is not None:
            found["responses"]["200"]["content"] = _content(self.answer)
        if self.events:
            shapes = [reference for event in self.events for reference in _content(event)["application/json"].values()]
            schema = shapes[0] if len(shapes) == 1 else {"oneOf": shapes}
            found["responses"]["200"]["content"] |= {"text/event-stream": {"schema": schema}}
        if self.body is not None:
            found["requestBody"] = {"required": True, "content": _content(self.body)}
        if names := _PATH_PARAMETER.findall(self.path):
            found["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if not self.needs_key:
            found["security"] = []
        return found


def _content(shape: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=shape.__name__)}}}


def describe_api(operations: Iterable[Operation], with_keys: bool, root_path: str) -> dict[str, Any]:
    """Return the OpenAPI document. `with_keys`: the server asks for an API key. `root_path`: prefix behind a proxy."""
    paths: dict[str, Any] = {}
    shapes: set[type] = set()
    for one in operations:
        paths.setdefault(_PATH_PARAMETER.sub(r"{\1}", one.path), {})[one.method.lower()] = one.describe()
        shapes |= {shape for shape in (one.error, one.body, one.answer, *one.events) if shape is not None}
    _, schemas = msgspec.json.schema_components(sorted(shapes, key=lambda shape: shape.__name__), ref_template=REF)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "headrace", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if root_path:
        document["servers"] = [{"url": root_path}]
    if with_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document


def page(document: dict[str, Any], openapi_path: str) -> str:
    """Return an HTML page that shows the OpenAPI document, which is itself served at `openapi_path`."""

    def block(title: str, value: Any) -> str:
        text = html.escape(json.dumps(value, indent=2))
        return f"<details><summary>{title}</summary><pre>{text}</pre></details>"

    routes = "".join(
        block(f"<b>{method.upper()}</b> {html.escape(path)} &mdash; {html.escape(entry['summary'])}", entry)
        for path, methods in document["paths"].items()
        for method, entry in methods.items()
    )
    shapes = "".join(block(html.escape(name), shape) for name, shape in document["components"]["schemas"].items())
    return _PAGE.format(version=__version__, openapi=html.escape(openapi_path), routes=routes, shapes=shapes)
