"""Loads a folder of weights from the disk, and compares the speed with the disk's own, measured by direct reads just
before.

    python bench/load.py FOLDER [--device cuda] [--quantization fp8]
    python bench/load.py --make-8b --layers 13 --work /tmp/load      # writes layers of random weights first

The page cache is emptied of the folder's files before the first reading. `h200.py --part fp8-memory` measures how much
memory a load takes.
"""

from __future__ import annotations

import argparse
import mmap
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from h200_parts.engines import context_for
from h200_parts.numerics import write_random_model
from h200_parts.settings import Settings

from headrace.model_config import ModelConfig
from headrace.models import loader
from headrace.models.checkpoint import checkpoint_files

DIRECT_BYTES = 4 << 20
DIRECT_THREADS = (1, 4, 16)
"""The disk's speed is the best of these."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument(
        "--make-8b", action="store_true", help="write a folder of the 8B's sizes instead; on a CPU, a toy"
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path("load"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quantization")
    options = parser.parse_args()
    folder = options.folder
    if options.make_8b:
        folder = write_random_model(
            options.work / "8b", Settings(options.work, smoke=options.device == "cpu"), options.layers
        )
    if folder is None:
        parser.error("name a folder, or --make-8b")
    files = checkpoint_files(folder)
    num_bytes = sum(file.stat().st_size for file in files)
    disk = max(direct_read(files, threads) for threads in DIRECT_THREADS)
    print(f"{len(files)} files, {num_bytes / 1e9:.2f} GB; direct reads: {disk:.2f} GB/s")
    for state in ("page cache dropped", "in the page cache"):
        if state == "page cache dropped":
            drop_cache(files)
        print(f"{state}: {load(folder, num_bytes, disk, options)}")


def drop_cache(files: list[Path]) -> None:
    """Take the files out of the page cache."""
    for file in files:
        number = os.open(file, os.O_RDONLY)
        os.fsync(number)
        os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(number)


def direct_read(files: list[Path], threads: int) -> float:
    """Return the GB/s of reading all files past the page cache (through it, emptied, on a file system without that)."""
    drop_cache(files)
    try:
        opened = [(os.open(file, os.O_RDONLY | os.O_DIRECT), file.stat().st_size) for file in files]
    except OSError as error:
        print(f"no direct reads here ({error.strerror})")
        opened = [(os.open(file, os.O_RDONLY), file.stat().st_size) for file in files]
    local = threading.local()

    def read(number: int, offset: int) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, DIRECT_BYTES)  # aligned
        return os.preadv(number, [local.buffer], offset)

    start = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        parts = [pool.submit(read, number, at) for number, size in opened for at in range(0, size, DIRECT_BYTES)]
        total = sum(part.result() for part in parts)
    seconds = time.perf_counter() - start
    for number, _ in opened:
        os.close(number)
    return total / seconds / 1e9


def load(folder: Path, num_bytes: int, disk: float, options: argparse.Namespace) -> str:
    """Load the folder and return a line about it: how fast its weights were read."""
    device, config = torch.device(options.device), ModelConfig.from_folder(folder)
    context = context_for(config, device)
    seconds: list[float] = []
    fill = loader.fill_from_checkpoint

    def timed(*slots: Any, **settings: Any) -> None:
        start = time.perf_counter()
        fill(*slots, **settings)
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)

    start = time.perf_counter()
    with patch.object(loader, "fill_from_checkpoint", timed):
        model = loader.load_model(folder, config, context, quantization=options.quantization)
    whole = time.perf_counter() - start
    speed = num_bytes / seconds[0] / 1e9
    return (
        f"read in {seconds[0]:.2f} s = {speed:.2f} GB/s = {speed / disk:.0%} of the disk; with all else {whole:.1f} s; "
        f"weights {model.weight_bytes / 1e9:.2f} GB"
    )


if __name__ == "__main__":
    main()
