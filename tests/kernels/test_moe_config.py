"""The launch tables of the experts' kernels: something for every size, in shapes that the kernels can take."""

import itertools

import pytest

from headrace.kernels.moe_config import BYTES, FEW, FEW_TOKENS, INVARIANT, MANY, pick_moe_config

KEYS = list(itertools.product(("cuda", "hip"), BYTES))
LARGEST_LDS = 65536


def is_power_of_2(n):
    return n & (n - 1) == 0


@pytest.mark.parametrize(("family", "kind"), KEYS, ids=str)
def test_every_size_has_a_configuration_that_fits(family, kind):
    for num_tokens, (num_experts, top_k) in itertools.product(
        (1, 2, 3, 8, 100, 5000, 1 << 17), ((128, 8), (8, 2), (60, 4), (1, 1))
    ):
        for invariant in (False, kind != "fp8"):
            config = pick_moe_config(num_tokens, top_k, num_experts, kind, family, invariant)
            assert config.block_m == 1 or (config.block_m >= 16 and is_power_of_2(config.block_m))
            for tile, rows in ((config.up, 2 * config.up.block_n), (config.down, config.down.block_n)):
                assert is_power_of_2(tile.block_n)
                assert is_power_of_2(tile.block_k)
                assert config.block_m == 1 or tile.block_n >= 16
                if kind.startswith("tiled"):  # whole tiles and blocks, or quarters of tiles
                    assert rows % (16 if config.block_m == 1 else 64) == 0
                    assert tile.block_k % 128 == 0
                x_bytes = BYTES[kind] if kind in ("float", "fp8") else 2
                held = (rows * BYTES[kind] + config.block_m * x_bytes) * tile.block_k * max(1, tile.num_stages - 1)
                assert held <= (LARGEST_LDS if family == "hip" else 227 << 10)


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_tables_are_whole_and_rise(key):
    assert (key in FEW) == (FEW_TOKENS[key] > 0)
    assert (key in INVARIANT) == (key[1] != "fp8")
    assert key not in FEW or FEW[key].block_m == 1
    bounds = [most for most, _ in MANY[key]]
    assert bounds == sorted(bounds)
    assert bounds[-1] == float("inf")


def test_a_batch_that_is_invariant_has_one_configuration():
    assert len({pick_moe_config(n, 8, 128, "half", "cuda", True) for n in (1, 2, 50, 5000)}) == 1
