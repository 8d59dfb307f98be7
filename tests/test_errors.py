"""Errors that cross a process boundary as data."""

from __future__ import annotations

import pytest
import torch

from headrace.errors import ConfigError, EngineDeadError, OutOfMemoryError, RequestError, crossing_name, rebuild


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ConfigError("x"), ConfigError),
        (OutOfMemoryError("x"), OutOfMemoryError),
        (torch.OutOfMemoryError("x"), EngineDeadError),  # no mistake of the user's
        (RequestError("x"), EngineDeadError),
        (ValueError("x"), EngineDeadError),
    ],
)
def test_only_our_own_start_up_errors_arrive_as_themselves(error: Exception, arrives: type[Exception]) -> None:
    assert type(rebuild(crossing_name(error), str(error), EngineDeadError("dead"))) is arrives
