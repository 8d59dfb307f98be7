"""How far are headrace's 16-bit logits from fp32, compared with transformers' own 16-bit logits?

    python bench/logits_vs_transformers.py [--layers 4] [--batch-sizes 1,8,64] [--device cuda]

Makes an 8B-shaped Llama of a few layers with random weights, decodes greedily with headrace (ragged prompts, chunked
prefill, decode graphs), and feeds the very same tokens to transformers in fp32 and in bf16. Prints
||logits - fp32|| / ||fp32|| of both; exits 1 if headrace's is more than 1.2 x that of transformers.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config import EngineConfig
from headrace.model_config import ModelConfig
from headrace.planner.decisions import decide_before_load
from headrace.request import EngineCoreRequest
from headrace.runner.worker import Worker
from headrace.sampling.sampler import Sampler, SampleResult
from headrace.sampling_params import SamplingParams
from headrace.scheduler.scheduler import Scheduler, SchedulerConfig

NEW_TOKENS = 16
LIMIT = 1.2


class RecordingSampler:
    """Keeps a copy of the logits that each step samples from."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, *args: Any, **keywords: Any) -> SampleResult:
        self.logits.append(logits.float().cpu())
        return self._sampler.sample(logits, *args, **keywords)


def run_headrace(worker: Worker, scheduler: Scheduler, prompts: list[list[int]]) -> list[tuple[list[int], Tensor]]:
    """(prompt + output tokens, logits of each output token # [NEW_TOKENS, vocab_size]) a prompt."""
    recorder = RecordingSampler(worker.runner.sampler)
    worker.runner.sampler = recorder  # type: ignore[assignment]
    for index, prompt in enumerate(prompts):
        params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        scheduler.add_request(
            EngineCoreRequest(
                request_id=str(index), prompt_token_ids=prompt, params=params, max_tokens=NEW_TOKENS, seed=0
            )
        )
    tokens = [list(prompt) for prompt in prompts]
    logits: list[list[Tensor]] = [[] for _ in prompts]
    while scheduler.has_work():
        step = scheduler.schedule()
        if step is None:
            break
        before = len(recorder.logits)
        output = worker.execute(step).result()
        step_logits = recorder.logits[before] if len(recorder.logits) > before else None
        results = [result for result in scheduler.update(step, output) if result.new_token_ids]
        for position, result in enumerate(results):
            index = int(result.request_id)
            tokens[index] += result.new_token_ids
            assert step_logits is not None
            logits[index].append(step_logits[position])
    worker.runner.sampler = recorder._sampler
    return [(ids, torch.stack(rows)) for ids, rows in zip(tokens, logits, strict=True)]


@torch.inference_mode()
def run_transformers(model: LlamaForCausalLM, sequences: list[list[int]]) -> list[Tensor]:
    found = []
    for ids in sequences:
        inputs = torch.tensor([ids[:-1]], device=model.device)
        found.append(model(inputs, logits_to_keep=NEW_TOKENS).logits[0].float().cpu())
    return found


def relative_error(found: list[Tensor], reference: list[Tensor]) -> float:
    a, b = torch.cat(found).double(), torch.cat(reference).double()
    return ((a - b).norm() / b.norm()).item()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--batch-sizes", default="1,8,64")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    dtype = getattr(torch, args.dtype)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=128256,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 7 // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 128,
        num_key_value_heads=max(1, args.hidden_size // 512),
        max_position_embeddings=8192,
        rope_theta=500000.0,
    )
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with torch.device(args.device):
            LlamaForCausalLM(shape).to(dtype).save_pretrained(folder)
        reference = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(args.device).eval()
        same = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).to(args.device).eval()
        model_config = ModelConfig.from_folder(folder)
        wanted = EngineConfig(
            model=name, dtype=args.dtype, max_model_len=2048, gpu_memory_utilization=0.3, max_num_batched_tokens=1024
        )
        config, _ = decide_before_load(wanted, model_config, args.device)
        worker = Worker(config, folder, model_config)
        print(worker.load())
        worker.initialize_cache(4096)
        for batch in map(int, args.batch_sizes.split(",")):
            generator = torch.Generator().manual_seed(batch)
            lengths = torch.randint(1, 512, (batch,), generator=generator).tolist()
            prompts = [torch.randint(0, 128256, (n,), generator=generator).tolist() for n in lengths]
            assert config.max_num_seqs is not None
            assert config.max_num_batched_tokens is not None
            assert config.max_model_len is not None
            settings = SchedulerConfig(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                block_size=config.block_size,
                num_blocks=4096,
                enable_prefix_caching=True,
                enable_chunked_prefill=True,
                policy="fcfs",
            )
            ours = run_headrace(worker, Scheduler(settings), prompts)
            sequences = [ids for ids, _ in ours]
            exact = run_transformers(reference, sequences)
            error = relative_error([rows for _, rows in ours], exact)
            theirs = relative_error(run_transformers(same, sequences), exact)
            worst = max(worst, error / theirs)
            print(
                f"batch {batch:3d}: headrace {error:.3e}  transformers {theirs:.3e}  ratio {error / theirs:.3f} "
                f"(limit {LIMIT})"
            )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
