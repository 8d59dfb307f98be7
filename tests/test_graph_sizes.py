"""Which sizes are captured, and in what order: pure numbers."""

from __future__ import annotations

import pytest

from headrace.graph_sizes import GraphSettings, capture_sizes, most_in_pieces


def test_sizes() -> None:
    assert capture_sizes(6) == [1, 2, 4, 6]
    assert capture_sizes(512)[-3:] == [448, 480, 512]
    assert capture_sizes(1000)[-2:] == [960, 1000]

    def of(tokens: int = 8192, pieces: int = 512, **given: object) -> GraphSettings:
        settings = GraphSettings.of({"cudagraph_mode": "FULL_AND_PIECEWISE", **given}, 100, tokens, 4096, pieces)
        assert settings is not None
        return settings

    assert of().decode_sizes[-1] == 100
    assert of().other_sizes[-1] == 512
    assert of().most_tokens == 512
    assert of(200).other_sizes[-1] == 200
    assert of(pieces=2048).other_sizes[-2:] == (1984, 2048)
    assert of(pieces=2048, cudagraph_mode="FULL").other_sizes[-1] == 512
    assert of(pieces=640).warmup_sizes[:6] == [(1, 640), (1, 1), (2, 512), (2, 2), (1, 512), (4, 4)]
    assert of(cudagraph_mode="FULL_DECODE_ONLY").warmup_sizes[:3] == [(100, 100), (1, 1), (2, 2)]
    wide = GraphSettings.of({"cudagraph_mode": "FULL_AND_PIECEWISE"}, 1024, 8192, 4096)
    assert wide is not None
    assert wide.warmup_sizes[:3] == [(1024, 1024), (1, 1), (2, 512)]
    assert len(wide.warmup_sizes) == len(set(wide.warmup_sizes))
    short = GraphSettings.of({"cudagraph_mode": "FULL_AND_PIECEWISE"}, 100, 8192, 128)
    assert short is not None
    assert [step for step in short.warmup_sizes if step[1] in (512, 128, 112)][::-1] == [
        (1, 112), (2, 112), (1, 128), (2, 128), (4, 512)
    ]  # fmt: skip
    assert [tokens for _, tokens in of(pieces=704).warmup_sizes[-3:]] == [2, 640, 576]
    assert (of().alone_sizes[0], of().alone_sizes[-1], len(of().alone_sizes)) == (4, 512, 29)
    assert of(cudagraph_mode="PIECEWISE").alone_sizes == of(cudagraph_mode="FULL").alone_sizes == ()
    assert of().num_full == len(of().decode_sizes) + 29
    assert of(cudagraph_capture_sizes=[2, 64, 1000]).decode_sizes == (2, 64)
    assert of(cudagraph_capture_sizes=[2, 64, 1000]).other_sizes == (2, 64, 1000)
    assert of(max_cudagraph_capture_size=16).decode_sizes == (1, 2, 4, 8, 16)
    assert of(max_cudagraph_capture_size=1024).other_sizes[-1] == 1024
    assert GraphSettings.of({"cudagraph_mode": "NONE"}, 100, 8192, 4096) is None


@pytest.mark.parametrize(
    ("layer_weights", "most"),
    [(218e6, 512), (218e6 / 4, 2048), (57e6, 2048), (109e6, 1088), (855e6 / 4, 512), (0, 2048)],
)
def test_smaller_layers_are_captured_up_to_larger_steps(layer_weights: float, most: int) -> None:
    """An 8B, the same in fp8, Qwen3-30B-A3B, an 8B on two ranks, a 70B in fp8"""
    assert most_in_pieces(layer_weights) == most
