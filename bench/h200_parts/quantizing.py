"""Times `headrace quantize` on a random model of the 8B's sizes, which it writes to the disk first."""

from __future__ import annotations

import shutil
import time

import torch

from h200_parts.numerics import write_random_model
from h200_parts.rows import Result
from h200_parts.run import Run
from headrace.cli.main import main as headrace_main
from headrace.hub import resolve_model_folder
from headrace.model_config import ModelConfig

SCHEMES = {"fp8": [], "w4a16_gptq": ["--num-calib-data=128", "--seq-len=512"]}
"""scheme -> its flags"""


def quantizing_rows(run: Run) -> None:
    """Time each scheme. The tokenizer is the demo model's, whose tokens the 8B's vocabulary has too."""
    run.measure_chip()
    demo, settings, on_gpu = resolve_model_folder("demo"), run.settings, run.settings.device == "cuda"
    start = time.perf_counter()
    layers, vocab_size = (2, ModelConfig.from_folder(demo).vocab_size) if run.smoke else (32, None)
    folder = write_random_model(settings.work / "8b", settings, layers, vocab_size=vocab_size)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(demo / name, folder / name)
    print(f"the model was written in {time.perf_counter() - start:.0f} s", flush=True)
    for scheme, flags in SCHEMES.items():
        if on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        output, start = settings.work / scheme, time.perf_counter()
        command = ["quantize", str(folder), f"--output-dir={output}", f"--quant-scheme={scheme}"]
        code = headrace_main([*command, f"--device={settings.device}", *flags])
        seconds = time.perf_counter() - start
        notes = [f"peak of GPU memory {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB"] if on_gpu else []
        run.emit(Result(f"quantizing/{scheme}", seconds, notes=notes, valid=code == 0))
        shutil.rmtree(output)
