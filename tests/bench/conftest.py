from __future__ import annotations

import sys
from pathlib import Path

BENCH = str(Path(__file__).parents[2] / "bench")
if BENCH not in sys.path:  # where Python itself looks when `bench/h200.py` is run
    sys.path.insert(0, BENCH)
