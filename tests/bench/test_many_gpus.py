"""The script of several GPUs: which parts there are, that a run goes on where it was, and a toy run on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import many_gpus
import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "many_gpus.py"


def test_parts_are_those_that_the_gpus_can_run() -> None:
    dense, sparse = ("tp1", "tp2", "pp2", "dp2", "tp2-nodes2"), ("tp1", "tp2", "ep2", "dp2", "dp2-ep2")
    further = ("70b-tp2", "70b-pp2", "lite-tp2", "lite-dp2-ep2")
    steps = [f"step-{name}" for name in (*dense, *(f"moe-{name}" for name in sparse), *further)]
    served = [f"serve-{name}" for name in ("tp1", "dp2", *(f"moe-{name}" for name in sparse))]
    assert many_gpus.parts_for(2) == ["streams", "collectives", "equal", *steps, *served, "kill", "kill-experts"]
    assert {"step-tp8", "step-tp4-pp2", "step-moe-dp8-ep8"} <= {*many_gpus.parts_for(8)}


def test_a_run_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Parts that failed are run again, others only if that is asked."""
    results = tmp_path / "many.json"
    results.write_text(json.dumps({"equal": {"error": "no"}, "kill": {"kills": 3}}))
    ran: list[str] = []

    def run_alone(part: str, options: Any) -> dict[str, Any]:
        ran.append(part)
        return {"error": "again"} if part == "step-pp2" else {"seconds": 1}

    monkeypatch.setattr(many_gpus, "run_alone", run_alone)
    command = ["many_gpus.py", "--part", "equal,step-pp2,kill", "--json", str(results)]
    monkeypatch.setattr(sys, "argv", command)
    assert many_gpus.main() == 1
    assert ran == ["equal", "step-pp2"]
    assert json.loads(results.read_text())["equal"] == {"seconds": 1}
    monkeypatch.setattr(sys, "argv", [*command, "--again"])
    many_gpus.main()
    assert ran[2:] == ["equal", "step-pp2", "kill"]


def test_two_shots_break_even_where_they_are_the_fastest_at_all_larger_sizes() -> None:
    library = {"nccl": [7, 9, 40, 160], "one": [2, 5], "FP": [6, 6, 41, 150]}
    times = {**library, "INT8": [6, 4, 30, 90], "INT6": [1, 9, 9, 200], "INT4": [1, 4, 9, 20]}
    found = {f"all_reduce-{name}": dict(zip((1, 8, 512, 2048), us, strict=False)) for name, us in times.items()}
    token = 2 * many_gpus.HIDDEN
    assert many_gpus.break_even(found) == {"FP": 2048 * token, "INT8": 8 * token, "INT4": token}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_toy_run_on_the_cpu(tmp_path: Path) -> None:
    results = tmp_path / "many.json"
    done = subprocess.run([sys.executable, SCRIPT, "--smoke", "--json", results], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    found = json.loads(results.read_text())
    assert list(found) == many_gpus.parts_for(2)
    layouts = [part.removeprefix("step-") for part in found if part.startswith("step-")]
    assert found["equal"]["same"] == {layout: True for layout in layouts if not layout.startswith(("70b", "lite"))}
    assert found["kill"]["kills"] == found["kill-experts"]["kills"] == 1
