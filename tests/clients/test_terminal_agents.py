"""Agents of the terminal, as people install them from npm: each reads a file with a tool of its own and says what is
in it. Their settings are those of docs/agents.md."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.scripted.engine import Scripted, ScriptedServers
from tests.scripted.families import FAMILIES, Call, Said
from tests.speed import PATIENCE

pytestmark = pytest.mark.slow
FAMILY = dataclasses.replace(FAMILIES["qwen3"], name="long", context=120_000)
"""Their first prompts have some 40,000 tokens of the tests' tokenizer."""


@pytest.fixture
def word() -> str:
    return f"wombat{random.randrange(10**6)}"


@pytest.fixture
def scripted(servers: ScriptedServers) -> Scripted:
    return servers(FAMILY)


def run(scripted: Scripted, folder: Path, word: str, call: Call, *command: str, **environment: str) -> str:
    """Let the model call a tool and then say what it has read. Return what the agent prints; its home is `folder`."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    (folder / "notes.txt").write_text(f"The secret word is {word}.\n")
    scripted.play(
        ("", Said(calls=(call,), reasoning="I should look.")),
        (f"secret word is {word}", Said(f"The word is {word}.", reasoning="Seen.")),
    )
    done = subprocess.run(
        [*command, "What is the secret word in notes.txt?"], cwd=folder, stdin=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder), "PWD": str(folder), **environment},
        capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The word is {word}." in done.stdout
    return done.stdout


def test_claude_code(scripted: Scripted, tmp_path: Path, word: str) -> None:
    call = Call("Bash", {"command": "cat notes.txt", "description": "Read the notes"})
    said = run(
        scripted, tmp_path, word, call, "claude", "--allowedTools=Bash(cat:*)", "--output-format=json", "-p",
        ANTHROPIC_BASE_URL=scripted.url, ANTHROPIC_AUTH_TOKEN="none", ANTHROPIC_MODEL=scripted.name,
        ANTHROPIC_SMALL_FAST_MODEL=scripted.name, CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
    )  # fmt: skip
    result = json.loads(said)
    assert (result["num_turns"], result["is_error"]) == (2, False)
    assert result["usage"]["cache_read_input_tokens"] > 10_000  # the second prompt begins with the first


def test_codex(scripted: Scripted, tmp_path: Path, word: str) -> None:
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "config.toml").write_text(f"""
model = "{scripted.name}"
model_provider = "headrace"
web_search = "disabled"

[model_providers.headrace]
name = "headrace"
base_url = "{scripted.url}/v1"
wire_api = "responses"
""")
    options = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    run(scripted, tmp_path, word, Call("exec_command", {"cmd": "cat notes.txt"}), "codex", "exec", *options)


def test_opencode(scripted: Scripted, tmp_path: Path, word: str) -> None:
    models = {scripted.name: {"name": scripted.name, "limit": {"context": FAMILY.context, "output": 8192}}}
    provider = {
        "npm": "@ai-sdk/openai-compatible", "name": "headrace", "models": models,
        "options": {"baseURL": f"{scripted.url}/v1", "apiKey": "none"},
    }  # fmt: skip
    name = f"headrace/{scripted.name}"
    settings = {"model": name, "small_model": name, "autoupdate": False, "provider": {"headrace": provider}}
    (tmp_path / ".config" / "opencode").mkdir(parents=True)
    (tmp_path / ".config" / "opencode" / "opencode.json").write_text(json.dumps(settings))
    call = Call("bash", {"command": "cat notes.txt", "description": "Read the notes"})
    off = {f"OPENCODE_DISABLE_{name}": "1" for name in ("MODELS_FETCH", "LSP_DOWNLOAD", "DEFAULT_PLUGINS")}
    run(scripted, tmp_path, word, call, "opencode", "run", **off)
