"""Measures and proves layouts over several GPUs of one machine, part by part, none of which takes 10 minutes.

    python bench/many_gpus.py --gpus 8 --json many.json        all parts that are not in many.json yet
    python bench/many_gpus.py --gpus 2 --part equal,kill --json two.json
    python bench/many_gpus.py --smoke                          two ranks on the CPU: proves that the code runs, no more

Parts:

    streams           headrace's own sums, and exchanges of engines that share experts (tokens are gathered, sums
                      scattered), by two ranks that are streams of one GPU: thousands with random delays, alone and in
                      graphs, against their reference. Needs one GPU
    collectives       the same by processes, a GPU each, beside NCCL's; sums in two shots, by how their numbers travel,
                      and from which size on they are the fastest; and sends between stages: microseconds by size
    equal             layouts give the tokens of one GPU under --batch-invariant (with experts: those of two GPUs)
    step-LAYOUT       start, decode steps at batch 1 to 128, and output tokens/s of a layout, e.g. step-tp2-pp2, by how
                      many requests come at once; those named moe-... are of Qwen3-30B-A3B, whose experts are in slices
                      (tp), whole (ep), or in each engine (dp); others by MODELS_OF.
                      step-LAYOUT-nccl: the same with NCCL's sums alone, where it is asked for
    serve-LAYOUT      the same layouts behind HTTP: output tokens/s of 1,000 requests at once, and of 128 in flight
    kill              ranks are killed every 90 s in mixed load: the error names the rank, no process is left, and the
                      next start gives the right tokens
    kill-experts      the same of engines that share their experts, all of which end

Each part runs in a process of its own and is written to --json as soon as it ends, so that a run that is cut off goes
on where it was; `--again` measures anew. Weights are random, prompts token ids. Exit code 1 if a part fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from h200_parts.models import MODELS, BenchModel
from h200_parts.serving import START_SECONDS
from h200_parts.settings import Settings
from server_process import load, serving

from headrace.distributed.ranks import Ranks
from headrace.environment import child_environment
from headrace.kernels.peers import QUICK_BITS
from headrace.process import free_port

MOST_SECONDS = 560


class Layout(NamedTuple):
    """Says how a model is spread."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: bool = False
    nodes: int = 1
    """machines, each of which is this one"""

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp


