"""Two ranks over gloo compute what one computes, on both ranks bit for bit the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from driver import Driver
from mixed_format import quantize
from safetensors.torch import load_file
from tiny_configs import ALIKE, VARIANTS, save_tiny_model
from tp_rank import check_two, run, run_two

CHOSEN = [
    ("LlamaForCausalLM", "biases"),
    ("LlamaForCausalLM", "mqa-odd-vocab"),  # one KV head, held by both ranks; 101 rows of vocabulary
    ("Qwen2ForCausalLM", "tied"),
    ("Qwen2MoeForCausalLM", "dense-layers"),  # the shared expert is summed before the ranks are
]
CASES = [*CHOSEN, *((architecture, next(iter(variants))) for architecture, variants in VARIANTS.items())]


@pytest.fixture(scope="module")
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The model of each case that runs, with what the two ranks computed of it."""
    root = tmp_path_factory.mktemp("tp")
    items = [item for item in request.session.items if item.path == request.path]
    cases = [item.callspec.params["case"] for item in items if hasattr(item, "callspec")]
    folders = {case: root / "-".join(case) for case in cases}
    for case, folder in folders.items():
        save_tiny_model(*case, folder)
    mixed = folders["formats", "that mix"] = root / "mixed"
    save_tiny_model("Qwen3MoeForCausalLM", "full", mixed)
    some = r"layers\.1\.mlp\.experts\.\d+\.(gate|down)_proj|layers\.0\.self_attn\.[ko]_proj"  # of fused ones, too
    quantize(mixed, some, root / "plain")
    run_two(root / "rendezvous", folders.values())
    return folders


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case[0] in ALIKE and case not in CHOSEN else ()) for case in CASES],
    ids="-".join,
)
def test_two_ranks_equal_one(folders: dict[tuple[str, str], Path], case: tuple[str, str]) -> None:
    # a state takes rounding errors on from token to token: one rank and two are each up to 2e-5 from float64
    check_two(folders[case], 1e-4 if case[0].startswith(("Qwen3_5", "Qwen3Next")) else 1e-5)


def test_two_ranks_of_a_checkpoint_in_several_formats_equal_one(
    folders: dict[tuple[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that one the plain model that it stands for."""
    folder = folders["formats", "that mix"]
    one, first = run(Driver(folder)), load_file(folder / "rank0")
    plain = run(Driver(folder.with_name("plain")))
    for step, logits in plain.items():
        assert (one[step] - logits).abs().max() <= 1e-5 * logits.abs().max()
        assert (first[step] - logits).abs().max() <= 1e-5 * logits.abs().max()
