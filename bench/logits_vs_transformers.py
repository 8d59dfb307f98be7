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

import torch
from h200_parts.forced import run, stepped_core
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config import EngineConfig

NEW_TOKENS = 16
LIMIT = 1.2


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
        wanted = EngineConfig(
            model=name,
            dtype=args.dtype,
            kv_cache_dtype=args.dtype,
            device=args.device,
            max_model_len=2048,
            gpu_memory_utilization=0.3,
            max_num_batched_tokens=1024,
            num_gpu_blocks_override=4096,
        )
        with stepped_core(wanted, folder) as core:
            print(core.facts.workers[0])
            for batch in map(int, args.batch_sizes.split(",")):
                generator = torch.Generator().manual_seed(batch)
                lengths = torch.randint(1, 512, (batch,), generator=generator).tolist()
                prompts = [torch.randint(0, 128256, (n,), generator=generator).tolist() for n in lengths]
                ours = run(core, prompts, NEW_TOKENS)
                sequences = [prompt + said.tokens for prompt, said in zip(prompts, ours, strict=True)]
                exact = run_transformers(reference, sequences)
                error = relative_error([said.logits.float().cpu() for said in ours], exact)
                theirs = relative_error(run_transformers(same, sequences), exact)
                worst = max(worst, error / theirs)
                print(
                    f"batch {batch:3d}: headrace {error:.3e}  transformers {theirs:.3e}  ratio {error / theirs:.3f} "
                    f"(limit {LIMIT})"
                )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
