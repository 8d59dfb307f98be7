"""Runs the `headrace` command: loads the subcommand alone, and turns errors into one line and an exit code.

`--help` loads no torch. This file imports next to nothing until `Signals` are taken:
before that Python answers them with a traceback.
"""

from __future__ import annotations

import _signal  # what `signal` is made of, without its enums, which take longer to make than all else here
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import FrameType

COMMANDS = {
    "generate": ("headrace.cli.generate", "Complete prompts from flags, a file or standard input."),
    "serve": ("headrace.cli.serve", "Serve a model over the OpenAI HTTP API."),
    "bench": ("headrace.cli.bench.command", "Measure latency, throughput, or a running server."),
    "plan": ("headrace.cli.plan", "Predict memory, settings, speed and cost of a model, without a GPU."),
    "quantize": ("headrace.cli.quantize", "Write a model in fewer bits, and say what that changed."),
    "eval": ("headrace.cli.eval", "Score a model's answers on a task, or compare runs item by item."),
    "tune": ("headrace.cli.tune", "Try settings on this machine, and keep those that are faster."),
    "explain": ("headrace.cli.explain", "Explain a vLLM command line flag by flag, and write a better one."),
    "doctor": ("headrace.cli.doctor", "Check this machine for what slows it down, and say how to mend it."),
}
HELP = """\
usage: headrace COMMAND [MODEL] [flags]

LLM inference and serving that tunes itself and says why. MODEL is a Hugging Face id, a local folder, or `demo`, a
tiny model that comes with headrace.

commands:
{commands}

examples:
  headrace generate demo --prompt "Once upon a time"
  headrace serve demo --port 8000
  headrace bench throughput demo --num-prompts 100

`headrace COMMAND --help` lists a command's flags; `headrace --version` prints the version."""


class Signals:
    """Ends a command quietly, with status 128 + number, on Ctrl-C, SIGTERM or a closed terminal.

    A command at work is interrupted by KeyboardInterrupt, so that it releases what it holds. During an import that
    exception could get lost, or be printed, in a callback of the import system. Then, before and after the work, and
    at the second signal, the process ends at once.
    """

    def __init__(self) -> None:
        self.number: int = _signal.SIGINT
        self.at_work = False

    def take(self) -> None:
        """Install the handler; SIGHUP stays ignored under nohup."""
        handler = self.on_signal
        for number in (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP):
            if number != _signal.SIGHUP or _signal.getsignal(number) != _signal.SIG_IGN:  # nohup
                _signal.signal(number, handler)
        import signal

        signal.default_int_handler = handler  # pyrefly: ignore[bad-assignment]  # asyncio takes the place of this one alone

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Ends the command by KeyboardInterrupt, or the process at once where that would not be safe."""
        if not self.at_work or _imports(frame):
            self.exit(number)
        if number != _signal.SIGINT:
            self.number = number
            _signal.raise_signal(_signal.SIGINT)  # an event loop has a handler of its own for it
            return
        self.at_work = False
        raise KeyboardInterrupt

    def exit(self, number: int) -> None:
        """End the process without leaving folders behind; before headrace.process is imported there are none."""
        getattr(sys.modules.get("headrace.process"), "exit_at_once", os._exit)(128 + number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def main(argv: list[str] | None = None) -> int:
    """Run a command, and return its exit code: 2 for a mistake of the user's, 1 for other errors, 130 for Ctrl-C.

    Without `argv` it takes the process's arguments, signals and standard streams.
    """
    signals = Signals()
    if argv is None:
        signals.take()
    from headrace.errors import HeadraceError

    if argv is None:
        from headrace.output import take_streams

        argv = sys.argv[1:]
        take_streams(output_matters=argv[:1] != ["serve"])
    try:
        try:
            signals.at_work = True
            return _dispatch(argv)
        finally:
            signals.at_work = False
            sys.stdout.flush()
    except HeadraceError as error:
        print("headrace: error: " + " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signals.number
    except BrokenPipeError:  # the reader of our output is gone (`| head`)
        return 1


def _dispatch(argv: list[str]) -> int:
    import difflib
    import importlib

    from headrace import __version__
    from headrace.errors import ConfigError

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
