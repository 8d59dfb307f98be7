"""Ranks on two machines, which are two addresses of this one: same tokens; whoever is gone or does not belong is
named."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from headrace import LLM, SamplingParams
from headrace.config import EngineConfig
from headrace.distributed.progress import Progress
from headrace.engine import node
from headrace.engine.node import run_node
from headrace.errors import ConfigError, EngineDeadError, PortInUseError
from headrace.executor import multiproc, nodes
from headrace.executor.messages import RankConfig, StartRanks
from headrace.executor.nodes import Nodes
from headrace.hub import DEMO_FOLDER
from headrace.process import Child, free_port, spawn
from tests.speed import PATIENCE, wait_until

SECRET = "the secret of these two machines"
SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 4, "max_model_len": 256,
    "cpu_threads": 1,
}  # fmt: skip
PROMPTS = [{"prompt_token_ids": [5, 6, 7]}, {"prompt_token_ids": [*range(20, 60)]}]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings that both machines have."""
    monkeypatch.setenv("HEADRACE_SECRET", SECRET)
    port = free_port()
    return {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1", "master_port": port}


class Node(threading.Thread):
    """`headrace serve --headless`, in a thread; `ended` is what it returned or raised."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(daemon=True)
        self.config = EngineConfig(**{"node_rank": 1, **settings})
        self.ended: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.ended = run_node(self.config)
        except Exception as error:
            self.ended = error


class First:
    """The first machine's ends, without ranks."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        config = EngineConfig(**settings)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.nodes = Nodes(config, config, DEMO_FOLDER, self.context, f"ipc://{tmp_path}/store")

    def look_until_ended(self, node: Node) -> Any:
        """What ended a node."""
        self.look_until(lambda: not node.is_alive())
        return node.ended

    def look_until(self, holds: Callable[[], Any]) -> None:
        def looked() -> object:
            self.nodes.look()
            return holds()

        wait_until(looked)

    def close(self) -> None:
        if not self.context.closed:
            self.nodes.close()
            self.context.destroy(linger=0)


@pytest.fixture
def first(tmp_path: Path, two: dict[str, Any]) -> Iterator[First]:
    made = First(tmp_path, **two)
    yield made
    made.close()


def test_ranks_on_two_machines_answer_as_on_one_and_a_killed_one_is_named(
    two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: dict[int, Child] = {}

    def noting(module: str, config: bytes, environment: dict[str, str]) -> Child:
        child = spawn(module, config, environment)
        ranks[msgspec.msgpack.decode(config, type=RankConfig).rank] = child
        return child

    monkeypatch.setattr(multiproc, "spawn", noting)
    there = Node(**SETTINGS, **two)
    with LLM("demo", **SETTINGS) as alone:
        wanted = [output.outputs[0].token_ids for output in alone.generate(PROMPTS, GREEDY, use_tqdm=False)]
    llm = LLM("demo", **SETTINGS, **two)
    got = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert got == wanted
    assert sorted(ranks) == [0, 1]
    ranks[1].process.kill()
    with pytest.raises(EngineDeadError) as caught:
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert str(caught.value) == "rank 1 on node 1 (127.0.0.1) died (exit code -9)"
    llm.shutdown()
    there.join(PATIENCE)
    assert isinstance(there.ended, EngineDeadError)
    assert str(there.ended) == f"the engine of node 0 has ended: {caught.value}"
    assert not any(child.is_alive() for child in ranks.values())


def test_a_node_runs_ranks_for_one_executor_after_another(
    first: First, two: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that has to be made anew has another executor; a node ends once none follows."""
    started: list[tuple[RankConfig, Child]] = []

    def start_rank(config: RankConfig) -> Child:
        started.append((config, Child(subprocess.Popen(["sleep", "600"]))))
        Progress(Path(config.progress), 2, config.rank).take()
        return started[-1][1]

    monkeypatch.setattr(node, "start_rank", start_rank)
    monkeypatch.setattr(node, "NEXT_SECONDS", PATIENCE)
    there, seen = Node(**two), Progress(tmp_path / "progress", 2)
    order = StartRanks(1, EngineConfig(**two), {0: 1, 1: 2}, 3)
    first.nodes.begin(order, seen)
    first.look_until(lambda: seen.read()[1].taken)
    config = started[0][0]
    assert (config.rank, config.commands, config.replies) == (1, "tcp://127.0.0.1:2", "tcp://127.0.0.1:3")
    first.nodes.begin(msgspec.structs.replace(order, group=2), seen)
    first.look_until(lambda: len(started) == 2)
    assert not started[0][1].is_alive()
    assert first.nodes.problem() == ""  # the first group's rank was ended, and has not died
    first.nodes.end()
    first.close()
    first.__init__(tmp_path, **two)  # type: ignore[misc]
    first.nodes.begin(order, seen)
    first.look_until(lambda: len(started) == 3)
    started[2][1].stop(0.0)
    first.look_until(first.nodes.problem)
    assert first.nodes.problem(killed=True) == "rank 1 on node 1 (127.0.0.1) died (exit code -15)"
    first.nodes.end()
    monkeypatch.setattr(node, "NEXT_SECONDS", 0.0)
    first.close()
    there.join(PATIENCE)
    assert there.ended == 0
    assert not any(child.is_alive() for _, child in started)


def test_a_node_with_other_settings_is_refused_by_name(first: First, two: dict[str, Any]) -> None:
    ended = first.look_until_ended(Node(**two, max_num_seqs=3))
    assert isinstance(ended, ConfigError)
    assert str(ended) == "node 0 refuses this node: max_num_seqs is not given on node 0 and 3 on node 1"


def test_a_node_with_another_version_is_refused_by_name(
    first: First, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, name = nodes.must_be_alike(DEMO_FOLDER), "torch's version"
    monkeypatch.setattr(node, "must_be_alike", lambda folder: {**here, name: "0.1"})
    ended = first.look_until_ended(Node(**two))
    assert isinstance(ended, ConfigError)
    assert f"{name} is {here[name]} on node 0 and 0.1 on node 1" in str(ended)


def test_a_node_without_the_secret_gets_no_answer(
    first: First, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", "some other secret of as many characters")
    ended = first.look_until_ended(Node(**two))
    assert isinstance(ended, ConfigError)
    assert str(ended).endswith("HEADRACE_SECRET or --secret-file must be the same on all nodes")
    first.nodes.look()
    assert first.nodes.strangers > 0
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.0)
    assert first.nodes.problem().endswith(f"; {first.nodes.strangers} connections did not know the secret")


def test_a_node_that_does_not_come_is_named_on_either_side(
    first: First, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert first.nodes.problem() == ""
    monkeypatch.setattr(nodes, "JOIN_SECONDS", 0.0)
    assert first.nodes.problem().startswith("node 1 has not come in ")
    monkeypatch.setattr(node, "JOIN_SECONDS", 0.1)
    with pytest.raises(
        EngineDeadError, match=r"node 0 has not answered at tcp://127\.0\.0\.1:\d+ in \d+ s: is it started"
    ):
        run_node(EngineConfig(**{**two, "node_rank": 1, "master_port": 1}))


@pytest.mark.parametrize(
    ("secret", "settings", "message"),
    [
        ("", {}, "several machines need a secret that they share, in HEADRACE_SECRET or a --secret-file"),
        ("short", {}, "HEADRACE_SECRET must have at least 16 characters, got 5"),
        (SECRET, {"secret_file": "/nowhere/secret"}, "secret_file '/nowhere/secret' cannot be read"),
        (SECRET, {"master_addr": "192.0.2.1"}, "master_addr 192.0.2.1 is no address of this machine, node 0"),
        (SECRET, {"master_addr": "no such host"}, "master_addr 'no such host' is not a host that this machine knows"),
        (SECRET, {"master_addr": "0.0.0.0"}, "give this machine's own address in VLLM_HOST_IP"),
        (SECRET, {"node_rank": 1}, "node_rank is 1: this machine runs `headrace serve --headless`"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    two: dict[str, Any], monkeypatch: pytest.MonkeyPatch, secret: str, settings: dict[str, Any], message: str
) -> None:
    monkeypatch.setenv("HEADRACE_SECRET", secret)
    with pytest.raises(ConfigError) as caught:
        LLM("demo", **SETTINGS, **{**two, **settings})
    assert message in str(caught.value)


def test_a_port_that_is_taken(first: First, tmp_path: Path, two: dict[str, Any]) -> None:
    with pytest.raises(PortInUseError, match="choose another --master-port"):
        LLM("demo", **SETTINGS, **two)


def test_the_secret_may_stand_in_a_file(tmp_path: Path, two: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_SECRET")
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    made = First(tmp_path, **two, secret_file=str(tmp_path / "secret"))
    made.close()
    monkeypatch.setenv("HEADRACE_SECRET", SECRET)
    same = First(tmp_path, **two)
    assert same.nodes.keys == made.nodes.keys
    same.close()