def layout_of(name: str) -> Layout:
    """Return the layout of a name: as tp, pp, dp and nodes say; ep: experts are whole, on so many GPUs."""
    sizes = {what: int(size) for what, size in re.findall(r"(tp|pp|dp|ep|nodes)(\d)", name)}
    experts = sizes.pop("ep", 0)
    return Layout(**{"tp": experts // sizes.get("dp", 1) or 1} | sizes, ep=experts > 0)


DENSE = ("tp1", "tp2", "pp2", "dp2", "tp2-nodes2", "tp4", "tp2-pp2", "tp8", "tp4-pp2")
SPARSE = ("tp1", "tp2", "ep2", "dp2", "dp2-ep2", "tp2-dp2-ep4", "dp4-ep4", "tp8", "ep8", "dp8", "dp8-ep8")
FURTHER = {
    "70b": ("tp2", "pp2", "tp4", "tp8", "dp8"),
    "lite": ("tp2", "dp2-ep2"),
    "235b": ("tp4", "ep4", "dp4-ep4", "tp8", "dp8-ep8"),
    "405b": ("tp8",),
    "maverick": ("tp8", "dp8-ep8"),
    "r1": ("tp8", "ep8", "dp8-ep8"),
}
LAYOUTS = {
    name: layout_of(name)
    for name in (*DENSE, *(f"{model}-{name}" for model, names in ({"moe": SPARSE} | FURTHER).items() for name in names))
}
MODELS_OF = {
    "moe": MODELS["moe"],
    "lite": MODELS["v2-lite"],
    "70b": BenchModel("70b", "Llama-3.1-70B fp8", "llama-3.1-70b", quantization="fp8"),
    "235b": BenchModel("235b", "Qwen3-235B-A22B fp8", "qwen3-235b-a22b", quantization="fp8"),
    "405b": BenchModel("405b", "Llama-3.1-405B fp8", "llama-3.1-405b", quantization="fp8"),
    "maverick": BenchModel("maverick", "Llama-4-Maverick fp8", "llama-4-maverick", quantization="fp8"),
    "r1": BenchModel("r1", "DeepSeek-R1, FP8 blocks", "deepseek-r1"),
}
"""what a layout's name begins with -> the model; others are of Llama-3.1-8B"""
AT_ONCE = {"lite": ((64, 512, 1024), 128, 512), "r1": ((64, 512, 1024, 2048), 1024, 1024)}
"""of those: how many requests come at once, and their tokens in and out; others: 500 of 128 and 512"""
SERVED = ("tp1", "dp2", "moe-tp1", "moe-tp2", "moe-ep2", "moe-dp2", "moe-dp2-ep2", "70b-tp4", "70b-dp8", "moe-dp8-ep8")
TOKENS, HIDDEN = (1, 8, 32, 128, 512, 2048, 8192), 8192
BATCHES = (1, 8, 32, 128)
KILL_SECONDS, KILL_EVERY = 530.0, 90.0
SEED = 0


def parts_for(gpus: int) -> list[str]:
    """Return the parts that so many GPUs can run, in order."""
    fitting = [name for name, layout in LAYOUTS.items() if layout.gpus <= gpus]
    steps = [f"step-{name}" for name in fitting]
    served = [f"serve-{name}" for name in fitting if name in SERVED]
    return ["streams", "collectives", "equal", *steps, *served, "kill", "kill-experts"]


def model_of(layout: str) -> BenchModel:
    return MODELS_OF.get(layout.partition("-")[0], MODELS["bf16"])


def settings_of(options: argparse.Namespace, layout: str, **more: Any) -> Settings:
    """Return what an engine of that layout is started with, by `more` besides."""
    tp, pp, dp, ep, _ = LAYOUTS[layout]
    spread = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    return Settings(Path(options.work), options.smoke, engine=spread | {"enable_expert_parallel": ep} | more)


def engine(options: argparse.Namespace, layout: str, **more: Any) -> Any:
    """Return an LLM of that layout with random weights."""
    from headrace.llm import LLM

    knobs = settings_of(options, layout, **more).engine_knobs(model_of(layout))
    if (nodes := LAYOUTS[layout].nodes) > 1:
        port = start_nodes(knobs["model"], LAYOUTS[layout])
        knobs |= {"nnodes": nodes, "master_addr": "127.0.0.1", "master_port": port}
    return LLM(**knobs, skip_tokenizer_init=True)


def start_nodes(folder: str, layout: Layout) -> int:
    """Start the other machines of a layout, each of which sees GPUs of its own; return the port where they meet."""
    os.environ.setdefault("HEADRACE_SECRET", secrets.token_hex())
    port, each = free_port(), layout.tp * layout.pp // layout.nodes
    for node in range(1, layout.nodes):
        command = [sys.executable, "-m", "headrace.cli.main", "serve", folder, "--load-format", "dummy"]
        command += ["--headless", "-tp", str(layout.tp), "-pp", str(layout.pp), "--nnodes", str(layout.nodes)]
        command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
        gpus = ",".join(str(gpu) for gpu in range(node * each, (node + 1) * each))
        subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus})
    return port


def prompts(count: int, length: int) -> list[list[int]]:
    draw = random.Random(SEED + count)
    return [[draw.randrange(3, 500) for _ in range(length)] for _ in range(count)]


def generate(llm: Any, count: int, length: int, output: int) -> tuple[list[list[int]], float]:
    """Return the tokens of so many requests that come at once, and the seconds that they took."""
    from headrace.sampling_params import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    began = time.perf_counter()
    found = llm.generate(prompts(count, length), params, use_tqdm=False)
    return [one.outputs[0].token_ids for one in found], time.perf_counter() - began


def generate_on(llm: Any, count: int, output: int) -> None:
    """Generate until something fails."""
    for _ in range(1000):
        generate(llm, count, 9, output)


