"""The OpenAPI description from the msgspec shapes, and a page that shows it without the internet."""

from __future__ import annotations

import html
import json
from typing import Any

import msgspec

from headrace.server import protocol, replies

SHAPES: list[type[msgspec.Struct]] = [
    protocol.CompletionRequest, protocol.Completion, protocol.ChatCompletionRequest, protocol.ChatCompletion,
    protocol.ChatChunk, protocol.TokenizeRequest, protocol.TokenizeAnswer, protocol.DetokenizeRequest,
    protocol.DetokenizeAnswer, protocol.ModelList, protocol.ModelCard, protocol.PlanAnswer, protocol.PlanDecision,
    protocol.PlanMemory, protocol.PlanMemoryPart, replies.ErrorObject,
]  # fmt: skip
REF = "#/components/schemas/{name}"
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>headrace API</title>
<style>body{{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}}
summary{{cursor:pointer}}pre{{background:#f4f4f4;padding:1em;overflow:auto}}b{{display:inline-block;width:4em}}</style>
<h1>headrace {version}</h1><p>The machine-readable form is at <a href="{openapi}">openapi.json</a>.</p>
<h2>Routes</h2>{routes}<h2>Shapes</h2>{shapes}</html>"""


def _content(shape: type) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": REF.format(name=shape.__name__)}}}


def takes(shape: type) -> dict[str, Any]:
    """FastAPI's `openapi_extra` for a route whose body is `shape`."""
    return {"requestBody": {"required": True, "content": _content(shape)}}


def takes_path(name: str) -> dict[str, Any]:
    """The same for a parameter in the path, which FastAPI sees only in an endpoint's signature."""
    return {"parameters": [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}}]}


def gives(shape: type | None, *errors: int, event: type | None = None) -> dict[int | str, dict[str, Any]]:
    """FastAPI's `responses`: `shape`, and error objects for these statuses. `event`: the shape of a streamed event."""
    answer: dict[str, Any] = {"description": "OK"}
    if shape is not None:
        answer["content"] = _content(shape)
        if event is not None:
            answer["content"]["text/event-stream"] = {"schema": {"$ref": REF.format(name=event.__name__)}}
    found: dict[int | str, dict[str, Any]] = {200: answer}
    found.update({status: {"description": "Error", "content": _content(replies.ErrorObject)} for status in errors})
    return found


def complete(schema: dict[str, Any], with_keys: bool, root_path: str) -> dict[str, Any]:
    """FastAPI's description of the routes, with the shapes that they refer to."""
    _, components = msgspec.json.schema_components(SHAPES, ref_template=REF)
    filled = {**schema, "components": {**schema.get("components", {}), "schemas": components}}
    if root_path:
        filled["servers"] = [{"url": root_path}]
    if with_keys:
        filled["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        filled["security"] = [{"key": []}]
    return filled


def page(schema: dict[str, Any], openapi_path: str) -> str:
    def block(title: str, value: Any) -> str:
        text = html.escape(json.dumps(value, indent=2))
        return f"<details><summary>{title}</summary><pre>{text}</pre></details>"

    routes = "".join(
        block(f"<b>{method.upper()}</b> {html.escape(path)} &mdash; {html.escape(entry.get('summary', ''))}", entry)
        for path, methods in schema["paths"].items()
        for method, entry in methods.items()
    )
    shapes = "".join(block(html.escape(name), shape) for name, shape in schema["components"]["schemas"].items())
    version = html.escape(schema["info"]["version"])
    return _PAGE.format(version=version, openapi=html.escape(openapi_path), routes=routes, shapes=shapes)
