from __future__ import annotations

from pathlib import Path

import pytest

from tests.advice.doctor.made_up import MadeUp


@pytest.fixture
def here(tmp_path: Path) -> MadeUp:
    return MadeUp(tmp_path)