def collectives(options: argparse.Namespace) -> dict[str, Any]:
    """Time collectives between all GPUs, where tokens are those of each GPU: {"all_reduce": {tokens: us}, "norm": the
    same with residual and norm, "send": ..., "exchange": ...}; with -nccl behind: NCCL's alone, with -one: in one shot,
    with -FP, -INT8 and so on: in two. "faster_from": see `break_even`. "error", if there is one, says what own sums got
    wrong."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.gpus) as pool:
        command = [sys.executable, __file__, "--rank-of", f"{folder}/meet", "--gpus", str(options.gpus)]
        command += ["--smoke"] if options.smoke else []
        environment = child_environment(TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
        run = partial(subprocess.run, capture_output=True, text=True, env=environment)
        done = list(pool.map(lambda rank: run([*command, f"--rank={rank}"]), range(options.gpus)))
    if failed := [one.stderr[-2000:] for one in done if one.returncode]:
        raise RuntimeError(failed[0])
    found: dict[str, Any] = json.loads(done[0].stdout.splitlines()[-1])
    return found


def break_even(found: dict[str, Any]) -> dict[str, int]:
    """Return {how numbers travel: from how many bytes on sums in two shots were the fastest at all sizes measured}, of
    those that were at the largest."""
    least: dict[str, int] = {}
    for name in QUICK_BITS:
        for tokens, us in sorted(found[f"all_reduce-{name}"].items(), reverse=True):
            if us >= min(found[f"all_reduce-{other}"].get(tokens, us + 1) for other in ("nccl", "one")):
                break
            least[name] = tokens * HIDDEN * 2
    return least


def by_library(own: Any, call: Any) -> None:
    """Call it while the kernels that sum over ranks are off."""
    is_on, own.on = own.on, False
    call()
    own.on = is_on


def time_collectives(options: argparse.Namespace) -> None:
    """Be one rank of `collectives`, and print its times."""
    import torch
    from peer_sums import SIZES, graph_us, normed, race

    from headrace.distributed.mesh import init_mesh
    from headrace.kernels.cases import Inputs
    from headrace.kernels.peers import all_reduce, all_reduce_in_two

    device = torch.device("cpu") if options.smoke else torch.device("cuda", options.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_mesh(options.rank, Ranks(tp=options.gpus), options.rank_of, device, timedelta(minutes=2))
    group, own = mesh.tp, mesh.tp.peers
    found: dict[str, Any] = {"send": {}, "own": own is not None or group.no_peers}
    if own is not None:
        own.most_looks, problem = 1 << 24, ""
        try:
            stream = torch.cuda.Stream()
            found["sums"] = race([(own, stream)], lambda seed: Inputs(torch.bfloat16, device, seed), SIZES, 300, 500)
        except RuntimeError as error:
            problem = str(error)
        own.on = not group.largest(bool(problem), device)
        found |= {} if own.on else {"error": problem or "another rank's sums are wrong"}
    repeats = 3 if options.smoke else 200

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def microseconds(call: Any) -> float:
        times = []
        for _ in range(3):
            call()
            wait()
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            wait()
            times.append((time.perf_counter() - began) / repeats * 1e6)
        return statistics.median(times)

    for tokens in TOKENS[:2] if options.smoke else TOKENS:
        x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16, device=device)
        exchange = partial(lambda x: group.scatter_rows(group.gather_rows(x)), x)
        ways: dict[str, Any] = {"all_reduce": partial(group.all_reduce, x), "exchange": exchange}
        if own is not None:
            make = Inputs(torch.bfloat16, device, tokens)
            residual, weight = make.random(tokens, HIDDEN), make.random(HIDDEN)
            ways["all_reduce-nccl"] = partial(own.library, x)
            ways |= {
                f"all_reduce-{name}": partial(all_reduce_in_two, x, own, bits) for name, bits in QUICK_BITS.items()
            }
            ways["norm-nccl"] = partial(normed, residual, x, weight, None, own.library)
            ways["exchange-nccl"] = partial(by_library, own, exchange)
            if x.nbytes <= own.most:
                ways["all_reduce-one"] = partial(all_reduce, x, own)
            if own.take(x):
                ways["norm"] = partial(normed, residual, x, weight, own)
        for name, call in ways.items():
            found.setdefault(name, {})[tokens] = microseconds(call) if own is None else graph_us(call)

        def there_and_back(x: Any = x) -> None:
            if options.rank == 0:
                group.send(x, 1)()
                group.receive(x, 1)
            elif options.rank == 1:
                group.receive(x, 0)
                group.send(x, 0)()

        found["send"][tokens] = microseconds(there_and_back) / 2
    if own is not None:
        found["faster_from"] = break_even(found)
    if own is not None and own.gave_up and "error" not in found:
        found["error"] = f"rank {options.rank} gave up while sums were timed"
    mesh.close()
    print(json.dumps(found))


def equal(options: argparse.Namespace) -> dict[str, Any]:
    """Compare the tokens of all layouts with those of one GPU. Over more than two, sums of experts have no fixed order;
    engines that share them compute no tokens one by one, as a CPU does where --batch-invariant is asked."""
    count, length, output = (3, 9, 6) if options.smoke else (32, 200, 64)
    expected: dict[bool, list[list[int]]] = {}
    same: dict[str, bool] = {}
    for layout, spread in LAYOUTS.items():
        sparse = layout.startswith("moe")
        if layout.partition("-")[0] in FURTHER:  # in fp8, which does not go with --batch-invariant, or over latents
            continue
        if spread.gpus > min(options.gpus, 2 if sparse else options.gpus):
            continue
        exact = {"dtype": "float32"} if options.smoke and sparse else {"dtype": "bfloat16", "batch_invariant": True}
        llm = engine(options, layout, **exact)
        tokens, _ = generate(llm, count, length, output)
        llm.shutdown()
        same[layout] = tokens == expected.setdefault(sparse, tokens)
    if not all(same.values()):
        raise RuntimeError(
            f"layouts give other tokens than one GPU: {[name for name, is_same in same.items() if not is_same]}"
        )
    return {"same": same}


def step(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Measure a layout: start, decode steps in milliseconds by batch, output tokens/s of many requests."""
    began = time.perf_counter()
    llm = engine(options, layout.removesuffix("-nccl"), disable_custom_all_reduce=layout.endswith("-nccl"))
    found: dict[str, Any] = {"start_s": time.perf_counter() - began, "step_ms": {}}
    if (facts := getattr(llm._core, "facts", None)) is not None:  # of one engine
        found["notes"] = [note for note in facts.workers[0].notes if note.startswith(("Sums over", "Self-check"))]
    output = 6 if options.smoke else 128
    for batch in BATCHES[:2] if options.smoke else BATCHES:
        generate(llm, batch, 16, output)
        _, first = generate(llm, batch, 16, 2)
        _, whole = generate(llm, batch, 16, output)
        found["step_ms"][batch] = (whole - first) / (output - 2) * 1000
    counts, length, output = AT_ONCE.get(layout.partition("-")[0], ((500,), 128, 512))
    found["output_tok_s"] = {}
    for count, length, output in [(8, 9, 6)] if options.smoke else [(count, length, output) for count in counts]:
        generate(llm, count, length, 8)  # kernels are compiled and graphs captured for as many requests
        _, seconds = generate(llm, count, length, output)
        found["output_tok_s"][count] = count * output / seconds
    llm.shutdown()
    return found


