"""The interpreted kernels' tests are run by test_interpreted.py, in their own process; compiling comes last."""

import sys

collect_ignore = [] if any("interpreted" in argument for argument in sys.argv) else ["interpreted"]


def pytest_configure(config):
    config.addinivalue_line("markers", "compiles: compiles kernels ahead of time, for a minute or so; runs last")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.get_closest_marker("compiles") is not None)
