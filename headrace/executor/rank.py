"""Runs one rank in a process of its own, obeying the executor's commands in order.

Results leave through a thread of their own, so that the next command is taken up while the device still computes.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import msgspec
import zmq

from headrace.distributed.network import connect
from headrace.distributed.progress import Progress
from headrace.distributed.ranks import Place, Ranks
from headrace.distributed.store import SharedStore
from headrace.errors import HeadraceError, crossing_name
from headrace.executor.messages import (
    AdapterRead,
    Command,
    Execute,
    Facts,
    Failed,
    Load,
    Profile,
    RankConfig,
    ReadAdapter,
    Sample,
    StepDone,
    Stop,
)
from headrace.models.served import read_served_config
from headrace.process import read_config
from headrace.runner.pending import FinishedStep, MaskedStep, PendingStep
from headrace.runner.worker import Worker


def _connect(config: RankConfig, context: zmq.Context[zmq.Socket[bytes]], kind: int, address: str) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    connect(socket, address, config.keys)
    return socket


def _send_results(
    config: RankConfig,
    context: zmq.Context[zmq.Socket[bytes]],
    worker: Worker,
    pending: queue.Queue[PendingStep | FinishedStep],
) -> None:
    """Send the results of steps in order, until the process ends."""
    socket = _connect(config, context, zmq.PUSH, config.replies)
    encoder = msgspec.msgpack.Encoder()
    while True:
        step = pending.get()
        try:
            reply: StepDone | Failed = StepDone(step.result())
            worker.check_sums()
        except Exception as error:
            reply = _failure(config.rank, error)
        socket.send(encoder.encode(reply))


def _read_adapters(
    config: RankConfig, context: zmq.Context[zmq.Socket[bytes]], worker: Worker, wanted: queue.Queue[ReadAdapter]
) -> None:
    """Read adapters one after the other, and say how that went, until the process ends."""
    socket = _connect(config, context, zmq.PUSH, config.replies)
    encoder = msgspec.msgpack.Encoder()
    while True:
        command = wanted.get()
        socket.send(encoder.encode(AdapterRead(worker.read_adapter(command.request, command.dropped))))


def _failure(rank: int, error: Exception) -> Failed:
    if not isinstance(error, HeadraceError):
        traceback.print_exc(file=sys.stderr)
    return Failed(rank, crossing_name(error), str(error))


def main(argv: list[str]) -> int:
    """Run the rank whose RankConfig `argv` names; return the process's exit status."""
    config = msgspec.msgpack.decode(read_config(argv), type=RankConfig)
    context = zmq.Context()
    commands = _connect(config, context, zmq.PULL, config.commands)
    replies = _connect(config, context, zmq.PUSH, config.replies)
    pending: queue.Queue[PendingStep | FinishedStep] = queue.Queue()
    parallel = Ranks(tp=config.config.tensor_parallel_size, pp=config.config.pipeline_parallel_size)
    answers = parallel.place(config.rank) == Place(0, parallel.pp - 1, 0)
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Command)
    folder = Path(config.folder)
    try:
        model_config = read_served_config(folder, config.config)
        progress = Progress(Path(config.progress), parallel.world, config.rank)
        rendezvous: Any = config.rendezvous
        if config.keys is not None:
            rendezvous = SharedStore(config.rendezvous, config.keys, f"{config.group}/")
        worker = Worker(config.config, folder, model_config, config.rank, rendezvous, progress, config.address)
        if answers:
            sender = (config, context, worker, pending)
            threading.Thread(target=_send_results, args=sender, name="results", daemon=True).start()
        wanted: queue.Queue[ReadAdapter] = queue.Queue()
        if config.config.enable_lora:
            reader = (config, context, worker, wanted)
            threading.Thread(target=_read_adapters, args=reader, name="adapters", daemon=True).start()
        while not isinstance(command := decoder.decode(commands.recv()), Stop):
            progress.take()
            if isinstance(command, Execute | Sample):
                step = worker.execute(command.step) if isinstance(command, Execute) else worker.sample(command.masks)
                if answers and not isinstance(step, MaskedStep):
                    pending.put(step)
                continue
            if isinstance(command, ReadAdapter):
                wanted.put(command)
                continue
            if isinstance(command, Load):
                facts = worker.load()
            elif isinstance(command, Profile):
                facts = worker.profile(command.config)
            else:
                facts = worker.initialize_cache(command.num_pages)
            replies.send(encoder.encode(Facts(config.rank, facts)))
        worker.close()
    except Exception as error:
        replies.send(encoder.encode(_failure(config.rank, error)))
        context.destroy(linger=2000)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