def serve(options: argparse.Namespace, layout: str) -> dict[str, Any]:
    """Measure a layout behind HTTP: output tokens/s of 1,000 requests at once, and of 128 in flight."""
    settings, model = settings_of(options, layout), model_of(layout)
    with serving(settings.serve_flags(model)) as server:
        url = server.wait_for_url(START_SECONDS)
        found: dict[str, Any] = {"start_s": time.monotonic() - server.launched}

        def output_tok_s(requests: int, output: int, **flags: int) -> float:
            with contextlib.redirect_stdout(sys.stderr):  # of this process the last line is its result
                summary = load(
                    url, num_prompts=settings.requests(requests), random_input_len=settings.tokens(128),
                    random_output_len=settings.tokens(output), vocab_size=settings.vocab_size(model),
                    num_client_processes=1 if options.smoke else 4, **flags,
                )  # fmt: skip
            if summary["failed"]:
                raise RuntimeError(f"{summary['failed']} requests failed")
            rate: float = summary["output_throughput"]
            return rate

        output_tok_s(1000, 32)  # kernels are compiled and graphs captured for as many requests
        found["at_once"] = output_tok_s(1000, 512)
        found["in_flight_128"] = output_tok_s(1024, 256, max_concurrency=128)
    return found


def kill(options: argparse.Namespace, layout: str, module: str) -> dict[str, Any]:
    """Kill a process of `module` now and then; return how often, and the slowest end of a group in seconds."""
    import psutil

    from headrace.errors import EngineDeadError

    draw, count, output = random.Random(SEED), 6, 20 if options.smoke else 400
    started = time.monotonic()
    until = started + (0.0 if options.smoke else KILL_SECONDS)
    expected: list[list[int]] = []
    ends: list[float] = []
    while True:
        print(f"{time.monotonic() - started:.0f} s: start after {len(ends)} kills", file=sys.stderr, flush=True)
        llm = engine(options, layout, batch_invariant=not options.smoke or not LAYOUTS[layout].ep)
        tokens, _ = generate(llm, count, 9, 6)
        expected = expected or tokens
        if tokens != expected:
            raise RuntimeError(f"a start after {len(ends)} kills gave other tokens")
        children = psutil.Process().children(recursive=True)
        ranks = [child for child in children if module in child.cmdline()]
        victim = draw.choice(ranks)
        with ThreadPoolExecutor(1) as pool:
            load = pool.submit(generate_on, llm, count, output)
            time.sleep(draw.random() * (0.5 if options.smoke else KILL_EVERY / 2))
            began = time.monotonic()
            victim.kill()
            try:
                load.result()
                raise RuntimeError("a rank was killed, and the load went on")
            except EngineDeadError as error:
                if "died (exit code -9)" not in str(error):
                    raise RuntimeError(f"the error does not name the rank: {error}") from error
        _, alive = psutil.wait_procs(ranks, timeout=5)
        ends.append(time.monotonic() - began)
        if alive:
            raise RuntimeError(f"{len(alive)} ranks outlived a killed one by 5 s")
        llm.shutdown()
        if time.monotonic() + KILL_EVERY > until:  # another might end too late
            return {"kills": len(ends), "slowest_end_s": max(ends)}


