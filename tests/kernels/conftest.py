"""The interpreted kernels' tests are run by test_interpreted.py, in processes whose Triton interprets."""

import os

collect_ignore = [] if os.environ.get("TRITON_INTERPRET") == "1" else ["interpreted"]
