"""Defines the parts of an answer, which come in the order in which a client may see them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import msgspec


class Reasoning(msgspec.Struct, frozen=True):
    """Holds a piece of the model's reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """Holds a piece of what the model says to the user."""

    text: str


class CallStart(msgspec.Struct, frozen=True):
    """A tool call begins; its arguments follow."""

    index: int
    name: str
    id: str | None
    """Only where the text itself names one, as Kimi's does; the server makes the others."""


class Arguments(msgspec.Struct, frozen=True):
    """Holds a piece of the JSON text of a call's arguments."""

    index: int
    text: str


Event = Reasoning | Content | CallStart | Arguments

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
"""A reading in progress: it yields events, and None where more text is needed before anything can be decided."""