def run_part(part: str, options: argparse.Namespace) -> dict[str, Any]:
    if part.startswith("step-"):
        return step(options, part.removeprefix("step-"))
    if part.startswith("serve-"):
        return serve(options, part.removeprefix("serve-"))
    if part == "kill":
        return kill(options, "pp2" if options.gpus < 4 else "tp2-pp2", "headrace.executor.rank")
    if part == "kill-experts":
        return kill(options, "moe-dp2-ep2", "headrace.engine.core_process")
    if part == "streams":
        from peer_sums import two_streams

        return two_streams(options.smoke)
    return {"collectives": collectives, "equal": equal}[part](options)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=2, help="GPUs of this machine to use")
    parser.add_argument("--part", help="parts, with commas between them; default: all")
    parser.add_argument("--json", type=Path, help="results, which are read first: parts in it are left out")
    parser.add_argument("--again", action="store_true", help="measure parts anew that are in --json")
    parser.add_argument("--smoke", action="store_true", help="a toy model on the CPU")
    for name in ("--only", "--work", "--rank-of"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        time_collectives(options)
        return 0
    if options.only:
        print(json.dumps(run_part(options.only, options)))
        return 0
    known = options.json is not None and options.json.exists()
    results: dict[str, Any] = json.loads(options.json.read_text()) if known else {}
    failed = 0
    for part in options.part.split(",") if options.part else parts_for(options.gpus):
        if "error" not in results.get(part, {"error": ""}) and not options.again:
            continue
        results[part] = run_alone(part, options)
        failed += "error" in results[part]
        print(f"{part}: {json.dumps(results[part])}", flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps(results, indent=1))
    return int(failed > 0)


def run_alone(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process of its own; return what it measured, with its seconds, or its error."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as work:
        command = [sys.executable, __file__, "--only", part, "--work", work, "--gpus", str(options.gpus)]
        command += ["--smoke"] if options.smoke else []
        interpreted = {"TRITON_INTERPRET": "1"} if options.smoke and part == "streams" else {}
        # while a rank of `streams` spins, no code may be loaded
        environment = child_environment(CUDA_MODULE_LOADING="EAGER" if part == "streams" else "LAZY", **interpreted)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=MOST_SECONDS, env=environment)
        except subprocess.TimeoutExpired as late:
            said = (late.stderr or b"").decode(errors="replace").strip()  # bytes, even where text is asked for
            return {"error": f"took longer than {MOST_SECONDS} s; it said last: {said[-1000:]}"}
    if done.returncode:
        return {"error": done.stderr.strip()[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"seconds": round(time.perf_counter() - began, 1)}


if __name__ == "__main__":
    sys.exit(main())
