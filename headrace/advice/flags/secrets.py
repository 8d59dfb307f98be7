"""Hides what must not be printed: values of flags, variables and words whose names say that they are secret."""

from __future__ import annotations

import re

HIDDEN = "***"
SECRET = re.compile(r"TOKEN(?!IZ)|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
COUNTED = re.compile(r"(?:\d{1,7}(?:\.\d+)?|true|false)?", re.IGNORECASE)
"""Values that are no secrets, as in `VLLM_MAX_TOKENS_PER_EXPERT=1024`."""
ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS")
VALUE = r"""("[^"]*"?|'[^']*'?|[^\s"';&|]+)"""
PAIR = re.compile(rf"""([\w.-]*(?:{SECRET.pattern})[\w.-]*)(["']?\s*[=:]\s*){VALUE}""", re.IGNORECASE)
FLAG = re.compile(rf"(--?[\w.-]*(?:{SECRET.pattern})[\w.-]*)(\s+)(?!-){VALUE}", re.IGNORECASE)
WORD = re.compile(rf"(?<!\S)([\w.-]*(?:{SECRET.pattern})[\w.-]*=)(\S+)", re.IGNORECASE)
BEARER = re.compile(r"""\b(bearer|basic)(\s+)([^\s"']+)""", re.IGNORECASE)


def is_secret(name: str, value: str) -> bool:
    """Return whether a value is to be hidden, judged by its name; one that counts something is not."""
    if SECRET.search(name) is None:
        return False
    last = re.split(r"[^A-Z0-9]+", name.upper())[-1]
    return last in ENDINGS or COUNTED.fullmatch(value) is None


def masked(text: str) -> str:
    """Return shell text without the secrets in it."""

    def mask(match: re.Match[str]) -> str:
        hides = is_secret(match[1], match[3].strip("\"'"))
        return f"{match[1]}{match[2]}{HIDDEN}" if hides else match[0]

    return BEARER.sub(rf"\1\2{HIDDEN}", FLAG.sub(mask, PAIR.sub(mask, text)))


def without_assignments(text: str) -> str:
    """Return words without the secrets that some of them assign (`API_KEY=...`)."""
    return WORD.sub(lambda match: match[1] + HIDDEN if is_secret(match[1][:-1], match[2]) else match[0], text)
