"""The `headrace` command: finds the subcommand, loads it alone, and turns errors into one line and an exit code.

Knows nothing of flags or engines; `--help` loads no torch.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys

from headrace import __version__
from headrace.errors import ConfigError, HeadraceError

COMMANDS = {
    "generate": ("headrace.cli.generate", "Complete prompts: from flags, a file or standard input."),
    "serve": ("headrace.cli.serve", "Serve a model over the OpenAI HTTP API."),
    "bench": ("headrace.cli.bench.command", "Measure latency, throughput, or a running server."),
    "plan": ("headrace.cli.plan", "Plan without a GPU: memory, settings with reasons, speed, cost, commands."),
    "tune": ("headrace.cli.tune.command", "Measure settings around the plan, and keep what is better."),
    "explain": ("headrace.cli.explain", "Say of a vLLM command line what each flag does, and write a better one."),
    "doctor": ("headrace.cli.doctor", "Check this machine: what would hurt, what it costs, how to mend it."),
}
HELP = """\
usage: headrace COMMAND [MODEL] [flags]

LLM inference and serving that tunes itself and says why. MODEL is `demo`, a local folder, or a Hugging Face id.

commands:
{commands}

examples:
  headrace generate demo --prompt "Once upon a time"
  headrace serve demo --port 8000
  headrace bench throughput demo --num-prompts 100

`headrace COMMAND --help` lists a command's flags; `headrace --version` prints the version."""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for what the user can mend, 1 for what broke, 130 for Ctrl-C."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else argv)
    except HeadraceError as error:
        sys.stdout.flush()
        print("headrace: error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`| head`); Python's own flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(HELP.format(commands="\n".join(f"  {name:{width}}  {text}" for name, (_, text) in COMMANDS.items())))
        return 0
    if argv[0] in ("-V", "--version", "version"):
        print(f"headrace {__version__}")
        return 0
    if argv[0] not in COMMANDS:
        kind = "flag" if argv[0].startswith("-") else "command"
        near = difflib.get_close_matches(argv[0], COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown {kind} {argv[0]!r}; {hint}")
    return int(importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
