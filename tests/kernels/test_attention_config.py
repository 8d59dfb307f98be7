"""The planned launches: enough tiles for any batch, splits that a graph may hold, tiles that fit any head."""

import itertools
import random

import pytest

from headrace.kernels.attention_config import (
    DECODE,
    MAX_SPLITS,
    PREFILL,
    UNPACKED_BYTES,
    pick_config,
    pick_splits,
    plan_attention,
    unpacked_block_bytes,
)

FAMILIES = ("cuda", "hip")


def test_both_tables_have_the_same_rows():
    assert DECODE.keys() == PREFILL.keys()
    assert {family for family, _, _ in DECODE} == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("element_size", [1, 2, 4])
def test_a_tile_holds_at_least_one_query_of_every_group(family, element_size):
    for head_dim, group, decode in itertools.product((8, 80, 128, 256), (1, 3, 8, 17, 71), (True, False)):
        config = pick_config(decode, head_dim, group, element_size, family)
        assert config.block_m >= group
        for size in (config.block_m, config.block_n):
            assert size >= 16
            assert size & (size - 1) == 0


def test_wider_heads_than_the_tables_are_refused():
    with pytest.raises(KeyError):
        pick_config(True, 512, 1, 2, "cuda")


def test_tiles_are_enough_however_tokens_fall_on_requests():
    for _ in range(300):
        decodes, chunks = random.randint(0, 5), [random.randint(1, 200) for _ in range(random.randint(1, 9))]
        group = random.choice((1, 3, 4, 8))
        plan = plan_attention(
            decodes + len(chunks), decodes + sum(chunks), decodes, 4096, 2 * group, 2, 128, 2, "cuda", 132,
            copy_engine=random.random() < 0.5,
        )  # fmt: skip
        block_q = plan.prefill.block_m // group
        start = 0
        for index, count in enumerate(chunks):
            last_tile = start // block_q + index + -(-count // block_q) - 1
            assert last_tile < plan.prefill_tiles
            start += count


def test_splits_are_few_where_there_is_parallelism_and_many_where_not():
    assert pick_splits(1024, 8, 131072, 64, 132) == 1
    assert pick_splits(1, 8, 131072, 64, 132) == MAX_SPLITS
    assert pick_splits(1, 8, 100, 64, 132) == 1
    for tiles, length in itertools.product((1, 3, 8, 40), (1, 500, 9000)):
        splits = pick_splits(tiles, 8, length, 32, 132)
        assert splits & (splits - 1) == 0
        assert splits <= MAX_SPLITS


@pytest.mark.parametrize(
    ("tokens", "head_dim", "wanted"),
    [(8192, 128, True), (8192, 64, True), (260, 128, True), (200, 128, False), (8192, 256, False)],
)
def test_the_copy_engine_serves_prompts_that_fill_the_chip_in_its_tiles(tokens, head_dim, wanted):
    plan = plan_attention(3, tokens, 2, 8192, 32, 8, head_dim, 2, "cuda", 132, copy_engine=True)
    assert plan.prefill.copy_engine == wanted
    assert plan.num_decodes == 2
    assert plan.prefill_splits == 1 or not wanted
    assert not plan_attention(3, tokens, 2, 8192, 32, 8, head_dim, 2, "cuda", 132).prefill.copy_engine


@pytest.mark.parametrize(
    ("requests", "tokens", "longest", "blocks"),
    [
        (3, 2048, 8192, 128),
        (3, 2048, 8130, 128),
        (3, 2048, 40_000, 0),  # no room
        (9, 128, 8192, 0),  # so few queries that unpacking costs more
        (3, 200, 8192, 0),  # too few tiles
    ],
)
def test_of_an_fp8_cache_what_they_read_is_unpacked_where_there_is_room_and_work(requests, tokens, longest, blocks):
    decodes = 1
    plan = plan_attention(
        requests,
        tokens + decodes,
        decodes,
        131_072,
        32,
        8,
        128,
        1,
        "cuda",
        132,
        copy_engine=True,
        max_prompt_len=longest,
    )
    assert plan.unpacked_blocks == blocks
    assert plan.prefill.copy_engine == bool(blocks)
    room = (requests - decodes) * blocks * unpacked_block_bytes(8, 128)
    assert room <= UNPACKED_BYTES


def test_a_window_is_not_cut_into_more_splits_than_it_has_keys_for():
    full = plan_attention(2, 40, 1, 1 << 17, 64, 8, 64, 2, "cuda", 132)
    windowed = plan_attention(2, 40, 1, 1 << 17, 64, 8, 64, 2, "cuda", 132, window=128)
    assert windowed.decode_splits * windowed.decode.block_n <= 128
    assert windowed.prefill_splits * windowed.prefill.block_n <= 256
    assert full.decode_splits > windowed.decode_splits
    wide = plan_attention(2, 40, 1, 1 << 17, 64, 8, 64, 2, "cuda", 132, window=1 << 18)
    assert wide == full


def test_a_decode_batch_plans_no_prefill():
    plan = plan_attention(7, 7, 7, 8192, 32, 8, 128, 2, "cuda", 132)
    assert plan.prefill_tiles == 0
    assert plan.num_decodes == 7


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("group", [1, 4, 71])
def test_batch_invariant_launches_differ_in_nothing_but_their_number(family, group):
    plans = {
        plan_attention(reqs, tokens, decodes, longest, 2 * group, 2, 128, 2, family, 132, True)
        for reqs, tokens, decodes, longest in ((1, 1, 1, 5), (64, 64, 64, 9000), (1, 500, 0, 500), (9, 300, 4, 1 << 17))
    }
    assert {(p.num_decodes, p.decode_splits, p.prefill_splits) for p in plans} == {(0, 1, 1)}
    (config,) = {p.prefill for p in plans}
    assert not config.fp_fusion
