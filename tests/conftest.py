"""Child processes of the tests find what is in `tests` too, though they search no working directory."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
