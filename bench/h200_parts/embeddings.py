"""Measures how many texts a second become vectors, by a decoder and by an encoder of 0.6 billion weights."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

from h200_parts.bounds import Cost, linear_seconds
from h200_parts.models import TOY, in_catalogue
from h200_parts.rows import Result
from h200_parts.run import Run
from h200_parts.settings import SEED
from headrace.cli.bench.datasets import BenchRequest, PromptMaker
from headrace.llm import LLM
from headrace.model_config import ModelConfig
from headrace.models.served import describe
from headrace.quantization.formats import PLAIN

EMBEDDERS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": in_catalogue("qwen3-8b", "qwen3") | {
        "architectures": ["Qwen3Model"], "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True,
    },
    "bge-m3": {
        "architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "hidden_size": 1024,
        "torch_dtype": "bfloat16", "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "vocab_size": 250002, "max_position_embeddings": 8194, "type_vocab_size": 1,
        "pad_token_id": 1, "layer_norm_eps": 1e-5,
    },
}  # fmt: skip
"""sizes of Qwen3-Embedding-0.6B and of bge-m3"""
TEXTS = {128: 4096, 512: 2048}
"""tokens of a text -> texts of a run"""


def embedding_rows(run: Run) -> None:
    """Measure each model at each length. The bound is the time of all products and of all pairs that are attended."""
    ceilings, settings = run.measure_chip(), run.settings
    for name, config in EMBEDDERS.items():
        config = {**config, **{key: TOY[key] for key in config.keys() & TOY}} if run.smoke else config
        spec = describe(ModelConfig.from_dict(config))
        cost, both_sides = Cost.of(spec, PLAIN, PLAIN), "XLMRobertaModel" in config["architectures"]
        knobs: dict[str, Any] = {
            "load_format": "dummy",
            "seed": SEED,
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
        }
        llm = LLM(settings.write_config(name, config), **knobs, **settings.place(0.5), **settings.engine)
        maker = PromptMaker(SEED, config["vocab_size"])
        for tokens, texts in TEXTS.items():
            length, count = settings.tokens(tokens), settings.requests(texts)
            one = [BenchRequest(prompt_len=length, output_len=1, segments=[(n + 1, length)]) for n in range(count)]
            prompts = [{"prompt_token_ids": maker.token_ids(request)} for request in one]
            samples = []
            for repeat in range(1 + settings.repeats):
                start = time.perf_counter()
                made = llm.embed(prompts, use_tqdm=False)
                if repeat:
                    samples.append(count / (time.perf_counter() - start))
            pairs = length * length if both_sides else length * (length + 1) / 2
            of_pair = sum(layers * mixer.flops_per_pair for mixer, layers in cost.mixers)
            least = linear_seconds(cost, ceilings, count * length, 0) + count * pairs * of_pair / ceilings.bf16
            whole = len(made) == count and all(len(each.outputs.embedding) == spec.hidden_size for each in made)
            bound, row = count / least, f"embeddings/{name}/{tokens}"
            run.emit(Result(row, median(samples), samples, {"prompt": count * length}, bound=bound, valid=whole))
        llm.shutdown()
